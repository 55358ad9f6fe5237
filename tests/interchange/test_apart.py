"""Tests that pickled files are read in a sandbox, which executes nothing in them."""

import os
import pickle
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from pentatron.checkpoint.format import DamagedCheckpoint
from pentatron.checkpoint.torch_file import TorchFile
from pentatron.errors import UserError
from pentatron.interchange.arguments import settings_from_arguments
from pentatron.interchange.reading import _Rank, read_megatron
from pentatron.interchange.torch_dist import unpickle_in_sandbox
from tests.interchange.test_runs import TORCH_DIST, without_manifest
from tests.train.test_loaded import train


class Runs:
    """An object whose unpickling makes a call, as in a file of an attacker."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call, self.args


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("clean")
    train(base / "run", TORCH_DIST.replace("--train-iters 4", "--train-iters 1"))
    return without_manifest(base / "run", base / "theirs")


def infected(place: str, trap: Path, clean: Path, out: Path) -> Path:
    """Writes a folder with a call in one of its files, which creates `trap` if it is made."""
    call = Runs(os.system, f"touch {trap}")
    # Control: an ordinary unpickling makes the call.
    pickle.loads(pickle.dumps(call))
    assert trap.exists()
    trap.unlink()
    if place == "model_optim_rng.pt":
        rank = out / "iter_0000001" / "mp_rank_00"
        rank.mkdir(parents=True)
        torch.save({"args": Namespace(num_layers=1), "model": {}, "iteration": call}, rank / place)
        return out
    shutil.copytree(clean, out)
    file = out / "iter_0000001" / place
    if place == ".metadata":
        file.write_bytes(pickle.dumps(call))
    elif place == "common.pt":
        torch.save({"args": Namespace(num_layers=1, extra=call), "iteration": 1}, file)
    return out


@pytest.mark.parametrize("place", [".metadata", "common.pt", "model_optim_rng.pt"])
def test_nothing_runs(place: str, clean: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    folder = infected(place, trap, clean, tmp_path / "folder")
    with pytest.raises(
        UserError, match=r"refers to (posix|nt)\.system, which no checkpoint needs.*nothing of it ran"
    ):
        read_megatron(folder)
    assert not trap.exists()


@pytest.mark.parametrize("clock", [False, True])
def test_a_pickle_that_hashes_without_end_is_stopped(
    tmp_path: Path, clock: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """127 bytes: a tuple of the same tuple twice, 60 levels deep, as a key. Its hash takes 2^60 steps."""
    bomb = b"\x80\x02})" + b"2\x86" * 60 + b"K\x01s."
    (tmp_path / ".metadata").write_bytes(bomb)
    assert len(bomb) < 200
    if clock:
        monkeypatch.setattr("pentatron.interchange.torch_dist._PATIENCE", 0.3)
    with pytest.raises(UserError, match=r"longer than .* seconds.* to read, so its reader was stopped"):
        unpickle_in_sandbox(tmp_path / ".metadata", seconds=1)


def test_harmless_globals_are_kept_as_names(tmp_path: Path) -> None:
    """Arguments name types and enumerations of programs that need not be installed."""
    torch.save(
        {"args": Namespace(params_dtype=torch.bfloat16, numbers={1, 2}), "iteration": 3},
        tmp_path / "common.pt",
    )
    assert unpickle_in_sandbox(tmp_path / "common.pt") == {
        "args": {
            "params_dtype": {"~": "torch.bfloat16"},
            "numbers": {"~": "__builtin__.set", "of": [[1, 2]]},
        },
        "iteration": 3,
    }


def test_a_tensor_with_code_in_it_is_not_loaded(clean: Path, tmp_path: Path) -> None:
    """The call is refused in `.distcp` files too, of which only tensors are read."""
    trap, folder = tmp_path / "trap", tmp_path / "folder"
    shutil.copytree(clean, folder)
    file = folder / "iter_0000001" / "__0_0.distcp"
    with file.open("r+b") as content:
        length = file.stat().st_size
        torch.save(Runs(os.system, f"touch {trap}"), content)
        content.truncate(length)
    with pytest.raises(UserError, match="no tensor can be read at byte 0"):
        train(tmp_path / "run", f"--load {folder} --ckpt-format torch_dist --finetune --train-iters 0")
    assert not trap.exists()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (".metadata", b"no pickle", r"\.metadata is not a file of Megatron-LM's checkpoints, or damaged"),
        ("common.pt", b"PK", r"common\.pt is not a file of Megatron-LM's checkpoints, or damaged"),
        ("metadata.json", b'{"sharded_backend": "zarr"}', "format zarr, which is not supported"),
    ],
)
def test_damage_is_a_sentence(file: str, content: bytes, message: str, clean: Path, tmp_path: Path) -> None:
    shutil.copytree(clean, tmp_path / "folder")
    (tmp_path / "folder" / "iter_0000001" / file).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_megatron(tmp_path / "folder")


def test_an_index_cannot_name_files_elsewhere(clean: Path, tmp_path: Path) -> None:
    shutil.copytree(clean, tmp_path / "folder")
    file = tmp_path / "folder" / "iter_0000001" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = "../other.distcp"
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(
        UserError, match=r"in \.\./other\.distcp, which is not a \.distcp file of this folder"
    ):
        read_megatron(tmp_path / "folder")


def test_a_small_file_cannot_become_a_large_answer(tmp_path: Path) -> None:
    """Pickles a list that refers ten times to another one, twelve levels deep."""
    nested: list[Any] = ["more"] * 10
    for _ in range(12):
        nested = [nested] * 10
    torch.save({"args": nested}, tmp_path / "common.pt")
    with pytest.raises(UserError, match="its content is larger than that of any checkpoint"):
        unpickle_in_sandbox(tmp_path / "common.pt")


def test_stages_of_a_rank_come_in_the_order_of_their_numbers() -> None:
    """`model10` must not come between `model1` and `model2`, which would exchange layers silently."""
    chunks = {f"model{number}": {"is": number} for number in range(12)}
    assert [chunk["is"] for chunk in _Rank(0, 0, 0, "file", chunks).chunks] == list(range(12))


def test_arguments_that_change_the_model_are_read_or_refused() -> None:
    arguments = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "window_attn_skip_freq": [1, 0],
    }
    assert settings_from_arguments(arguments, "it")["window_attn_skip_freq"] == "[1,0]"
    with pytest.raises(UserError, match="not supported: it was trained with softmax_type = learnable"):
        settings_from_arguments({**arguments, "softmax_type": "learnable"}, "it")


@pytest.mark.parametrize(
    "key", ["", "a|b|c|d", "saved:0:9999999||1|1", "plain:0:float99:1|0|1|1", "plain:-9:float32:1|0|1|1"]
)
def test_a_key_that_leads_nowhere_is_damage(tmp_path: Path, key: str) -> None:
    (tmp_path / "some.pt").write_bytes(bytes(64))
    with TorchFile(tmp_path / "some.pt") as file, pytest.raises(DamagedCheckpoint):
        file.get_slice(key)


@pytest.mark.parametrize(
    ("name", "value"), [("consumed_train_samples", "x"), ("kv_channels", -1), ("num_layers", 10**12)]
)
def test_arguments_that_make_no_sense_are_a_sentence(
    name: str, value: Any, clean: Path, tmp_path: Path
) -> None:
    shutil.copytree(clean, tmp_path / "folder")
    file = tmp_path / "folder" / "iter_0000001" / "common.pt"
    common = torch.load(file, weights_only=False)
    setattr(common["args"], name, value)
    torch.save(common, file)
    with pytest.raises(UserError, match=r"is not a valid checkpoint|cannot be the model"):
        read_megatron(tmp_path / "folder")


def test_an_index_that_makes_no_sense_is_a_sentence(clean: Path, tmp_path: Path) -> None:
    shutil.copytree(clean, tmp_path / "folder")
    file = tmp_path / "folder" / "iter_0000001" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for place in metadata.storage_data.values():
        place.offset = "here"
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match="is not a valid checkpoint"):
        read_megatron(tmp_path / "folder")

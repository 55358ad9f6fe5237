"""Tests that invalid folders are refused with a precise message before anything is used."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pentatron.errors import UserError
from pentatron.hf.folder import CONFIG, INDEX, SINGLE, StoredTensor, open_folder
from tests.hf.support import ours_from, save, theirs


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with several weight files."""
    return save(theirs("qwen2", num_hidden_layers=1), tmp_path_factory.mktemp("whole"), max_shard_size="10KB")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def in_one_file(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = {name: tensor for file in files(folder) for name, tensor in load_file(file).items()}
    for name, tensor in changes.items():
        tensors[name.replace("__", ".")] = tensor
    for file in (*files(folder), folder / INDEX):
        file.unlink()
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / SINGLE)


def change_index(folder: Path, key: str, file: object) -> None:
    index = json.loads((folder / INDEX).read_text())
    if file is None:
        del index["weight_map"][key]
    else:
        index["weight_map"][key] = file
    (folder / INDEX).write_text(json.dumps(index))


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **changes}))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4])


def spoil_header(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[8:12] = b"oops"
    file.write_bytes(bytes(content))


def announce_a_long_header(file: Path) -> None:
    file.write_bytes((2**62).to_bytes(8, "little") + file.read_bytes()[8:])


def only_pickled(folder: Path) -> None:
    for file in (*files(folder), folder / INDEX):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def no_weights(folder: Path) -> None:
    only_pickled(folder)
    (folder / "pytorch_model.bin").unlink()


NORM = "model.norm.weight"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "is not a folder"),
    "no config": (lambda f: (f / CONFIG).unlink(), "no config.json"),
    "config is no JSON": (lambda f: (f / CONFIG).write_text("{"), "is not JSON"),
    "config has an endless number": (lambda f: (f / CONFIG).write_text("9" * 5000), "is not JSON"),
    "config is a list": (lambda f: (f / CONFIG).write_text("[]"), "not a JSON object"),
    "no weights": (no_weights, "neither model.safetensors nor"),
    "pickle": (only_pickled, "pytorch_model.bin alone.*save_pretrained"),
    "two sets of weights": (lambda f: shutil.copy(files(f)[0], f / SINGLE), "both model.safetensors and"),
    "missing shard": (lambda f: files(f)[1].unlink(), "lacks model-00002-of-.*complete the download"),
    "truncated": (lambda f: truncate(files(f)[0]), "model-00001-of-.* is damaged"),
    "header spoilt": (lambda f: spoil_header(files(f)[0]), "model-00001-of-.* is damaged"),
    "header too long": (lambda f: announce_a_long_header(files(f)[0]), "model-00001-of-.* is damaged"),
    "empty file": (lambda f: files(f)[0].write_bytes(b""), "model-00001-of-.* is damaged"),
    "index without map": (lambda f: (f / INDEX).write_text("{}"), "no weight_map"),
    "index leads up": (lambda f: change_index(f, NORM, "../x.safetensors"), "is refused"),
    "index is absolute": (lambda f: change_index(f, NORM, "/x.safetensors"), "is refused"),
    "index names no text": (lambda f: change_index(f, NORM, 3), "is refused"),
    "key only in index": (
        lambda f: change_index(f, "extra", files(f)[0].name),
        "extra is not in model-00001",
    ),
    "key only in file": (lambda f: change_index(f, NORM, None), f"holds {NORM}, which it does not list"),
    "key missing": (lambda f: in_one_file(f, model__norm__weight=None), f"{NORM} is missing$"),
    "key left over": (lambda f: in_one_file(f, more=torch.ones(2)), "more has no place in this model$"),
    "wrong shape": (
        lambda f: in_one_file(f, model__norm__weight=torch.ones(3)),
        rf"{NORM} is \[3\], not \[32\]",
    ),
    "wrong type": (
        lambda f: in_one_file(f, model__norm__weight=torch.ones(32).to(torch.int64)),
        f"{NORM} is of type I64",
    ),
    "several": (
        lambda f: change_config(f, num_hidden_layers=3, layer_types=None),
        "24 problems.*; and 19 more$",
    ),
    "head differs": (lambda f: change_config(f, tie_word_embeddings=True), "lm_head.weight differs from"),
    "head missing": (
        lambda f: in_one_file(f, lm_head__weight=None),
        "missing .set tie_word_embeddings to true",
    ),
    "unknown family": (lambda f: change_config(f, model_type="qwen2.5"), "did you mean qwen2?"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_and_named(damage: str, folder: Path) -> None:
    hurt, sentence = DAMAGE[damage]
    hurt(folder)
    with pytest.raises(UserError, match=sentence) as error:
        ours_from(folder)
    assert "\n" not in str(error.value)


def test_one_file_and_several_hold_the_same(folder: Path) -> None:
    with open_folder(folder) as opened:
        several = {
            name: opened.read(name, (0,) * len(t.shape), t.shape).clone()
            for name, t in opened.tensors.items()
        }
        assert opened.tensors[NORM] == StoredTensor(opened.tensors[NORM].file, "F32", (32,))
        q = "model.layers.0.self_attn.q_proj.weight"
        assert torch.equal(opened.read(q, (3, 5), (4, 6)), several[q][3:7, 5:11])
    in_one_file(folder)
    with open_folder(folder) as opened:
        assert {stored.file for stored in opened.tensors.values()} == {SINGLE}
        for name, tensor in several.items():
            assert torch.equal(opened.read(name, (0,) * tensor.dim(), tuple(tensor.shape)), tensor)


def test_links_of_the_cache_of_the_hub_are_followed(folder: Path) -> None:
    blobs, snapshot = folder.parent / "blobs", folder.parent / "snapshots" / "main"
    folder.rename(blobs)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(blobs.iterdir())):
        (snapshot / file.name).symlink_to(file.rename(blobs / str(number)))
    ours_from(snapshot)

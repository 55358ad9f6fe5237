"""Tests untrusted settings, data and names: YAML objects, false sizes, names that are commands."""

import json
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from pentatron.data.indexed import FORMAT, HEADER, IndexedDataset, read_sidecar
from pentatron.data.indexed import MAGIC as OF_INDEX
from pentatron.data.sample_index import MAGIC, DamagedIndexCache, IndexCache, read_arrays
from pentatron.errors import UserError
from pentatron.monitor.recorder import append_event
from pentatron.settings.files import load_file
from pentatron.text import REDACTED, redact
from tests.security.canary import refused, run

TINY = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 50 --dataset-size 8 --micro-batch-size 1 "
    "--global-batch-size 1 --train-iters 1 --eval-interval 0 --device cpu --nproc-per-node 1 --progress-bar off"
).split()
ELSEWHERE = TINY[: TINY.index("--nproc-per-node")]
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 10)}]\n" for i in range(12)
)
YAML = {
    "a call": "lr: !!python/object/apply:os.system ['touch CANARY']",
    "an object": "lr: !!python/object/new:pathlib.Path {args: [CANARY]}",
    "a module": "lr: !!python/module:os",
    "a name": "lr: !!python/name:os.system",
    "repetitions without end": f"{BOMB}bf16: *m",
    "itself": "lr: &a [*a]",
    "depth": "lr: " + "[" * 3_000,
}


@pytest.mark.parametrize("attack", YAML)
@pytest.mark.parametrize("flag", ["--config", "--data-path-config"])
def test_yaml_holds_settings_and_nothing_else(
    tmp_path: Path, attack: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    canary, file = tmp_path / "canary", tmp_path / "settings.yaml"
    file.write_text(YAML[attack].replace("CANARY", str(canary)))
    words = [*TINY, flag, file, "--run-dir", tmp_path / "run"]
    assert len(refused(capsys, "train", *words)) < 2000
    assert not canary.exists() and not (tmp_path / "run").exists()


def test_yaml_of_people_is_read(tmp_path: Path) -> None:
    """Control: reads anchors, and numbers that YAML parses as strings."""
    (tmp_path / "x.yaml").write_text("base: &b {lr: 1e-5}\noptim: {<<: *b, clip_grad: 1}\n")
    assert load_file(tmp_path / "x.yaml")["optim"] == {"lr": "1e-5", "clip_grad": 1}


NAMES = [
    "$(touch CANARY)",
    "`touch CANARY`",
    "a\ntouch CANARY\n#",
    "a; touch CANARY",
    "a' ; touch CANARY ; '",
    "\x1b[2Ja",
]


def start(script: str, folder: Path) -> object:
    """Runs a script to its end with stubs of the commands of Slurm and Python."""
    stubs = "srun() { :; }; scontrol() { :; }; scancel() { :; }; SLURM_JOB_ID=1; SLURM_JOB_NODELIST=x\n"
    words = ["bash", "-c", stubs + script.replace("exec true", "echo")]
    return subprocess.run(words, cwd=folder, timeout=20, capture_output=True, check=False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["slurm", "torchrun"])
def test_names_in_a_script_are_refused_or_quoted(
    tmp_path: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = tmp_path / "canary"
    name = name.replace("CANARY", str(canary))
    folder = tmp_path / name.replace("/", "_").replace(str(canary).replace("/", "_"), "canary")
    folder.mkdir()
    monkeypatch.chdir(folder)
    cluster = ["launch", kind, "--nodes", "1", "--gpus-per-node", "1", *ELSEWHERE]
    refused(capsys, *cluster, "--job-name", name)
    # A folder and a setting may have any name: they are quoted, also in the comment that repeats the command.
    code, script, _ = run(capsys, *cluster, "--run-dir", name, "--python", "true", "--write", "-")
    assert code == 0
    ran = start(script, folder)
    assert not canary.exists() and not (folder / "canary").exists(), ran
    assert list(folder.iterdir()) == []
    start(run(capsys, *cluster, "--setup", f"touch {canary}", "--python", "true", "--write", "-")[1], folder)
    assert canary.exists(), "control: what the user himself has the script do is done"


@pytest.mark.parametrize("name", ["a\nlr: 9", "\x1b[2J", "$(touch canary)", "<svg onload=alert(1)>", "[red]"])
def test_a_run_may_have_any_name(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said, complaint = run(
        capsys, "train", *TINY, "--run-dir", f"runs/{name}", "--log-progress", "--job-id", name
    )
    assert code == 0 and "\x1b" not in said + complaint
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name == name and [p.name for p in tmp_path.iterdir()] == ["runs"]
    assert "\x1b" not in (folder / "train.log").read_text()
    assert load_file(folder / "config.yaml")["optim"]["lr"] != 9, "a name adds no setting"
    curve = (folder / "loss.svg").read_text()
    ElementTree.fromstring(curve)
    assert name not in curve or (name.isprintable() and "<" not in name)
    assert "\x1b" not in run(capsys, "monitor", folder, "--once")[1]


def test_a_name_adds_no_line_to_the_progress_of_a_job(tmp_path: Path) -> None:
    append_event(tmp_path / "progress.txt", "1\nJob ID: 2\tSaved checkpoint", 1, "Starting job")
    append_event(tmp_path / "progress.txt", f"hf_{'k' * 24}", 1, f"WANDB_API_KEY={'k' * 24}")
    first, second = (tmp_path / "progress.txt").read_text().splitlines()
    assert "Job ID: 2" in first and "k" * 24 not in second and second.count(REDACTED) == 2


@pytest.mark.parametrize("counts", [(2**63, 1), (2**64 - 1, 2**64 - 1), (0, 2**61), (2**60, 2)])
def test_an_index_that_lies_about_its_size_is_refused(tmp_path: Path, counts: tuple[int, int]) -> None:
    (tmp_path / "x.bin").write_bytes(b"\0" * 8)
    (tmp_path / "x.idx").write_bytes(HEADER.pack(OF_INDEX, 1, 4, *counts) + b"\0" * 64)
    with pytest.raises(UserError, match="is damaged at byte"):
        IndexedDataset(tmp_path / "x")


def sidecar(path: Path, said: Any) -> None:
    line = said if isinstance(said, bytes) else json.dumps(said).encode()
    path.write_bytes(b"%s\n%08x\n" % (line, zlib.crc32(line)))


FACTS = {
    "format": FORMAT,
    "block_bytes": 1 << 20,
    "sums_crc32": 0,
    "dtype": "<i4",
    "sequences": 0,
    "documents": 0,
    "tokens": 0,
    "largest_token": -1,
    "bin_bytes": 0,
    "idx_bytes": 0,
    "tokenizer": None,
    "job": None,
}


@pytest.mark.parametrize(
    "said",
    [
        [], 3, b"[" * 100_000, {"format": FORMAT}, {**FACTS, "tokens": "many"}, {**FACTS, "bin_bytes": 10**30},
        {**FACTS, "tokenizer": {"path": "../../x"}}, {**FACTS, "tokenizer": 3}, {**FACTS, "bin_bytes": float("inf")},
    ],
)  # fmt: skip
def test_a_forged_sidecar_is_refused(tmp_path: Path, said: Any) -> None:
    sidecar(tmp_path / "x.meta", said)
    with pytest.raises(UserError, match=r"x\.meta") as error:
        read_sidecar(tmp_path / "x")
    assert "\n" not in str(error.value)


def order(path: Path, said: Any, content: bytes = b"\0" * 64) -> None:
    header = said if isinstance(said, bytes) else json.dumps(said).encode()
    path.write_bytes(MAGIC + struct.pack("<II", len(header), zlib.crc32(header)) + header + content)


@pytest.mark.parametrize(
    "array",
    [
        {"type": "|O", "shape": [8], "at": 0},
        {"type": "<i8", "shape": [2**40], "at": 0},
        {"type": "<i8", "shape": [2**62, 4], "at": 0},
        {"type": "<i8", "shape": [1], "at": -8},
        {"type": "<i8", "shape": [-1], "at": 0},
        {"type": "<i8", "shape": "x", "at": 0},
        {"type": "evil", "shape": [1], "at": 0},
        {"type": [["a", "O"]], "shape": [1], "at": 0},
        3,
    ],
)
def test_a_forged_order_of_samples_is_not_used(tmp_path: Path, array: Any) -> None:
    said: list[str] = []
    cache = IndexCache(tmp_path, say=said.append)
    honest = {"x": np.arange(8)}
    assert (cache.get({"a": 1}, 8, lambda: honest)["x"] == np.arange(8)).all()
    (file,) = tmp_path.iterdir()
    order(file, {"arrays": {"x": array}, "bytes": 64, "crc32": zlib.crc32(b"\0" * 64)})
    with pytest.raises(DamagedIndexCache):
        read_arrays(file, verify=True)
    assert (cache.get({"a": 1}, 8, lambda: honest)["x"] == np.arange(8)).all() and len(said) == 1
    order(file, b"[" * 100_000)
    with pytest.raises(DamagedIndexCache):
        read_arrays(file, verify=False)


SECRETS = {
    "https://me:hunter22@host/data": "https://***@host/data",
    "export WANDB_API_KEY=0123456789abcdef": "export WANDB_API_KEY=***",
    "HF_TOKEN='hf_abcdefghijklmnopqrstuvwxyz'": "HF_TOKEN='***'",
    "s3://bucket/x?X-Amz-Credential=AKIA0123456789ABCDEF&a=1": "s3://bucket/x?X-Amz-Credential=***&a=1",
    "https://host/x?token=abc&b=2": "https://host/x?token=***&b=2",
    "Authorization: Bearer abcdefghijklmnop0123": "Authorization: Bearer ***",
    "hf_abcdefghijklmnopqrstuvwxyz": "***",
}
INNOCENT = [
    "tokens_per_second=12", "vocab_size: 61", "--tokenizer-model x", "eos_token: </s>", "runs/key=1", "num_tokens: 5", "git@host:x",
    "commit 0123456789abcdef0123456789abcdef01234567", "tcp://localhost:1234", "consumed_tokens: 8",
]  # fmt: skip


@pytest.mark.parametrize("text", SECRETS)
def test_secrets_are_taken_out(text: str) -> None:
    assert redact(text) == SECRETS[text] and redact(SECRETS[text]) == SECRETS[text]


@pytest.mark.parametrize("text", INNOCENT)
def test_harmless_text_is_not_redacted(text: str) -> None:
    assert redact(text) == text


def test_a_run_writes_no_secret_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "0123hunter22"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    monkeypatch.setenv("HF_TOKEN", secret)
    pytest.importorskip("tensorboard")
    told = run(capsys, "train", *TINY, "--run-dir", tmp_path / "run", "--console-lines", "megatron", "--tensorboard-dir", tmp_path / "tb",
               "--sample-prompt", f"WANDB_API_KEY={secret}", "--wandb-entity", f"https://me:{secret}@host")  # fmt: skip
    assert told[0] == 0 and secret not in "".join(told[1:])
    holding = [p for p in tmp_path.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()]
    assert [p.name for p in holding] in ([], ["sample.txt"]), holding
    log = (tmp_path / "run" / "train.log").read_text()
    assert f"https://{REDACTED}@host" in log and REDACTED in (tmp_path / "run" / "config.yaml").read_text()


def test_a_script_with_a_key_is_its_owners(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cluster = ["launch", "slurm", "--nodes", "1", "--gpus-per-node", "1", *ELSEWHERE]
    assert run(capsys, *cluster, "--write", "plain.sh")[0] == 0
    code, said, _ = run(capsys, *cluster, "--setup", "export WANDB_API_KEY=hunter22", "--write", "key.sh")
    assert code == 0 and "only its owner may read it" in said and "hunter22" not in said
    assert (tmp_path / "key.sh").read_text().count("hunter22") == 1, "where it acts, and not in the comment"
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("plain.sh", "key.sh")] == [0o755, 0o700]

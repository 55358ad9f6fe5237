"""Tests runs that save as Megatron-LM does, and runs that begin from its checkpoints."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from pentatron.checkpoint.find import find_step
from pentatron.checkpoint.load import load_tensor
from pentatron.cli.main import main
from pentatron.errors import UserError
from pentatron.interchange.reading import read_megatron
from tests.checkpoint.digest import state_digest
from tests.harness import run_distributed
from tests.support import LLAMA
from tests.train.test_loaded import losses, train, train_on_a_rank

MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 61"
TORCH_DIST = f"--ckpt-format torch_dist --save-interval 2 --train-iters 4 {MODEL}"


def without_manifest(run: Path, out: Path) -> Path:
    """Copies a run's checkpoints without files of ours, as another program would have left them."""
    shutil.copytree(run / "checkpoints", out)
    for ours in (*out.glob("*/manifest.json"), *out.glob("*/*.safetensors"), out / "latest"):
        ours.unlink()
    return out


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in the format torch_dist."""
    folder = tmp_path_factory.mktemp("torch_dist") / "run"
    train(folder, TORCH_DIST)
    return folder


def test_resumed_run_ends_like_an_uninterrupted_one(saved: Path, tmp_path: Path) -> None:
    """A resume in another layout also gives the losses of the undisturbed run."""
    train(tmp_path / "run", f"{TORCH_DIST} --exit-interval 2")
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob("iter_*")] == ["iter_0000002"]
    shutil.copytree(tmp_path / "run", tmp_path / "tp2")
    train(tmp_path / "run", TORCH_DIST)
    whole, resumed = (find_step(run)[0] for run in (saved, tmp_path / "run"))
    assert resumed.folder.name == "iter_0000004"
    assert state_digest(whole.folder, whole.manifest) == state_digest(resumed.folder, resumed.manifest)
    assert losses(tmp_path / "run") == losses(saved)
    run_distributed(train_on_a_rank, 2, folder=tmp_path / "tp2", words=f"{TORCH_DIST} --tp 2")
    assert losses(tmp_path / "tp2") == pytest.approx(losses(saved), rel=1e-5)


def test_checkpoint_of_megatron_is_resumed(saved: Path, tmp_path: Path) -> None:
    """Takes weights, moments, step and schedule from the checkpoint."""
    theirs = without_manifest(saved, tmp_path / "theirs")
    step = theirs / "iter_0000002"
    words = f"{TORCH_DIST} --load {step} --allow-changed-data"
    train(tmp_path / "on", words)
    assert losses(tmp_path / "on") == pytest.approx(losses(saved)[2:], rel=1e-6)
    log = (tmp_path / "on" / "train.log").read_text()
    assert "read in a sandboxed process" in log and "resuming at step 2 of 4" in log


def test_weights_alone_start_a_new_run(saved: Path, tmp_path: Path) -> None:
    theirs = without_manifest(saved, tmp_path / "theirs")
    words = (
        f"--ckpt-format torch_dist --load {theirs} --finetune --no-load-optim --no-load-rng --train-iters 0"
    )
    train(tmp_path / "new", words)
    before, now = find_step(saved)[0], find_step(tmp_path / "new")[0]
    assert now.manifest.step == 0 and now.folder.name == "iter_0000000"
    name = "weights/layers.1.mlp.linear_fc1.weight"
    assert torch.equal(*(load_tensor(f.folder, f.manifest, name) for f in (before, now)))
    assert not load_tensor(now.folder, now.manifest, "exp_avg/" + name.partition("/")[2]).any()


def test_without_the_flag_nothing_is_read(saved: Path, tmp_path: Path) -> None:
    theirs = without_manifest(saved, tmp_path / "theirs")
    with pytest.raises(
        UserError,
        match=r"iter_0000004 is a checkpoint of Megatron-LM in its format torch_dist.*--ckpt-format torch_dist",
    ):
        train(tmp_path / "new", f"--load {theirs} --train-iters 1")
    with pytest.raises(UserError, match="--ckpt-format torch_dist"):
        train(tmp_path / "new", f"--load {theirs} --save {theirs} --train-iters 1")


def test_a_damaged_step_is_seen_by_its_sum(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    file = run / "checkpoints" / "iter_0000004" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    train(run, f"{TORCH_DIST} --train-iters 5")
    assert "set aside as iter_0000004.damaged" in (run / "train.log").read_text()
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 5


def test_others_steps_are_never_removed(saved: Path, tmp_path: Path) -> None:
    """A run in the folder of another program keeps that program's steps, renamed if names collide."""
    theirs = without_manifest(saved, tmp_path / "theirs")
    before = (theirs / "iter_0000002" / ".metadata").read_bytes()
    train(tmp_path / "run", f"{TORCH_DIST} --load {theirs} --save {theirs} --finetune --keep-checkpoints 1")
    kept = next(theirs.glob("iter_0000002.before*"))
    assert (kept / ".metadata").read_bytes() == before
    assert (theirs / "iter_0000004" / "manifest.json").exists()
    assert read_megatron(theirs)[0].manifest.step == 4


def test_weights_of_others_become_a_hugging_face_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exports a step of ours too, without the flag, to identical files."""
    llama = f"{LLAMA} --untie-embeddings-and-output-weights --norm-epsilon 1e-6"
    train(tmp_path / "run", f"--ckpt-format torch_dist --train-iters 0 {MODEL} {llama}")
    theirs = without_manifest(tmp_path / "run", tmp_path / "theirs")
    assert main(["export", str(theirs), str(tmp_path / "a")]) == 2
    assert "--ckpt-format torch_dist" in capsys.readouterr().err
    assert main(["export", str(theirs), str(tmp_path / "a"), "--ckpt-format", "torch_dist"]) == 0
    assert "read in a sandboxed process" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "b")]) == 0
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert a == b

"""Tests --async-save in a run: equal checkpoints, and no exit that forgets a save under way."""

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pentatron.checkpoint.format as parts_module
import pentatron.train.trainer as trainer_module
from pentatron.checkpoint.format import read_manifest
from pentatron.checkpoint.save import Saver
from pentatron.checkpoint.store import CheckpointStore
from pentatron.errors import NonFiniteError, UserError
from pentatron.layout.ranks import Grid
from pentatron.parallel.world import World, create_groups
from pentatron.train.checkpoints import Checkpoints
from pentatron.train.session import run_training
from tests.harness import RanksFailed, distributed, run_distributed
from tests.support import LLAMA, resolved
from tests.train.test_session import interrupt_at, losses, run

CPU = torch.device("cpu")


def steps(folder: Path) -> dict[str, Any]:
    """Returns checksums, tensors and run state by step; settings are left out, as --async-save differs."""
    found = {}
    for step in CheckpointStore(folder / "checkpoints", keep=None).steps():
        manifest = read_manifest(step)
        found[step.name] = (manifest.files, manifest.tensors, manifest.run_state)
    return found


def test_checkpoints_are_those_of_a_run_that_waits(tmp_path: Path) -> None:
    run(tmp_path / "waits")
    run(tmp_path / "goes-on", "--async-save")
    assert steps(tmp_path / "waits") == steps(tmp_path / "goes-on")
    assert len(steps(tmp_path / "waits")) == 3
    log = (tmp_path / "goes-on" / "train.log").read_text()
    assert log.count("scheduled an async checkpoint save at iteration") == 3
    assert log.count("successfully saved checkpoint from iteration") == 3
    run(tmp_path / "cut", "--async-save --train-iters 4 --lr-decay-iters 6")
    run(tmp_path / "cut", "--async-save --lr-decay-iters 6")
    whole, cut = (steps(tmp_path / name)["step-00000006"] for name in ("waits", "cut"))
    assert whole[:2] == cut[:2], "and resumed from, they lead to the same end"


def here() -> World:
    rank = dist.get_rank()
    return create_groups(Grid(tensor=2), rank, rank, CPU)


@distributed(world=2)
def test_two_ranks_save_the_same_in_the_background(tmp_path: Path) -> None:
    """Rank 1 writes slowly, so updates overtake its save; the saved values stay those of the step."""
    words = f"{LLAMA} --tensor-model-parallel-size 2 --train-iters 6 --save-interval 2 --keep-checkpoints 9 --eval-iters 0"
    run_training(resolved(f"{words} --run-dir {tmp_path / 'waits'}", 2), here(), True)
    if dist.get_rank() == 1:
        honest = parts_module.write_tensors

        def slow(*arguments: Any) -> Any:
            time.sleep(0.3)
            return honest(*arguments)

        parts_module.write_tensors = slow
    run_training(resolved(f"{words} --async-save --run-dir {tmp_path / 'goes-on'}", 2), here(), True)
    dist.barrier()
    assert steps(tmp_path / "waits") == steps(tmp_path / "goes-on")
    assert len(steps(tmp_path / "waits")) == 3


def test_an_update_waits_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late copy still saves the values of its step; without the wait (control) it saves later ones."""
    from pentatron.checkpoint.save import HostCopy

    run(tmp_path / "waits")
    honest = HostCopy._copy

    def late(copy: HostCopy, pairs: Any, after: Any = None) -> None:
        if after is not None:
            time.sleep(0.2)
        honest(copy, pairs, after)

    monkeypatch.setattr(HostCopy, "_copy", late)
    run(tmp_path / "goes-on", "--async-save")
    assert steps(tmp_path / "waits") == steps(tmp_path / "goes-on")
    monkeypatch.setattr(HostCopy, "wait", lambda self: None)
    run(tmp_path / "torn", "--async-save")
    assert steps(tmp_path / "waits") != steps(tmp_path / "torn"), "control"


def full_disk(monkeypatch: pytest.MonkeyPatch, *saves: int) -> None:
    made, honest = iter(range(1, 100)), parts_module.write_tensors

    def write(*arguments: Any) -> Any:
        if next(made) in saves:
            raise OSError(28, "No space left on device")
        return honest(*arguments)

    monkeypatch.setattr(parts_module, "write_tensors", write)


@pytest.mark.parametrize("words", ["", "--async-save"])
def test_failed_save_warns_during_the_run_and_raises_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    """Training continues after a failed save: stopping would lose steps, and the next save may succeed."""
    full_disk(monkeypatch, 2)
    run(tmp_path / "a", words)
    assert list(steps(tmp_path / "a")) == ["step-00000002", "step-00000006"]
    told = r"warning: the checkpoint of step 4 could not be saved .*rank 0: No space left on device; [0-9]+ MiB free\); the last checkpoint is step 2\. Training continues"
    assert re.search(told, capsys.readouterr().out)
    assert re.search(told, (tmp_path / "a" / "train.log").read_text())
    # A synchronous save tries the last step twice: for --save-interval 2 and at the end of the run.
    full_disk(monkeypatch, *((3,) if words else (3, 4)))
    with pytest.raises(
        UserError, match=r"step 6 could not be saved.*rank 0: No space left on device; .* intact"
    ):
        run(tmp_path / "b", words)
    assert list(steps(tmp_path / "b")) == ["step-00000002", "step-00000004"]
    run(tmp_path / "b", words)
    assert len(steps(tmp_path / "b")) == 3, "the same command goes on"


def test_a_stop_after_a_failure_saves_that_step_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, 2)
    interrupt_at(4, monkeypatch)
    run(tmp_path / "a")
    assert list(steps(tmp_path / "a")) == ["step-00000002", "step-00000004"]


def test_waiting_for_the_last_save_is_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait counts as phase `saving`: a phase `step` of that length would be ended as a hang."""
    make, honest = Checkpoints.__init__, Saver.commit_pending
    made: list[Checkpoints] = []
    phases: list[str] = []

    def commit_pending(self: Saver, wait: bool) -> Any:
        if wait and self.under_way is not None:
            phases.append(made[-1].world.status.phase)
        return honest(self, wait)

    monkeypatch.setattr(
        Checkpoints, "__init__", lambda self, *given: (made.append(self), make(self, *given))[1]
    )
    monkeypatch.setattr(Saver, "commit_pending", commit_pending)
    run(tmp_path / "a", "--async-save --train-iters 2 --save-interval 2")
    assert phases == ["saving"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_while_the_background_writes_saves_both_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    honest = parts_module.write_tensors
    writing = threading.Event()

    def slow(*arguments: Any) -> Any:
        writing.set()
        time.sleep(0.5)
        return honest(*arguments)

    monkeypatch.setattr(parts_module, "write_tensors", slow)
    interrupt_at(3, monkeypatch, number)
    assert run(tmp_path / "a", "--async-save").ending.signal == number
    assert writing.is_set() and list(steps(tmp_path / "a")) == ["step-00000002", "step-00000003"]


def test_run_that_ends_with_nan_has_saved_the_named_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, made = trainer_module.train_step, iter(range(1, 100))

    def bad(model: Any, optimizer: Any, *rest: Any) -> Any:
        if next(made) < 4:
            return honest(model, optimizer, *rest)
        for parameter in model.stages[0].parameters():
            parameter.data[..., 0] = float("nan")
        return honest(model, optimizer, *rest)

    monkeypatch.setattr(trainer_module, "train_step", bad)
    with pytest.raises(NonFiniteError):
        run(tmp_path / "a", "--async-save")
    assert list(steps(tmp_path / "a")) == ["step-00000002", "step-00000003"]


def train_and_die(folder: Path) -> None:
    """Trains on a forked rank whose writer kills it in the middle of the third save."""
    honest, made = parts_module.write_tensors, iter(range(1, 100))

    def write(path: Path, tensors: Any) -> Any:
        if next(made) == 3:
            path.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        return honest(path, tensors)

    parts_module.write_tensors = write
    run(folder, "--async-save")


def test_run_killed_while_writing_resumes_from_the_older_step(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="was killed by SIGKILL"):
        run_distributed(train_and_die, 1, folder=tmp_path / "a")
    assert list(steps(tmp_path / "a")) == ["step-00000002", "step-00000004"]
    assert list((tmp_path / "a" / "checkpoints").glob(".step-*")), "control: it was writing"
    run(tmp_path / "a", "--async-save")
    assert [step for step, _ in losses(tmp_path / "a")] == [1, 2, 3, 4, 5, 6]
    assert not list((tmp_path / "a" / "checkpoints").glob(".step-*"))

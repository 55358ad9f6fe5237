"""Tests early stops by step count, time limit and signal: checkpoint, log and exit code."""

import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from pentatron.parallel.world import single_process
from pentatron.supervise.signals import StopRequest
from pentatron.train.batches import next_step_batches
from pentatron.train.session import RunOutcome, run_training
from pentatron.train.stop import StopConditions
from tests.harness import distributed
from tests.support import LLAMA, resolved
from tests.train.test_session import final_state, interrupt_at, losses, world_here

RUN = f"{LLAMA} --train-iters 6 --save-interval 4 --keep-checkpoints 9 --log-interval 2"


def run(folder: Path, words: str = "", started: float | None = None) -> RunOutcome:
    settings = resolved(f"{RUN} --run-dir {folder} {words}")
    return run_training(settings, single_process(), True, started=started)


def steps(folder: Path) -> list[str]:
    return sorted(p.name[-1] for p in (folder / "checkpoints").glob("step-*"))


def log(folder: Path) -> str:
    return (folder / "train.log").read_text()


def test_a_run_in_stretches_is_the_run_in_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "whole")
    for step in (2, 4):
        outcome = run(tmp_path / "cut", "--exit-interval 2")
        assert outcome.ending is not None and outcome.ending.exit_code == 0
        assert f"\nexiting program at iteration {step}\n" in log(tmp_path / "cut")
        shown = f"stopped (--exit-interval 2) after step {step}; its checkpoint is saved"
        assert shown in capsys.readouterr().out
    assert steps(tmp_path / "cut") == ["2", "4"], "step 4 was saved once"
    # --exit-interval at the last step is the normal end of the run, not an early stop.
    assert run(tmp_path / "cut", "--exit-interval 2").ending is None
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert final_state(tmp_path / "cut") == final_state(tmp_path / "whole")


def test_the_clock_runs_from_the_start_of_the_process(tmp_path: Path) -> None:
    words = "--exit-duration-in-mins 10"
    assert run(tmp_path / "a", words, time.time() - 590).ending is None
    outcome = run(tmp_path / "b", words, time.time() - 601)
    assert outcome.ending is not None and outcome.ending.exit_code == 0
    assert steps(tmp_path / "b") == ["1"] and "\nexiting program after 10.0" in log(tmp_path / "b")


def test_the_clock_also_ends_an_evaluation(tmp_path: Path) -> None:
    words = "--exit-duration-in-mins 10 --eval-interval 1 --eval-iters 3"
    outcome = run(tmp_path / "a", words, time.time() - 601)
    assert outcome.ending is not None and steps(tmp_path / "a") == ["1"]
    assert "Exiting during evaluation, timelimit reached" in log(tmp_path / "a")
    assert "validation loss" not in log(tmp_path / "a")


def test_an_evaluation_alone_that_is_broken_off_promises_no_checkpoint(tmp_path: Path) -> None:
    run(tmp_path / "a")
    words = "--skip-train --exit-duration-in-mins 10 --eval-interval 1 --eval-iters 3"
    assert run(tmp_path / "a", words, time.time() - 601).ending is not None
    assert log(tmp_path / "a").endswith("(--exit-duration-in-mins 10) before the evaluation was done\n")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("", 143),
        ("--exit-signal-handler", 0),
        ("--exit-signal-handler --exit-signal SIGUSR1", 143),
    ],
)
def test_the_handler_makes_its_signal_a_wish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, code: int
) -> None:
    interrupt_at(3, monkeypatch, signal.SIGTERM)
    outcome = run(tmp_path / "a", words)
    assert outcome.ending is not None and outcome.ending.exit_code == code
    assert (
        outcome.ending is not None
        and outcome.ending.signal == signal.SIGTERM
        and steps(tmp_path / "a") == ["3"]
    )
    assert "\nexiting program after receiving SIGTERM.\n" in log(tmp_path / "a")


@distributed(world=2)
def test_ranks_agree_when_the_clock_or_a_signal_reaches_one_of_them() -> None:
    """Clocks of machines differ slightly, so a time limit reached on one rank stops all ranks."""
    late = dist.get_rank() == 1
    config, world = resolved("--exit-duration-in-mins 1", 2).config, world_here()
    assert (
        StopConditions(config, world, StopRequest(), time.monotonic() - 61 * late).after_step(1) is not None
    )
    request = StopRequest()
    if late:
        request(signal.SIGUSR1, None)
    assert StopConditions(config, world, request, time.monotonic()).after_step(1) is None
    assert next_step_batches(iter([]), 0, request, world) == ([], signal.SIGUSR1)


def test_the_time_of_day_may_be_set_while_a_run_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    config, world = resolved("--exit-duration-in-mins 10").config, single_process()
    endings = StopConditions(config, world, StopRequest(), time.monotonic())
    now, began = time.time(), time.monotonic()
    for day in (86400, -86400):
        monkeypatch.setattr(time, "time", lambda day=day: now + day)
        assert endings.by_time_limit() is None
    monkeypatch.setattr(time, "monotonic", lambda: began + 601)
    late = endings.by_time_limit()
    assert late is not None and late.reason == "stopped after 10.0 minutes (--exit-duration-in-mins 10)"

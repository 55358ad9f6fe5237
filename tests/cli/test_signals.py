"""Sends signals to launcher and ranks: the run saves and ends, or ends at once on a second signal."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.cli.test_train import children, finish, losses, start_forked, wait_for_step
from tests.harness import distributed

LONG = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 50 --dataset-size 100 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 100000 --eval-interval 0 --nproc-per-node 2 "
    "--threads-per-process 1"
).split()


def alive(pids: list[int]) -> list[int]:
    return [p for p in pids if Path(f"/proc/{p}").exists() and state_of(p) != "Z"]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_until_gone(pids: list[int], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while alive(pids):
        assert time.monotonic() < deadline, f"still running: {alive(pids)}"
        time.sleep(0.1)


class Run:
    """Starts a long run of two workers and waits for step 3."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launcher = start_forked("-m", "pentatron", "train", *LONG, "--run-dir", str(folder))
        wait_for_step(folder, 3)
        self.workers = children(self.launcher.pid)


@distributed(world=1, timeout=150, process_group=False)
def test_readers_leave_signals_to_the_rank_and_one_that_dies_is_a_sentence(tmp_path: Path) -> None:
    alone = "--nproc-per-node 1 --num-workers 1 --device cpu".split()
    run = start_forked("-m", "pentatron", "train", *LONG, *alone, "--run-dir", str(tmp_path / "run"))
    wait_for_step(tmp_path / "run", 2)
    (reader,) = children(run.pid)
    # A scheduler sends its signal to every process of a job.
    os.kill(reader, signal.SIGTERM)
    os.kill(reader, signal.SIGINT)
    reached = losses(tmp_path / "run")[-1][0]
    wait_for_step(tmp_path / "run", reached + 10)
    assert children(run.pid) == [reader] and run.poll() is None
    # SIGQUIT writes the stacks and the run continues, as with ranks of a launcher.
    os.kill(run.pid, signal.SIGQUIT)
    wait_for_step(tmp_path / "run", losses(tmp_path / "run")[-1][0] + 2)
    # The OOM killer of the kernel sends SIGKILL.
    os.kill(reader, signal.SIGKILL)
    code, _, err = finish(run)
    stacks, _, err = err.rpartition("\npentatron: ")
    # The stacks have no "Current thread" if a thread of a library received the signal.
    assert "most recent call first" in stacks and "trainer.py" in stacks
    assert (code, err.count("\n")) == (2, 1), err
    assert "a DataLoader worker died (killed by SIGKILL): not enough memory" in err
    assert "training can resume from the newest one, perhaps with fewer --num-workers" in err


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
@distributed(world=1, timeout=150, process_group=False)
def test_a_closed_terminal_and_a_warning_save_and_end_the_run(tmp_path: Path, number: signal.Signals) -> None:
    run = Run(tmp_path / "run")
    run.launcher.send_signal(number)
    code, out, err = finish(run.launcher)
    assert (code, err) == (128 + number, "")
    last = losses(run.folder)[-1][0]
    assert f"stopped by {number.name} after step {last}; its checkpoint is saved" in out
    assert (run.folder / "checkpoints" / f"step-{last:08d}").is_dir()
    wait_until_gone(run.workers, 5)


SLOW_SAVE = """
import os
import time
import pentatron.checkpoint.store as store
from pentatron.cli.main import run_entry
from pentatron.settings.entry_points import TRAIN

start = store.CheckpointStore.start

def slowly(self, *words, **named):
    time.sleep(3)
    return start(self, *words, **named)

# In ranks alone: they may have what their launcher has.
if "RANK" in os.environ:
    store.CheckpointStore.start = slowly
run_entry(TRAIN)
"""


@distributed(world=1, timeout=150, process_group=False)
def test_a_warning_and_a_harder_signal_during_the_save_are_one_save(tmp_path: Path) -> None:
    """Sends SIGUSR1 and then SIGTERM to the launcher and to every rank, as a scheduler does."""
    script, folder = tmp_path / "slow.py", tmp_path / "run"
    script.write_text(SLOW_SAVE)
    launcher = start_forked(str(script), *LONG, "--run-dir", str(folder))
    wait_for_step(folder, 3)
    everyone = [launcher.pid, *children(launcher.pid)]
    for number in (signal.SIGUSR1, signal.SIGTERM):
        for pid in everyone:
            os.kill(pid, number)
        time.sleep(1)
    code, out, err = finish(launcher)
    assert (code, err) == (128 + signal.SIGUSR1, "")
    last = losses(folder)[-1][0]
    assert f"stopped by SIGUSR1 after step {last}; its checkpoint is saved" in out
    assert (folder / "checkpoints" / f"step-{last:08d}").is_dir(), "no step is lost"


@distributed(world=1, timeout=150, process_group=False)
def test_a_signal_to_one_rank_ends_the_run_with_its_code(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    os.kill(run.workers[1], signal.SIGTERM)
    code, out, err = finish(run.launcher)
    assert (code, err) == (128 + signal.SIGTERM, "")
    assert "stopped by SIGTERM after step" in out and "next steps:" not in out


@distributed(world=1, timeout=150, process_group=False)
def test_a_second_ctrl_c_ends_a_run_that_is_stuck(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    os.kill(run.workers[1], signal.SIGSTOP)
    time.sleep(0.5)
    run.launcher.send_signal(signal.SIGINT)
    time.sleep(1)
    assert run.launcher.poll() is None, "it waits for the frozen rank"
    run.launcher.send_signal(signal.SIGINT)
    code, _, err = finish(run.launcher)
    assert code == 130
    assert "stopped immediately" in err and "Traceback" not in err
    wait_until_gone(run.workers, 5)


@distributed(world=1, timeout=150, process_group=False)
def test_workers_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.launcher.kill()
    run.launcher.wait()
    wait_until_gone(run.workers)
    last = losses(run.folder)[-1][0]
    assert (run.folder / "checkpoints" / f"step-{last:08d}").is_dir(), "and they leave in good order"
    assert f"stopped as its launcher is gone after step {last};" in (run.folder / "train.log").read_text()

"""Closes the terminal of whole runs and checks what they save, their exit codes and their logs."""

import signal
from pathlib import Path

import pytest

from tests.cli.test_restarts import SMALL, broken
from tests.cli.test_train import finish, losses, start_forked
from tests.harness import distributed

LOST = "warning: standard output cannot be written any more ({reason}); this log has every line"

# Runs as session leader on a pseudo-terminal, whose other end a child process closes after some steps.
ON_A_TERMINAL = """
import fcntl, os, select, signal, sys, termios
from pathlib import Path
from pentatron.cli.main import run_entry
from pentatron.settings.entry_points import TRAIN

if "RANK" not in os.environ:
    if {ignored}:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    metrics = Path(sys.argv[sys.argv.index("--run-dir") + 1]) / "metrics.jsonl"
    master, slave = os.openpty()
    if os.fork() == 0:
        os.close(slave)
        while not metrics.exists() or metrics.read_text().count("loss") < 5:
            if select.select([master], [], [], 0.01)[0]:
                os.read(master, 65536)
        os._exit(0)
    os.close(master)
    if os.getsid(0) != os.getpid():
        os.setsid()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    for descriptor in (0, 1, 2):
        os.dup2(slave, descriptor)
    os.close(slave)
run_entry(TRAIN)
"""


def on_a_terminal(folder: Path, ignored: bool, processes: int, bar: str) -> tuple[int, list[str], Path]:
    script, place = folder / "terminal.py", folder / "run"
    script.write_text(ON_A_TERMINAL.format(ignored=ignored))
    steps = "60" if ignored else "100000"
    words = f"--nproc-per-node {processes} --progress-bar {bar} --train-iters {steps} --save-interval 1000".split()
    code, _, _ = finish(start_forked(str(script), *SMALL, *words, "--run-dir", str(place)))
    return code, (place / "train.log").read_text().splitlines(), place


SHAPES = [
    pytest.param(1, "off"),
    pytest.param(2, "on"),
    pytest.param(1, "on", marks=pytest.mark.sweep),
    pytest.param(2, "off", marks=pytest.mark.sweep),
]


@pytest.mark.parametrize(("processes", "bar"), SHAPES)
@distributed(world=1, timeout=150, process_group=False)
def test_a_terminal_that_is_closed_saves_the_run_and_ends_it(
    tmp_path: Path, processes: int, bar: str
) -> None:
    code, log, folder = on_a_terminal(tmp_path, False, processes, bar)
    last = losses(folder)[-1][0]
    assert code == 128 + signal.SIGHUP, "\n".join(log)
    assert log[-1].startswith(f"stopped by SIGHUP after step {last}; its checkpoint is saved")
    assert (folder / "checkpoints" / f"step-{last:08d}").is_dir(), "no step is lost"
    assert log.count(LOST.format(reason="Input/output error")) == 1


@pytest.mark.parametrize(("processes", "bar"), SHAPES)
@distributed(world=1, timeout=150, process_group=False)
def test_a_run_that_ignores_sighup_trains_to_its_end_without_its_terminal(
    tmp_path: Path, processes: int, bar: str
) -> None:
    code, log, folder = on_a_terminal(tmp_path, True, processes, bar)
    assert (code, losses(folder)[-1][0]) == (0, 60), "\n".join(log)
    assert log.count(LOST.format(reason="Input/output error")) == 1


@distributed(world=1, timeout=150, process_group=False)
def test_a_job_is_restarted_after_the_reader_of_its_output_has_left(tmp_path: Path) -> None:
    """A broken stdout and stderr must not end the launcher, least of all with exit code 0.

    The launcher's error messages are the first writes that fail.
    """
    script, folder = Path(broken(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")), tmp_path / "run"
    left = "import os\nif 'RANK' not in os.environ:\n    r, w = os.pipe(); os.close(r); os.dup2(w, 1); os.dup2(w, 2)\n"
    script.write_text(left + script.read_text())
    words = [*SMALL, "--nproc-per-node", "2", "--run-dir", str(folder)]
    code, _, _ = finish(start_forked(str(script), *words))
    log = (folder / "train.log").read_text().splitlines()
    assert (code, losses(folder)[-1][0]) == (0, 10), "\n".join(log)
    assert "restarting from step 6 (1 of 3); 1 step is lost" in log
    assert LOST.format(reason="Broken pipe") in log

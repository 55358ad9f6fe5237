"""Tests workers whose launcher has died, and processes that inherit a worker's environment."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pentatron.cli import worker as worker_module
from pentatron.cli.environment import find_worker
from pentatron.cli.main import run_guarded
from pentatron.cli.worker import (
    BEGAN,
    WORKER,
    SupervisedWorker,
    _belongs_to_job,
    _OrphanWatchdog,
    clear_inherited_worker_variables,
    current_attempt,
    current_worker,
)
from pentatron.parallel.rank_status import RankStatus
from pentatron.supervise.hang import HangLimits
from pentatron.supervise.launcher import JOB_FOLDER, LAUNCHER_PID, RESTART_COUNT, WORKER_VARIABLES


class Ended(Exception):
    """Raised in place of killing this process and the other ranks."""


def stuck_for(seconds: float, where: RankStatus, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Returns whether a rank without a launcher kills its job after `seconds` without progress."""

    def kill_job(self: _OrphanWatchdog) -> None:
        raise Ended

    now = 100.0
    monkeypatch.setattr(_OrphanWatchdog, "_kill_job", kill_job)
    monkeypatch.setattr(worker_module.time, "monotonic", lambda: now)
    # --heartbeat-timeout 0 switches off hang detection of live launchers only.
    watchdog = _OrphanWatchdog(SupervisedWorker(Path("/nowhere"), 1, 0, 0), where, HangLimits(0.0, 600.0))
    watchdog.check()
    now += seconds
    try:
        watchdog.check()
    except Ended:
        return True
    return False


def test_a_rank_without_a_launcher_may_save_and_compile_as_long_as_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = RankStatus()
    where.begin_at(0)
    where.phase = "step"
    assert not stuck_for(500, where, monkeypatch), "the first step compiles"
    where.step_done(1, 5.0)
    assert stuck_for(61, where, monkeypatch)
    with where.doing("saving"):
        assert not stuck_for(500, where, monkeypatch), "what it saves is what would be lost"
        assert stuck_for(601, where, monkeypatch)


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell")
def test_a_process_of_another_job_is_not_taken_for_a_rank(tmp_path: Path) -> None:
    for job, expected in ((tmp_path, True), (tmp_path / "another", False)):
        process = subprocess.Popen(["sleep", "100"], env={**os.environ, JOB_FOLDER: str(job)})
        try:
            time.sleep(0.1)
            assert _belongs_to_job(process.pid, tmp_path) is expected
        finally:
            process.kill()
            process.wait()
    assert not _belongs_to_job(process.pid, tmp_path), "it is gone"


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sets the environment of rank 1 of 2, whose launcher is the parent process; returns the job folder."""
    # Set before it is removed, so that monkeypatch undoes what a test leaves in the variable.
    monkeypatch.setenv(WORKER, "")
    monkeypatch.delenv(WORKER)
    given = dict.fromkeys(WORKER_VARIABLES, "1") | {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "x",
    }
    given |= {JOB_FOLDER: str(tmp_path), LAUNCHER_PID: str(os.getppid()), RESTART_COUNT: "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def test_child_command_of_a_rank_is_not_a_worker(worker: Path) -> None:
    assert current_worker() == SupervisedWorker(worker, os.getppid(), 1, 1)
    clear_inherited_worker_variables()
    assert current_worker() is not None, "the rank itself stays one"
    # A child process of the rank inherits the parent's pid in this variable.
    inherited = os.environ[WORKER].replace(str(os.getpid()), str(os.getpid() + 1), 1)
    os.environ[WORKER] = inherited
    assert current_worker() is None
    clear_inherited_worker_variables()
    assert find_worker(os.environ) is None and not set(WORKER_VARIABLES) & set(os.environ)


def test_a_launcher_that_a_rank_starts_has_ranks_of_its_own(
    worker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert current_worker() is not None
    inherited = os.environ[WORKER].replace(str(os.getpid()), str(os.getpid() + 1), 1)
    # torchrun sets this variable and leaves the others.
    monkeypatch.setenv("MASTER_PORT", "2")
    monkeypatch.setenv(WORKER, inherited)
    clear_inherited_worker_variables()
    assert current_worker() is None and find_worker(os.environ) is not None
    # Our launcher sets all of these variables.
    for name, value in {
        JOB_FOLDER: "/another",
        LAUNCHER_PID: "7",
        RESTART_COUNT: "0",
        WORKER: inherited,
    }.items():
        monkeypatch.setenv(name, value)
    clear_inherited_worker_variables()
    assert current_worker() == SupervisedWorker(Path("/another"), 7, 1, 0)


def test_the_end_of_the_work_is_recorded_and_an_error_is_not_one(
    worker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        SupervisedWorker, "attach_to_launcher", lambda self: (worker / "rank-1.working").touch()
    )
    done = worker / "rank-1.done"
    assert run_guarded(lambda: 2) == 2 and not done.exists()
    assert run_guarded(lambda: 0, ends_process=False) == 0 and not done.exists(), "the program has more to do"
    assert run_guarded(lambda: 0) == 0 and done.exists()


def test_a_restarted_job_has_one_limit_of_time(
    worker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BEGAN, "12.5")
    assert current_attempt(os.environ, tmp_path).began == 12.5
    monkeypatch.delenv(RESTART_COUNT)
    own = current_attempt(os.environ, tmp_path).began
    assert own is not None and abs(own - time.monotonic()) < 5, "of no launcher of ours"

"""Tests failure reports with scripts in place of ranks, and restarts with scripted attempts."""

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from pentatron.checkpoint.lock import lock_folder
from pentatron.cli import verify
from pentatron.errors import UserError
from pentatron.supervise import launcher
from pentatron.supervise.hang import Hang, HangLimits, JobWatchdog, RankState
from pentatron.supervise.launcher import JobResult, run_workers
from pentatron.supervise.processes import Failure, Process, ReceivedSignals, find_failures
from pentatron.supervise.supervisor import Supervisor
from tests.supervise.test_hang import beat
from tests.support import resolved

_SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from pentatron.supervise.processes import mark_working, mark_done, write_record
rank, job = int(os.environ["RANK"]), Path(os.environ["PENTATRON_JOB"])
def tell(kind):
    write_record(job, rank, kind, f"{kind} of rank {rank}", time.time())
"""


def run(script: str, processes: int, monkeypatch: pytest.MonkeyPatch) -> JobResult:
    monkeypatch.setattr(launcher, "_AFTER_A_CRASH", 1.0)
    return run_workers(["-c", _SCRIPT + script], processes, None, os.environ, os.getpid())


def test_killed_rank_is_the_cause_and_no_process_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 exits before the kill of rank 1 is noticed; rank 2 ignores SIGTERM and has a child process."""
    script = f"""
import subprocess
if rank == 0:
    time.sleep(0.3); tell("lost"); sys.exit(1)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
child = subprocess.Popen(["sleep", "1000"])
Path({str(tmp_path / "child")!r}).write_text(str(child.pid))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(1000)
"""
    ended = run(script, 3, monkeypatch)
    assert ended.failures[0].rank == 1 and ended.exit_code == -signal.SIGKILL and ended.is_crash
    assert [failure.rank for failure in ended.failures] == [1, 0, 2]
    child = tmp_path / "child"
    if child.exists():
        assert not _lives(int(child.read_text())), "what a rank started ends with it"


def _lives(pid: int) -> bool:
    for _ in range(50):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return False
        time.sleep(0.1)
    return True


def test_rank_that_exits_early_is_the_cause_if_the_others_lost_contact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = run('if rank == 0: tell("lost"); sys.exit(1)', 2, monkeypatch)
    assert ended.failures[0].rank == 1 and "exited before the others" in ended.failures[0].how
    ended = run('if rank == 0: tell("exception"); sys.exit(1)', 2, monkeypatch)
    assert ended.failures[0].rank == 0 and ended.failures[0].text == "exception of rank 0"


def test_unresponsive_rank_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = run('if rank == 0: tell("lost"); sys.exit(1)\ntime.sleep(1000)', 2, monkeypatch)
    assert ended.failures[0].rank == 1 and "did not respond to the others" in ended.failures[0].how


def test_an_end_with_0_is_a_success_only_of_ranks_that_finished_their_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = run("mark_working(job, rank); mark_done(job, rank)", 2, monkeypatch)
    assert (ended.exit_code, ended.status, list(ended.failures)) == (0, 0, [])
    ended = run("mark_working(job, rank)\nif rank == 0: mark_done(job, rank)", 2, monkeypatch)
    assert (ended.exit_code, ended.status, ended.failures[0].rank, ended.is_crash) == (1, 1, 1, True)
    assert ended.failure_message(2) == "rank 1 of 2 ended with exit code 0 and unfinished work"


def test_ranks_that_never_began_are_reported_and_not_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Happens if a file of the program's name in the current folder is run in its place."""
    ended = run_workers(["-c", ""], 2, None, os.environ, os.getpid())
    scripted = ScriptedJob(tmp_path, [(ended, None)])
    assert scripted.run().status == 1 and scripted.restarts == [0]
    assert (
        scripted.said[0]
        == "rank 0 of 2 ended with exit code 0 and unfinished work before its first step was done"
    )
    assert "not started again: a failure before the first step would repeat" in scripted.said[1]


def test_sigquit_asks_every_rank_for_its_stacks_and_the_job_continues(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = """
import faulthandler
from pentatron.supervise.hang import STACKS_SIGNAL
from pentatron.supervise.processes import rank_file
mark_working(job, rank)
stacks = rank_file(job, rank, "stacks")
faulthandler.register(STACKS_SIGNAL, stacks.open("w"))
if rank == 0:
    while not rank_file(job, 1, "stacks").exists() or not rank_file(job, 1, "stacks").with_suffix(".ready").exists():
        time.sleep(0.02)
    os.kill(os.getppid(), STACKS_SIGNAL)
else:
    stacks.with_suffix(".ready").touch()
while "most recent call first" not in stacks.read_text():
    time.sleep(0.02)
mark_done(job, rank)
"""
    assert run(script, 2, monkeypatch).exit_code == 0
    assert "pentatron: 2 ranks write their stacks to " in capfd.readouterr().err


@pytest.mark.parametrize("code", [2, 16, 17, 128 + signal.SIGTERM, -signal.SIGTERM])
def test_mistakes_and_wishes_are_no_crashes(code: int) -> None:
    assert not JobResult(code, [Failure(0, code, 0.0)]).is_crash
    assert JobResult(1, [Failure(0, 1, 0.0)]).is_crash


def crash(step: int, code: int = -9, advanced: bool = True, opened: bool = True) -> JobResult:
    return JobResult(code, [Failure(1, code, 0.0)], None, step, advanced, opened)


class ScriptedJob:
    """Supervises scripted attempts: how each one ends, and the step that is saved by then."""

    def __init__(self, folder: Path, endings: Sequence[tuple[JobResult, int | None]], limit: int = 3) -> None:
        self.endings, self.folder, self.limit = list(endings), folder, limit
        self.restarts: list[int] = []
        self.said: list[str] = []
        self.saved: int | None = None
        # `waited`: seconds of delay after each attempt. `patience`: total delay after which SIGTERM arrives.
        self.waited: list[float] = []
        self.patience = float("inf")

    def run(self, resumes: bool = True, told_to_stop: bool = False) -> JobResult:
        signals = ReceivedSignals()

        def sleep(seconds: float) -> None:
            self.waited[-1] += seconds
            if sum(self.waited) >= self.patience:
                signals(signal.SIGTERM, None)

        def attempt(restart: int) -> JobResult:
            self.restarts.append(restart)
            ended, self.saved = self.endings[len(self.restarts) - 1]
            self.waited.append(0.0)
            return ended

        def saved_step() -> int | None:
            assert "of 2" in self.said[-1], (
                "the failed rank is named before checkpoints are searched, which takes seconds"
            )
            if told_to_stop:
                signals(signal.SIGTERM, None)
            return self.saved

        return Supervisor(
            attempt, 2, self.limit, self.folder, signals, resumes, saved_step, self.said.append, sleep
        ).run()


def test_crash_restarts_from_the_last_checkpoint_and_reports_lost_steps(tmp_path: Path) -> None:
    scripted = ScriptedJob(tmp_path, [(crash(47), 40), (JobResult(0), 100)])
    assert scripted.run().exit_code == 0 and scripted.restarts == [0, 1]
    assert (
        scripted.said[0].startswith("rank 1 of 2 was killed by SIGKILL")
        and "after step 47" in scripted.said[0]
    )
    assert scripted.said[1:] == ["restarting from step 40 (1 of 3); 7 steps are lost"]
    (row,) = map(json.loads, (tmp_path / "restarts.jsonl").read_text().splitlines())
    assert (row["rank"], row["after_step"], row["from_step"], row["steps_lost"]) == (1, 47, 40, 7)
    assert (tmp_path / "train.log").read_text().splitlines()[-1] == scripted.said[1]


def test_repeated_crash_without_progress_ends_the_job(tmp_path: Path) -> None:
    scripted = ScriptedJob(tmp_path, [(crash(47), 40)] * 9, limit=3)
    assert scripted.run().is_crash and scripted.restarts == [0, 1, 2, 3]
    assert "3 restarts in a row have reached no new checkpoint (--max-restarts 3)" in scripted.said[-1]
    assert "The last checkpoint, step 40, is intact" in scripted.said[-1]
    # Also without any checkpoint.
    scripted = ScriptedJob(tmp_path, [(crash(7), None)] * 9, limit=1)
    assert (
        scripted.run().is_crash
        and scripted.restarts == [0, 1]
        and "the restart has reached" in scripted.said[-1]
    )


def test_progress_resets_the_restart_count(tmp_path: Path) -> None:
    scripted = ScriptedJob(
        tmp_path, [*((crash(10 * n + 7), 10 * n) for n in range(9)), (JobResult(0), 100)], limit=2
    )
    assert scripted.run().exit_code == 0 and scripted.restarts == list(range(10))
    assert [line for line in scripted.said if "restarting" in line][-1].startswith(
        "restarting from step 80 (1 of 2)"
    )
    rows = [json.loads(line)["restart"] for line in (tmp_path / "restarts.jsonl").read_text().splitlines()]
    assert rows == list(range(1, 10)), "the record counts them all"
    # Saving a step again whose checkpoint was damaged is no progress.
    steps = (40, 20, 40, 20, 40)
    scripted = ScriptedJob(tmp_path, [(crash(47), saved) for saved in steps], limit=3)
    assert scripted.run().is_crash and scripted.restarts == [0, 1, 2, 3]


def test_restarts_in_vain_wait_longer_each_time_and_say_so(tmp_path: Path) -> None:
    """A new checkpoint resets the delay."""
    saved = [40] * 8 + [50, 50]
    scripted = ScriptedJob(tmp_path, [*((crash(57), step) for step in saved), (JobResult(0), 100)], limit=9)
    assert scripted.run().exit_code == 0
    assert scripted.waited == pytest.approx([0, 1, 2, 4, 8, 16, 30, 30, 0, 1, 0])
    told = [line for line in scripted.said if line.startswith("restarting")]
    assert told[0] == "restarting from step 40 (1 of 9); 17 steps are lost"
    assert told[1] == "restarting from step 40 in 1 s (2 of 9); 17 steps are lost"
    assert told[7] == "restarting from step 40 in 30 s (8 of 9); 17 steps are lost"
    assert told[8] == "restarting from step 50 (1 of 9); 7 steps are lost"


def test_a_signal_ends_the_pause_and_the_restart(tmp_path: Path) -> None:
    scripted = ScriptedJob(tmp_path, [(crash(47), 40)] * 9, limit=9)
    scripted.patience = 1 + 2 + 1.5
    assert scripted.run().is_crash and scripted.restarts == [0, 1, 2, 3]
    assert sum(scripted.waited) == pytest.approx(scripted.patience)
    assert (
        "in 4 s" in scripted.said[-2]
        and "not started again, as SIGTERM requested a stop" in scripted.said[-1]
    )
    rows = [json.loads(line)["restart"] for line in (tmp_path / "restarts.jsonl").read_text().splitlines()]
    assert rows == [1, 2, 3], "what was not started is no restart"


def test_failure_before_the_first_step_restarts_only_after_a_kill(tmp_path: Path) -> None:
    scripted = ScriptedJob(tmp_path, [(crash(0, 1, advanced=False), None)])
    scripted.run()
    assert scripted.restarts == [0] and "a failure before the first step would repeat" in scripted.said[-1]
    scripted = ScriptedJob(tmp_path, [(crash(0, -9, advanced=False), None), (JobResult(0), 9)])
    scripted.run()
    assert scripted.restarts == [0, 1] and "from the beginning" in scripted.said[-1]


def test_an_earlier_run_in_the_folder_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    """With resumes=False, a crash before the earlier run is moved aside restarts as a new run."""
    early = crash(0, advanced=False, opened=False)
    scripted = ScriptedJob(tmp_path, [(early, 500), (crash(3), None), (JobResult(0), 9)])
    scripted.run(resumes=False)
    assert scripted.restarts == [0, 0, 2] and "from the beginning" in scripted.said[1]
    scripted = ScriptedJob(tmp_path, [(early, 500), (JobResult(0), 9)])
    scripted.run(resumes=True)
    assert scripted.restarts == [0, 1] and "from step 500" in scripted.said[1]


def told(ended: JobResult, folder: Path, told_to_stop: bool = False) -> tuple[list[str], list[int]]:
    """Returns what is printed about an end with step 9 saved, and the attempts that are made."""
    scripted = ScriptedJob(folder, [(ended, 9), (JobResult(0), 9)])
    scripted.run(told_to_stop=told_to_stop)
    return scripted.said, scripted.restarts


def test_a_rank_that_dies_while_the_job_is_to_stop_is_named(tmp_path: Path) -> None:
    """The requested save has not happened, so that this must not look like a clean stop."""
    killed = JobResult(-9, [Failure(1, -9, 0.0)], signal.SIGTERM, 12, True, True)
    said, restarts = told(killed, tmp_path)
    assert said[0].startswith("rank 1 of 2 was killed by SIGKILL") and restarts == [0]
    assert said[1] == (
        "not started again, as SIGTERM requested a stop. The last checkpoint, step 9, is intact: the same command resumes from there"
    )
    assert killed.status == 1
    # A signal for which the rank had no handler yet.
    early = JobResult(-15, [Failure(1, -15, 0.0)])
    said, restarts = told(early, tmp_path)
    assert "rank 1 of 2 was killed by SIGTERM" in said[0] and restarts == [0] and early.status == 143
    # Ranks that stop in good order have printed that themselves.
    assert told(JobResult(143, [Failure(1, 143, 0.0)]), tmp_path) == ([], [0])


def test_a_signal_that_comes_while_a_crash_is_looked_at_is_no_restart(tmp_path: Path) -> None:
    said, restarts = told(crash(12), tmp_path, told_to_stop=True)
    assert restarts == [0] and "not started again, as SIGTERM requested" in said[-1]
    assert not (tmp_path / "restarts.jsonl").exists()


def test_nothing_is_written_into_the_folder_of_a_running_job(tmp_path: Path) -> None:
    early = crash(0, advanced=False, opened=False)
    with lock_folder(tmp_path):
        told(early, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock"]
    told(early, tmp_path)
    assert (tmp_path / "train.log").exists() and (tmp_path / "restarts.jsonl").exists()


class Dead:
    """Handle of a process that cannot be reaped."""

    pid, returncode = 2**22 + 1, None

    def poll(self) -> None:
        return None


def process(rank: int, code: int | None, was_killed: bool = False) -> Process:
    return Process(rank, Dead(), code, 1.0, was_killed)  # type: ignore[arg-type]


def test_a_hang_is_none_the_better_for_processes_that_do_not_die(tmp_path: Path) -> None:
    """A process that waits for a lost disk does not die."""
    hang = Failure(1, 1, 0.0, "hung", message="rank 1 hangs")
    ended = launcher._ended([process(0, None), process(1, None)], ReceivedSignals(), tmp_path, hang)
    assert ended.is_crash and ended.failures == [hang]


def test_a_rank_that_crashes_just_before_we_end_it_has_crashed(tmp_path: Path) -> None:
    found = find_failures([process(0, -9, was_killed=True), process(1, -11, was_killed=True)], tmp_path)
    assert [failure.rank for failure in found] == [1, 0] and "SIGSEGV" in found[0].how


def test_only_ranks_that_listen_are_asked_for_their_stacks(tmp_path: Path) -> None:
    """SIGQUIT kills a rank that has not installed its handler yet."""
    asked: list[int] = []

    class Asked(Process):
        def send(self, number: signal.Signals) -> None:
            asked.append(self.rank)

    beating = RankState(beat(1), 70.0, 70.0, is_silent=True)
    running = [Asked(rank, Dead()) for rank in (0, 1)]  # type: ignore[arg-type]
    failure = JobWatchdog(HangLimits(None, 600.0), tmp_path)._report_hang(
        Hang([beating], [1]), running, tmp_path, 2
    )
    assert asked == [1] and failure.rank == 1 and (tmp_path / "hang-7.txt").exists()


def test_commands_print_the_failure_record_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank records its traceback instead of printing it; its launcher prints it."""
    failure = Failure(1, 1, 0.0, "exception", "Traceback\nLookupError: a bug\n")
    monkeypatch.setattr(launcher, "run_workers", lambda *words: JobResult(1, [failure]))
    monkeypatch.setattr(verify.environment, "set_worker_environment", lambda threads: [])
    with pytest.raises(
        UserError, match="rank 1 of 2 failed with exit code 1:\nTraceback\nLookupError: a bug"
    ):
        verify._run_ranks(2, [], resolved().config)

"""Client of the zygote: starts it when first needed, sends jobs, and restarts it after its death."""

import contextlib
import functools
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.harness import processes
from tests.harness.messages import Job, Outcome, Started
from tests.harness.report import RanksFailed

REPOSITORY = Path(__file__).parents[2]
START_SECONDS = 180.0
STOP_SECONDS = 10.0
# The zygote stops a hanging test itself; without an answer this much later, the zygote hangs too.
ANSWER_MARGIN = 60.0


def rank_environment() -> dict[str, str]:
    """Returns the environment of ranks: one OpenMP thread each, and gloo on the loopback interface."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment


class Zygote:
    """One zygote process, started and ready."""

    def __init__(self) -> None:
        started_at = time.monotonic()
        shared_memory = Path("/dev/shm")
        in_memory = shared_memory if os.access(shared_memory, os.W_OK) else None
        self.scratch = Path(tempfile.mkdtemp(prefix="pentatron-ranks-", dir=in_memory))
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the zygote writes to it
        self._rank_group: int | None = None
        self._connection, zygotes_end = multiprocessing.Pipe()
        with zygotes_end:
            self._process = self._launch(zygotes_end.fileno())
        try:
            self._receive(START_SECONDS, doing="starting")
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - started_at

    def _launch(self, descriptor: int) -> subprocess.Popen[bytes]:
        # Unbuffered, so that what a rank has printed survives its crash.
        command = [sys.executable, "-u", "-m", "tests.harness.zygote", str(descriptor), str(self.scratch)]
        return subprocess.Popen(
            command,
            cwd=REPOSITORY,
            # Plugins would only cost time: the zygote uses only the assertion rewriting of pytest.
            env=rank_environment() | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C goes to the test process, which ends the zygote in order
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, job: Job) -> list[Outcome]:
        """Runs a job and returns the outcome of every rank.

        Raises `RanksFailed` only if the zygote itself fails. After any exception only `stop` may be called.
        """
        doing = f"running {job.name} on {job.world} ranks"
        # If the zygote is gone, receiving its answer fails as well, with the reason.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(job)
        started: Started = self._receive(ANSWER_MARGIN, doing)
        self._rank_group = started.process_group
        outcomes: list[Outcome] = self._receive(job.timeout + ANSWER_MARGIN, doing)
        self._rank_group = None
        return outcomes

    def _receive(self, seconds: float, doing: str) -> Any:
        try:
            if self._connection.poll(seconds):
                return self._connection.recv()
            end = f"has not answered for {seconds:g} s"
        except (EOFError, OSError):  # OSError: it ended in the middle of an answer
            end = processes.describe_exit(self._process.wait())
        raise RanksFailed(
            f"the zygote (process {self.pid}) {end} while {doing}; the next test starts a new one\n{self._read_log()}"
        )

    def _read_log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def stop(self) -> None:
        """Stops the zygote and its ranks, and removes its files.

        The zygote exits by itself when the connection closes; it is killed if it does not.
        """
        self._connection.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._rank_group is not None:
            processes.kill_group(self._rank_group)
        shutil.rmtree(self.scratch, ignore_errors=True)
        self._log.close()


class ZygoteKeeper:
    """Holds one zygote: starts it at the first job, and a new one after its death."""

    def __init__(self) -> None:
        self._zygote: Zygote | None = None

    def zygote(self) -> Zygote:
        if self._zygote is not None and not self._zygote.alive:
            self.close()
        if self._zygote is None:
            self._zygote = Zygote()
        return self._zygote

    def run(self, job: Job) -> list[Outcome]:
        zygote = self.zygote()
        try:
            return zygote.run(job)
        except BaseException:  # Ctrl-C too: the answer still to come would be taken for that of the next job
            self.close()
            raise

    def close(self) -> None:
        if self._zygote is not None:
            self._zygote.stop()
            self._zygote = None


@functools.cache
def session_zygote() -> ZygoteKeeper:
    """Returns the zygote keeper of this process."""
    return ZygoteKeeper()

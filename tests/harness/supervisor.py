"""Supervision of the ranks of one test by the zygote, from the fork until all processes are gone."""

import os
import pickle
import select
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from tests.harness import processes
from tests.harness.messages import Job, Outcome, RankFiles, Started
from tests.harness.rank import STACK_SIGNAL

# Time for the other ranks to fail with their own message after the first failure.
GRACE_SECONDS = 1.0
# Time limit for ranks to dump their stacks.
STACK_SECONDS = 2.0
STACK_POLL_SECONDS = 0.05


class ClientGone(Exception):
    """Raised if the test process has ended or given up while its ranks were running."""


class Ranks:
    """The processes of one test, with the outcome and the exit code of each."""

    def __init__(self, job: Job, directory: Path, pids: list[int]) -> None:
        self.job = job
        self.pids = pids
        self.files = [RankFiles(directory, rank) for rank in range(job.world)]
        self.outcomes: dict[int, Outcome] = {}
        self.exit_codes: dict[int, int] = {}
        self.started_at = time.monotonic()

    def finish(self, doorbell: int, client: Connection) -> list[Outcome]:
        """Waits for all ranks, kills those that are left, and returns how each ended."""
        try:
            client.send(Started(process_group=self.pids[0]))
            self._wait(doorbell, client)
            self._give_up_on_unfinished()
        finally:
            processes.kill_and_reap_descendants(self.pids[0])
        return [replace(self.outcomes[rank], output=self._output(rank)) for rank in range(self.job.world)]

    def _wait(self, doorbell: int, client: Connection) -> None:
        """Waits until every rank has ended or time is up.

        The doorbell rings for each report and for each exit.
        """
        deadline = self.started_at + self.job.timeout
        while self._unfinished():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            ready, _, _ = select.select([doorbell, client.fileno()], [], [], remaining)
            if client.fileno() in ready:  # it sends nothing during a test: it must have closed the connection
                raise ClientGone
            if doorbell in ready:
                os.read(doorbell, 4096)
            had_failure = self._has_failure()
            self._collect()
            if self._has_failure() and not had_failure:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)

    def _unfinished(self) -> list[int]:
        return [rank for rank in range(self.job.world) if rank not in self.outcomes]

    def _has_failure(self) -> bool:
        return any(not outcome.ok for outcome in self.outcomes.values())

    def _collect(self) -> None:
        """Collects new reports and exit codes."""
        for rank in range(self.job.world):
            known = self.outcomes.get(rank)
            if known is not None and not known.ok:
                continue
            # The exit code is read first: a rank that reports and exits between the two reads must not count
            # as one that exited without a report.
            exit_code = self._exit_code(rank)
            report = known or self._read_report(rank)
            if exit_code is not None and (report is None or report.ok):
                self.outcomes[rank] = self._death(rank, exit_code, returned=report is not None)
            elif report is not None:
                self.outcomes[rank] = report

    def _exit_code(self, rank: int) -> int | None:
        if rank not in self.exit_codes:
            pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if pid != 0:
                self.exit_codes[rank] = os.waitstatus_to_exitcode(status)
        return self.exit_codes.get(rank)

    def _read_report(self, rank: int) -> Outcome | None:
        try:
            return pickle.loads(self.files[rank].report.read_bytes())
        except FileNotFoundError:
            return None

    def _death(self, rank: int, exit_code: int, returned: bool) -> Outcome:
        when = " after its function had returned" if returned else ""
        headline = processes.describe_exit(exit_code) + when
        return Outcome(
            rank, ok=False, at=time.monotonic(), headline=headline, stack=_read(self.files[rank].stack)
        )

    def _give_up_on_unfinished(self) -> None:
        """Records the stack of every rank that is still running."""
        self._collect()
        unfinished = self._unfinished()
        if self._has_failure():
            headline = f"was still running {GRACE_SECONDS:g} s after another rank had failed"
        else:
            headline = f"had not finished after {self.job.timeout:g} s"
        self._dump_stacks(unfinished)
        for rank in unfinished:
            stack = _read(self.files[rank].stack)
            self.outcomes[rank] = Outcome(
                rank, ok=False, at=time.monotonic(), headline=headline, stack=stack, unfinished=True
            )

    def _dump_stacks(self, ranks: list[int]) -> None:
        """Makes ranks dump their stacks; returns when no file is empty and none grows any more."""
        if not ranks:
            return
        for rank in ranks:
            os.kill(self.pids[rank], STACK_SIGNAL)
        sizes: list[int] = []
        give_up = time.monotonic() + STACK_SECONDS
        while time.monotonic() < give_up:
            time.sleep(STACK_POLL_SECONDS)
            before, sizes = sizes, [len(_read(self.files[rank].stack)) for rank in ranks]
            if sizes == before and all(sizes):
                return

    def _output(self, rank: int) -> str:
        return _read(self.files[rank].output)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""

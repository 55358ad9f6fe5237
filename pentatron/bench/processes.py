"""The processes of one layout after another, forked from a server that has imported everything once.

A sweep starts hundreds of processes, and importing torch takes seconds in each; under `pentatron train` they are started
one by one by torch's agent, and then do the same.
"""

import multiprocessing
import multiprocessing.context
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_POLL_SECONDS = 0.1
# How long the others get to notice that one is gone, and to end by themselves.
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Ended:
    """Exit codes in the order of the ranks; negative ones are signals. `first` are the ranks that failed first, as far as one
    look tells them apart. `timed_out`: some had to be stopped."""

    exit_codes: Sequence[int]
    timed_out: bool = False
    first: Sequence[int] = ()

    @property
    def is_good(self) -> bool:
        return not self.timed_out and not any(self.exit_codes)

    def killed(self, or_aborted: bool = False) -> str | None:
        """A rank that a signal ended before any other failed, in words. A process aborts itself (`or_aborted`) when another is
        gone, so that this may be the consequence."""
        for rank in self.first:
            code = self.exit_codes[rank]
            if code < 0 and not self.timed_out and (or_aborted or code != -signal.SIGABRT):
                return f"rank {rank} was killed by {signal.Signals(-code).name}{_why(-code)}"
        return None


def _why(number: int) -> str:
    return " (the system does that when memory runs out)" if number == signal.SIGKILL else ""


class Starter:
    """Starts a function once per rank. `preload` names modules that the server imports before it forks."""

    def __init__(self, preload: Sequence[str]) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))

    def run(
        self,
        target: Callable[..., None],
        arguments_of: Callable[[int], tuple[Any, ...]],
        processes: int,
        timeout: float,
        tick: Callable[[], None],
    ) -> Ended:
        """Waits for all of them, and calls `tick` now and then."""
        workers = [
            # Not daemons, which may have no children: a rank starts processes that read its data.
            self._context.Process(target=target, args=arguments_of(rank))
            for rank in range(processes)
        ]
        deadline = time.monotonic() + timeout
        timed_out = False
        first: list[int] = []
        try:
            for worker in workers:
                worker.start()
            while any(worker.exitcode is None for worker in workers):
                time.sleep(_POLL_SECONDS)
                tick()
                first = first or [rank for rank, worker in enumerate(workers) if worker.exitcode]
                if first:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                if time.monotonic() > deadline:
                    timed_out = not any(worker.exitcode for worker in workers)
                    break
            codes = [worker.exitcode for worker in workers]
        finally:
            for worker in workers:
                if worker.pid is not None and worker.exitcode is None:
                    worker.kill()
            for worker in workers:
                if worker.pid is not None:
                    worker.join()
        # Those that were still there have not failed; somebody else has.
        first = first or [rank for rank, code in enumerate(codes) if code]
        return Ended([0 if code is None else code for code in codes], timed_out, first)


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

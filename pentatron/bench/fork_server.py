"""Runs the ranks of layouts with a fork server, which imports torch once for hundreds of processes."""

import multiprocessing
import multiprocessing.context
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_POLL_SECONDS = 0.1
# Time for the other ranks to end by themselves after the first one has failed.
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class RankExits:
    """Exit codes by rank; negative ones are signals.

    `first`: the ranks that had failed at the first poll that saw a failure. `timed_out`: some ranks had to be
    killed.
    """

    exit_codes: Sequence[int]
    timed_out: bool = False
    first: Sequence[int] = ()

    @property
    def is_good(self) -> bool:
        return not self.timed_out and not any(self.exit_codes)

    def killed_message(self, or_aborted: bool = False) -> str | None:
        """Returns the message if a signal killed the rank that failed first.

        SIGABRT counts only with `or_aborted`: a process may abort itself because another rank was lost.
        """
        for rank in self.first if not self.timed_out else ():
            code = self.exit_codes[rank]
            if code < 0 and (or_aborted or code != -signal.SIGABRT):
                reason = " (the system does that when memory runs out)" if code == -signal.SIGKILL else ""
                return f"rank {rank} was killed by {signal.Signals(-code).name}{reason}"
        return None


class ForkServer:
    """Runs a function in one process per rank. `preload`: modules that the fork server imports."""

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
    ) -> RankExits:
        """Starts the processes and waits for them; calls `tick` at each poll."""
        # Not daemons, because a rank starts data workers and daemons may not have children.
        workers = [self._context.Process(target=target, args=arguments_of(rank)) for rank in range(processes)]
        deadline, timed_out = time.monotonic() + timeout, False
        first: list[int] = []
        try:
            for worker in workers:
                worker.start()
            while any(worker.exitcode is None for worker in workers):
                time.sleep(_POLL_SECONDS)
                tick()
                first = first or [rank for rank, worker in enumerate(workers) if worker.exitcode]
                # A rank that waits in a collective may never notice the failure.
                if first:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                if time.monotonic() > deadline:
                    timed_out = not any(worker.exitcode for worker in workers)
                    break
            codes = [worker.exitcode for worker in workers]
        finally:
            started = [worker for worker in workers if worker.pid is not None]
            for worker in started:
                if worker.exitcode is None:
                    worker.kill()
            for worker in started:
                worker.join()
        # `codes` is from before the kill, so ranks that were killed above do not count as failed.
        first = first or [rank for rank, code in enumerate(codes) if code]
        return RankExits([code or 0 for code in codes], timed_out, first)


def free_port() -> int:
    """Returns a port that no process uses now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])

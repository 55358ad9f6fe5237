"""Runs a command in this process with limits of memory and time, and returns its outcome."""

import io
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pentatron.cli.main import main

Kind = Literal["accepted", "refused", "traceback"]


@dataclass(frozen=True)
class Outcome:
    """`kind`: exit code 0, another exit code, or an exception that would have reached the user."""

    kind: Kind
    said: str

    @property
    def is_good(self) -> bool:
        """Whether it was accepted, or refused with one sentence that is not about host memory."""
        complaints = [line for line in self.said.splitlines() if line.startswith("pentatron: ")]
        refused = self.kind == "refused" and len(complaints) == 1 and "out of host memory" not in self.said
        return self.kind == "accepted" or refused


class TookTooLong(BaseException):
    """Raised at the time limit. Not an Exception, so that no handler of the program catches it."""


@contextmanager
def limited(memory_bytes: int, seconds: float) -> Iterator[None]:
    """Limits time, and address space beyond what this process has now.

    Needs the main thread; the memory limit needs Linux.
    """

    def stop(number: int, frame: Any) -> None:
        raise TookTooLong(f"more than {seconds} seconds")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, stop)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGESIZE") + memory_bytes, hard))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, handler)


def run_bounded(words: Sequence[object], memory_bytes: int = 1 << 30, seconds: float = 20) -> Outcome:
    """Runs a command line."""
    return bounded(lambda: main([str(word) for word in words]), memory_bytes, seconds)


def bounded(action: Callable[[], int], memory_bytes: int = 1 << 30, seconds: float = 20) -> Outcome:
    """Runs an action that returns an exit code; returns its outcome."""
    said = io.StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said), limited(memory_bytes, seconds):
            code = action()
    except (Exception, TookTooLong, SystemExit):
        return Outcome("traceback", f"{said.getvalue()}\n{traceback.format_exc()}")
    return Outcome("accepted" if code == 0 else "refused", said.getvalue())

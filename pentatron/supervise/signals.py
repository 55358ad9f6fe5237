"""Signal handling of a worker: Ctrl-C and termination signals stop the run after the current step."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

# SIGHUP: closed terminal. SIGUSR1, SIGUSR2: warnings of schedulers before preemption. SIGXCPU: limit of CPU
# time (RLIMIT_CPU).
WATCHED = tuple(signal.Signals[f"SIG{name}"] for name in ("INT", "TERM", "HUP", "USR1", "USR2", "XCPU"))
# A scheduler signals every process of a job, and the launcher forwards its signal: the second one is an echo.
_ECHO_SECONDS = 5.0


def signals_to_watch() -> list[signal.Signals]:
    """Returns the watched signals, without SIGHUP if it is ignored, as under `nohup`."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in WATCHED if not (ignored and number == signal.SIGHUP)]


class StoppedEarly(BaseException):
    """Raised by a signal before the training loop, when there is nothing to save."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {signal_name(number)} before the first step; nothing was trained yet")
        self.number = number


class StopRequest:
    """Signal handler that records the first signal. A second Ctrl-C raises KeyboardInterrupt.

    While a run `is_starting`, a signal raises `StoppedEarly` instead: a start may block for long, in a dead
    mount or while data is tokenized, and Python resumes a blocked call after a handler that returns.

    Further signals are ignored: schedulers repeat theirs, which must not interrupt the save. `launcher`:
    process ID to watch. `prints_notice`: whether Ctrl-C prints a line.
    """

    def __init__(self, launcher: int | None = None, prints_notice: bool = False) -> None:
        self._received: signal.Signals | None = None
        self._prints_notice = prints_notice
        self._launcher = launcher
        self._since = 0.0
        self.is_starting = False

    @property
    def signal(self) -> signal.Signals | None:
        # Without its launcher a rank receives no signals: it stops after the step.
        return signal.SIGTERM if self.is_orphaned else self._received

    @property
    def is_orphaned(self) -> bool:
        """Whether the launcher has died. The kernel may have sent SIGTERM for that (PR_SET_PDEATHSIG)."""
        gone = self._launcher is not None and os.getppid() != self._launcher
        return gone and self._received in (None, signal.SIGTERM)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received, self._since = signal.Signals(number), time.monotonic()
            if self.is_starting:
                raise StoppedEarly(self._received)
            if self._prints_notice and number == signal.SIGINT:
                # A step and its save may take minutes. Python's streams are not safe in a signal handler.
                with contextlib.suppress(OSError):
                    os.write(2, b"Ctrl-C: stopping after this step; press again to stop immediately\n")
        elif number == signal.SIGINT:
            is_echo = self._launcher is not None and time.monotonic() - self._since <= _ECHO_SECONDS
            if not is_echo:
                raise KeyboardInterrupt


Handler = TypeVar("Handler", bound=Callable[[int, FrameType | None], None])


@contextmanager
def handle_signals(handler: Handler, *numbers: signal.Signals) -> Iterator[Handler]:
    """Context manager in which `handler` is called for these signals, by default for all that are watched."""
    before = {number: signal.signal(number, handler) for number in numbers or signals_to_watch()}
    try:
        yield handler
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def signal_name(number: signal.Signals) -> str:
    return "Ctrl-C" if number == signal.SIGINT else number.name

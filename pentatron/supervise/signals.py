"""Ctrl-C and termination signals as a request, honoured at the next step boundary."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Besides the usual two: a closed terminal, the warnings that schedulers send before they take a machine away, and that of the kernel before the
# limit of CPU time (RLIMIT_CPU) is reached.
WATCHED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)
# A scheduler signals every process of a job, and the launcher passes on what it received: one request, told twice.
_ECHO_SECONDS = 5.0


def watched_here() -> list[signal.Signals]:
    """All of them, but for a closed terminal that is to be survived: `nohup` makes its command ignore that signal."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in WATCHED if not (ignored and number == signal.SIGHUP)]


class StoppedEarly(BaseException):
    """A signal that came before the loop: nothing is trained that would have to be saved."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {signal_name(number)} before the first step; nothing was trained yet")
        self.number = number


class StopRequest:
    """Set by the first signal. A second Ctrl-C ends the process at once; its last checkpoint is intact either way.

    While a run `is_starting`, a signal raises `StoppedEarly` instead: a start may be blocked for long, in a file of a dead mount or while data is
    tokenized, and Python resumes a blocked call after a handler that returns.

    Schedulers repeat their signals, or send a harder one after a warning; that must not break off the save they ask for.
    """

    def __init__(self, launcher: int | None = None, tells: bool = False) -> None:
        self._received: signal.Signals | None = None
        self._tells = tells
        self._launcher = launcher
        self._since = 0.0
        self.is_starting = False

    @property
    def signal(self) -> signal.Signals | None:
        # Without a launcher to pass signals on to us: end in good order rather than train on unseen.
        return signal.SIGTERM if self.is_left_alone else self._received

    @property
    def is_left_alone(self) -> bool:
        """The launcher is gone, which the kernel may have told us by SIGTERM, and nobody asked for anything else."""
        gone = self._launcher is not None and os.getppid() != self._launcher
        return gone and self._received in (None, signal.SIGTERM)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received, self._since = signal.Signals(number), time.monotonic()
            if self.is_starting:
                raise StoppedEarly(self._received)
            if self._tells and number == signal.SIGINT:
                # For a person who waits; a step and its save may take minutes. Not by Python's streams, which may be busy.
                with contextlib.suppress(OSError):
                    os.write(2, b"Ctrl-C: the run ends after this step; once more ends it at once\n")
        elif number == signal.SIGINT and not self._is_echo():
            raise KeyboardInterrupt

    def _is_echo(self) -> bool:
        return self._launcher is not None and time.monotonic() - self._since <= _ECHO_SECONDS


@contextmanager
def stop_on_signals(launcher: int | None, tells: bool = False) -> Iterator[StopRequest]:
    """Watches the signals, and, if a launcher's process id is given, that it lives. `tells`: that Ctrl-C came."""
    request = StopRequest(launcher, tells)
    before = {number: signal.signal(number, request) for number in watched_here()}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signal_name(number: signal.Signals) -> str:
    return "Ctrl-C" if number == signal.SIGINT else number.name

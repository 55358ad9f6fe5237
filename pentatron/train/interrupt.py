"""Ctrl-C and termination signals as a request, honoured at the next step boundary."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Set by the first signal. The second one ends the process at once; its last checkpoint is intact either way."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def requested(self) -> bool:
        return self.signal is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    request = StopRequest()
    watched = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, request) for number in watched}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""A request to stop that reaches a worker twice, and a user who asks twice."""

import os
import signal

import pytest

from pentatron.train import interrupt
from pentatron.train.interrupt import StopRequest


def test_a_signal_and_its_echo_from_the_launcher_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm signals every process of a step, and torchrun passes on what it gets: the save must not be broken off."""
    now = 100.0
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: now)
    request = StopRequest(launcher=os.getppid())
    request(signal.SIGTERM, None)
    request(signal.SIGTERM, None)
    assert request.signal == signal.SIGTERM
    now += 60
    with pytest.raises(KeyboardInterrupt):
        request(signal.SIGTERM, None)


def test_without_a_launcher_the_second_signal_counts_at_once() -> None:
    request = StopRequest()
    request(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        request(signal.SIGINT, None)

"""Tests a stop signal that reaches a worker twice, and a user who presses Ctrl-C twice."""

import os
import signal

import pytest

from pentatron.supervise import signals
from pentatron.supervise.signals import StopRequest, handle_signals


def test_a_signal_and_its_echo_from_the_launcher_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell signals every process and torchrun forwards its signal: neither may interrupt the save."""
    now = 100.0
    monkeypatch.setattr(signals.time, "monotonic", lambda: now)
    request = StopRequest(launcher=os.getppid())
    request(signal.SIGINT, None)
    request(signal.SIGINT, None)
    assert request.signal == signal.SIGINT
    now += 60
    with pytest.raises(KeyboardInterrupt):
        request(signal.SIGINT, None)


def test_repeated_signals_are_one_request() -> None:
    """Slurm sends SIGUSR1, and SIGTERM at the time limit; only a second Ctrl-C ends the run at once."""
    request = StopRequest()
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
        request(number, None)
    assert request.signal == signal.SIGUSR1


def test_without_a_launcher_the_second_signal_counts_at_once() -> None:
    request = StopRequest()
    request(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        request(signal.SIGINT, None)


def test_the_first_ctrl_c_is_answered_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    request = StopRequest(prints_notice=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        request(number, None)
    StopRequest()(signal.SIGINT, None)
    assert capfd.readouterr().err == "Ctrl-C: stopping after this step; press again to stop immediately\n"


def test_a_launcher_that_is_gone_is_not_called_a_signal() -> None:
    alone, asked = StopRequest(launcher=os.getppid() + 1), StopRequest(launcher=os.getppid() + 1)
    asked(signal.SIGINT, None)
    assert alone.is_orphaned and alone.signal == signal.SIGTERM
    alone(signal.SIGTERM, None)
    assert alone.is_orphaned, "the kernel's word of it"
    assert not asked.is_orphaned


def test_a_closed_terminal_is_survived_where_the_command_was_started_with_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handle_signals(StopRequest()) as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert request.signal is None
            os.kill(os.getpid(), signal.SIGUSR1)
            assert request.signal == signal.SIGUSR1
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)

"""Reports a failing recorder once, at its start or later, and stops calling it."""

import errno

from pentatron.monitor.recorder import Recorder, RecorderUnavailable, TolerantRecorder
from pentatron.monitor.report import StepReport
from tests.monitor.test_log_lines import report


class Breaking(Recorder):
    """Raises OSError at its second step."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.is_closed = False

    def record(self, report: StepReport, validation: float | None) -> None:
        self.steps.append(report.step)
        if len(self.steps) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        self.is_closed = True


def test_failure_during_the_run_is_reported_once() -> None:
    inner, said = Breaking(), list[str]()
    recorder = TolerantRecorder("the viewer", lambda: inner, said.append)
    for step in (1, 2, 3):
        recorder.record(report(step), None)
    recorder.evaluated(3, {})
    recorder.close()
    assert inner.steps == [1, 2] and not inner.is_closed
    assert said == ["warning: the viewer fails (No space left on device); training continues without it"]


def test_failure_at_the_start_is_reported_and_a_working_recorder_closed() -> None:
    def down() -> Recorder:
        raise RecorderUnavailable("it did not start")

    said: list[str] = []
    TolerantRecorder("the service", down, said.append).record(report(1), None)
    assert said == ["warning: the service fails (it did not start); training continues without it"]
    inner = Breaking()
    TolerantRecorder("the viewer", lambda: inner, said.append).close()
    assert inner.is_closed and len(said) == 1

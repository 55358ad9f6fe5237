"""Recorders that are not the run's own may fail: a full disk or a service that is down is no reason to stop training."""

from collections.abc import Callable, Mapping

from pentatron.monitor.recorder import Recorder, RecorderDown
from pentatron.monitor.report import StepReport


class Lenient(Recorder):
    """Around such a recorder. Its first failure is told, and from then on it is left alone."""

    def __init__(self, name: str, make: Callable[[], Recorder], tell: Callable[[str], None]) -> None:
        self.name, self.tell = name, tell
        self._recorder: Recorder | None = None

        def start() -> None:
            self._recorder = make()

        self._try(start)

    def record(self, report: StepReport, validation: float | None) -> None:
        if self._recorder is not None:
            recorder = self._recorder
            self._try(lambda: recorder.record(report, validation))

    def evaluated(self, step: int, losses: Mapping[str, float]) -> None:
        if self._recorder is not None:
            recorder = self._recorder
            self._try(lambda: recorder.evaluated(step, losses))

    def saved(self, step: int) -> None:
        if self._recorder is not None:
            recorder = self._recorder
            self._try(lambda: recorder.saved(step))

    def close(self) -> None:
        if self._recorder is not None:
            self._try(self._recorder.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except (OSError, RecorderDown) as error:
            self._recorder = None
            reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            self.tell(f"warning: {self.name} fails ({reason}); training goes on without it")

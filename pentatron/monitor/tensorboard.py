"""The numbers of every step for TensorBoard."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pentatron.errors import UserError
from pentatron.monitor.recorder import Recorder
from pentatron.monitor.report import StepReport
from pentatron.monitor.scalars import Choices, of_evaluation, scalars
from pentatron.text import redacted


class TensorBoard(Recorder):
    def __init__(
        self, folder: Path, settings: Mapping[str, Any], choices: Choices, interval: int, step: int
    ) -> None:
        """Events after `step` were lost with an interrupted run and are computed again: the viewer drops the old ones."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                "--tensorboard-dir needs the tensorboard package: pip install tensorboard"
            ) from None
        folder.mkdir(parents=True, exist_ok=True)
        # Its writer would find out in a thread of its own, with a traceback.
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)
        with contextlib.suppress(AttributeError):
            # What the thread fails with comes back from the next call as well; once is enough.
            events: Any = self._writer.file_writer
            events.event_writer._async_writer._worker._invoke_excepthook = lambda thread: None
        self.choices, self.interval = choices, interval
        for name, value in settings.items():
            self._writer.add_text(name, redacted(str(value)), global_step=step)

    def record(self, report: StepReport, validation: float | None) -> None:
        if report.step % self.interval and validation is None:
            return
        for scalar in scalars(report, validation, self.choices):
            place = report.consumed_samples if scalar.over_samples else report.step
            self._writer.add_scalar(scalar.name, scalar.value, place)
        self._writer.flush()

    def evaluated(self, step: int, losses: Mapping[str, float]) -> None:
        for scalar in of_evaluation(losses, self.choices):
            self._writer.add_scalar(scalar.name, scalar.value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

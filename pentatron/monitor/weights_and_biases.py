"""The numbers of every step for Weights & Biases."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentatron.errors import UserError
from pentatron.monitor.recorder import Recorder, RecorderDown
from pentatron.monitor.report import StepReport
from pentatron.monitor.scalars import Choices, of_evaluation, scalars
from pentatron.text import redacted


@dataclass(frozen=True)
class Place:
    """Whose run it is, its name there and the folder that wandb keeps its own files in."""

    project: str
    name: str
    entity: str | None
    folder: Path


@contextmanager
def _redacted_arguments() -> Iterator[None]:
    """Hides secrets of the command line from `wandb.init`, which stores and uploads `sys.argv`."""
    typed = sys.argv
    sys.argv = [redacted(word) for word in typed]
    try:
        yield
    finally:
        sys.argv = typed


class WeightsAndBiases(Recorder):
    def __init__(self, place: Place, settings: Mapping[str, Any], choices: Choices, interval: int) -> None:
        """Online, offline or off is what `wandb` itself is told (WANDB_MODE, `wandb login`)."""
        try:
            import wandb
        except ImportError:
            raise UserError("--wandb-project needs the wandb package: pip install wandb") from None
        place.folder.mkdir(parents=True, exist_ok=True)
        try:
            with _redacted_arguments():
                self._run = wandb.init(
                    dir=os.fspath(place.folder),
                    name=redacted(place.name),
                    project=place.project,
                    entity=place.entity,
                    config=dict(settings),
                )
        except wandb.errors.Error as error:
            reason = str(error).strip().rstrip(".").splitlines()[0]
            raise RecorderDown(
                f"it did not start: {reason}; log in with `wandb login`, or keep the run on this machine with WANDB_MODE=offline"
            ) from None
        self.choices, self.interval = choices, interval

    def record(self, report: StepReport, validation: float | None) -> None:
        if report.step % self.interval and validation is None:
            return
        # Its own horizontal axis is the step; the samples are a line of their own, to draw others over.
        found = {s.name: s.value for s in scalars(report, validation, self.choices) if not s.over_samples}
        self._run.log({**found, "samples vs steps": report.consumed_samples}, step=report.step)

    def evaluated(self, step: int, losses: Mapping[str, float]) -> None:
        if found := {scalar.name: scalar.value for scalar in of_evaluation(losses, self.choices)}:
            self._run.log(found, step=step)

    def close(self) -> None:
        self._run.finish()

"""Where a rank tells what happens in a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TextIO

from pentatron.monitor.display import Display
from pentatron.monitor.report import StepReport


class Recorder(Protocol):
    """Keeps the numbers of every step somewhere: a file, TensorBoard, a service."""

    def record(self, report: StepReport, validation: float | None) -> None:
        """To be called once a step; `validation` is the loss of the evaluation that followed it, if one did."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Output:
    """The terminal, the log and the recorders; only the first rank has any."""

    display: Display
    log: TextIO | None
    recorders: Sequence[Recorder] = ()

    def say(self, text: str) -> None:
        self.display.say(text)
        self.note(text)

    def note(self, text: str) -> None:
        """A line for the log alone."""
        if self.log is not None:
            self.log.write(f"{text}\n")
            self.log.flush()

    def record(self, report: StepReport, validation: float | None) -> None:
        for recorder in self.recorders:
            recorder.record(report, validation)

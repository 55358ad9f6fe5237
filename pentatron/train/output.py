"""Where a rank tells what happens in a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TextIO

from pentatron.config.printable import spoken
from pentatron.monitor.display import Display
from pentatron.monitor.log_lines import LogLines
from pentatron.monitor.recorder import Recorder
from pentatron.monitor.report import StepReport


@dataclass(frozen=True)
class Output:
    """The terminal, the log and the recorders; only the first rank has any.

    `echoes`: the terminal shows the lines of the log, instead of lines for people.
    """

    display: Display
    log: TextIO | None = None
    recorders: Sequence[Recorder] = ()
    lines: LogLines | None = None
    echoes: bool = False

    def say(self, text: str) -> None:
        self.display.say(text)
        self._write(text)

    def note(self, text: str) -> None:
        """A line for the log, which the terminal shows only if it shows the log."""
        if self.echoes:
            self.display.say(text)
        self._write(text)

    def _write(self, text: str) -> None:
        if self.log is not None:
            self.log.write(f"{spoken(text)}\n")
            self.log.flush()

    def step(self, report: StepReport, eta_seconds: float) -> None:
        self.display.step(report, eta_seconds)
        line = self.lines.after(report, datetime.now()) if self.lines else None
        if line is not None:
            self.note(line)

    def record(self, report: StepReport, validation: float | None) -> None:
        for recorder in self.recorders:
            recorder.record(report, validation)

    def left_out(self, step: int, consumed_samples: int, text: str) -> None:
        self.say(text)
        for recorder in self.recorders:
            recorder.left_out(step, consumed_samples)

    def evaluated(self, step: int, losses: Mapping[str, float]) -> None:
        for recorder in self.recorders:
            recorder.evaluated(step, losses)

    def saved(self, step: int, text: str) -> None:
        self.note(text)
        for recorder in self.recorders:
            recorder.saved(step)

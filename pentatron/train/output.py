"""Where a rank tells what happens in a run."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from pentatron.errors import UserError
from pentatron.monitor.display import Display
from pentatron.monitor.log_lines import LogLines
from pentatron.monitor.recorder import AppendedFile, Recorder
from pentatron.monitor.report import StepReport
from pentatron.monitor.terminal import output_error
from pentatron.text import spoken

_TERMINAL = "the terminal"


def refuse_pipes(*files: Path) -> None:
    """A run that opens a FIFO to write its log waits for a reader, for ever."""
    for file in files:
        if file.is_fifo():
            raise UserError(f"{file} is a FIFO, which a run cannot keep its records in; remove it")


@dataclass(frozen=True)
class Output:
    """The terminal, the log and the recorders; only the first rank has any.

    `echoes`: the terminal shows the lines of the log, instead of lines for people. `may_write`: whether the run's folder is still its
    own; if not, files are left as they are.
    """

    display: Display
    log: AppendedFile | None = None
    recorders: Sequence[Recorder] = ()
    lines: LogLines | None = None
    echoes: bool = False
    # What could not be written, once each.
    missing: list[str] = field(default_factory=list)
    may_write: Callable[[], bool] = lambda: True

    def say(self, text: str) -> None:
        self.display.say(text)
        self._write(text)

    def note(self, text: str) -> None:
        """A line for the log, which the terminal shows only if it shows the log."""
        if self.echoes:
            self.display.say(text)
        self._write(text)

    def _write(self, text: str) -> None:
        if self.log is None:
            return
        log = self.log
        if _TERMINAL not in self.missing and (lost := output_error()) is not None:
            self.missing.append(_TERMINAL)
            text = f"warning: standard output cannot be written any more ({lost.strerror}); this log has every line\n{text}"
        self.attempt("train.log", lambda: log.write(f"{spoken(text)}\n"))

    def attempt(
        self,
        what: str,
        write: Callable[[], object],
        else_: str = "training goes on, and it will lack lines",
    ) -> None:
        """A disk that is full ends no training: it is told once, with what becomes of it. Lines are missing until there is room."""
        if not self.may_write():
            return
        try:
            write()
        except OSError as error:
            if what not in self.missing:
                self.missing.append(what)
                self.display.say(f"warning: {what} cannot be written ({error.strerror or error}); {else_}")

    def _recorded(self, write: Callable[[Recorder], None]) -> None:
        for recorder in self.recorders:
            self.attempt(recorder.name, functools.partial(write, recorder))

    def step(self, report: StepReport, eta_seconds: float) -> None:
        self.display.step(report, eta_seconds)
        line = self.lines.after(report, datetime.now()) if self.lines else None
        if line is not None:
            self.note(line)

    def record(self, report: StepReport, validation: float | None) -> None:
        self._recorded(lambda recorder: recorder.record(report, validation))

    def left_out(self, step: int, consumed_samples: int, text: str) -> None:
        self.say(text)
        self._recorded(lambda recorder: recorder.left_out(step, consumed_samples))

    def evaluated(self, step: int, losses: Mapping[str, float]) -> None:
        self._recorded(lambda recorder: recorder.evaluated(step, losses))

    def saved(self, step: int, text: str) -> None:
        self.note(text)
        self._recorded(lambda recorder: recorder.saved(step))

    def close(self) -> None:
        """What is still unwritten then stays so."""
        if not self.may_write():
            return
        for close in (
            *(recorder.close for recorder in self.recorders),
            *([self.log.close] if self.log else []),
        ):
            with contextlib.suppress(OSError):
                close()

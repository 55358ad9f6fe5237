"""Progress on the terminal: a live bar where there is one, plain lines where there is none."""

import sys
import time
from typing import Any, Protocol, TextIO

from pentatron.monitor.report import StepReport, short_line
from pentatron.text import duration, in_mib, spoken

_SECONDS_BETWEEN_LINES = 5.0


class Display(Protocol):
    """Where a run shows what it is doing."""

    def say(self, text: str) -> None: ...

    def work(self, what: str, done: int, total: int, facts: str = "") -> None:
        """Progress of something before or beside the steps; `facts` stand beside the bar."""

    def step(self, report: StepReport, eta_seconds: float) -> None: ...

    def close(self) -> None: ...


class Silent:
    """For the ranks that do not speak."""

    def say(self, text: str) -> None:
        pass

    def work(self, what: str, done: int, total: int, facts: str = "") -> None:
        pass

    def step(self, report: StepReport, eta_seconds: float) -> None:
        pass

    def close(self) -> None:
        pass


class PlainLines:
    """One line every few seconds, and for the first and last step."""

    def __init__(self, out: TextIO, shows_steps: bool = True) -> None:
        self.out, self.shows_steps = out, shows_steps
        self._last = 0.0
        self._working_on = ""
        self._is_lost = False

    def say(self, text: str) -> None:
        if self._is_lost:
            return
        try:
            self.out.write(f"{spoken(text)}\n")
            self.out.flush()
        except OSError:
            # A stream of the caller's own has failed (the process's own ones do not raise); the log of the run has every line.
            self._is_lost = True

    def work(self, what: str, done: int, total: int, facts: str = "") -> None:
        if what != self._working_on:
            self._working_on = what
            self.say(f"{what} ...")

    def step(self, report: StepReport, eta_seconds: float) -> None:
        now = time.monotonic()
        if not self.shows_steps:
            return
        if now - self._last >= _SECONDS_BETWEEN_LINES or report.step in (1, report.total_steps):
            self._last = now
            self.say(short_line(report, eta_seconds))

    def close(self) -> None:
        pass


class LiveBar:
    """A bar with loss, learning rate, speed, memory and the time left."""

    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self.console = console
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[facts]}"),
            console=console,
        )
        self._task: Any = None
        self._title = ""
        self._progress.start()

    def say(self, text: str) -> None:
        self.console.print(spoken(text), markup=False, highlight=False)

    def work(self, what: str, done: int, total: int, facts: str = "") -> None:
        from rich.markup import escape

        self._show(escape(spoken(what)), done, total, f"{100 * done / max(total, 1):.0f} % {facts}")

    def step(self, report: StepReport, eta_seconds: float) -> None:
        facts = (
            f"{report.step}/{report.total_steps} loss [green]{report.loss:.4f}[/] lr {report.learning_rate:.1e} "
            f"{report.tokens_per_second:,.0f} tok/s {in_mib(report.memory_bytes)} MiB "
            f"left [cyan]{duration(eta_seconds)}[/]"
        )
        self._show("training", report.step, report.total_steps, facts)

    def _show(self, title: str, done: int, total: int, facts: str) -> None:
        if title != self._title:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(title, total=total, facts=facts)
            self._title = title
        self._progress.update(self._task, completed=done, total=total, facts=facts)

    def close(self) -> None:
        self._progress.stop()


def open_display(mode: str, out: TextIO | None = None, shows_steps: bool = True) -> Display:
    """The display for rank 0: `auto` draws a bar on a terminal. Without a bar, lines on steps may come from elsewhere."""
    stream = out or sys.stdout
    if mode == "off" or (mode == "auto" and not stream.isatty()):
        return PlainLines(stream, shows_steps)
    try:
        from rich.console import Console
    except ImportError:
        plain = PlainLines(stream, shows_steps)
        plain.say("no progress bar: the rich library is not installed (pip install rich)")
        return plain
    return LiveBar(Console(file=stream, force_terminal=True if mode == "on" else None))

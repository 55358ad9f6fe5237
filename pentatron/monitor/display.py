"""Displays progress on the terminal: a progress bar, or plain lines without a terminal."""

import sys
import time
from typing import Any, TextIO

from pentatron.monitor.report import StepReport, progress_line
from pentatron.text import duration, in_mib, printable_without_secrets

_SECONDS_BETWEEN_LINES = 5.0


class Display:
    """Shows what a run is doing. The base class shows nothing."""

    def say(self, text: str) -> None:
        """Prints a message."""

    def work(self, what: str, done: int, total: int, facts: str = "") -> None:
        """Shows progress of work other than steps. `facts` are shown beside the bar."""

    def step(self, report: StepReport, eta_seconds: float) -> None:
        """Shows a training step."""

    def close(self) -> None:
        """Ends the display."""


class SilentDisplay(Display):
    """Display of ranks that print nothing."""


class PlainLines(Display):
    """Prints a line every few seconds, and for the first and last step."""

    def __init__(self, out: TextIO, shows_steps: bool = True) -> None:
        self.out, self.shows_steps = out, shows_steps
        self._last = 0.0
        self._current_work = ""
        self._has_failed = False

    def say(self, text: str) -> None:
        if self._has_failed:
            return
        try:
            self.out.write(f"{printable_without_secrets(text)}\n")
            self.out.flush()
        except OSError:
            # Only streams of the caller raise (see terminal.py). The run's log contains every line.
            self._has_failed = True

    def work(self, what: str, done: int, total: int, facts: str = "") -> None:
        if what != self._current_work:
            self._current_work = what
            self.say(f"{what} ...")

    def step(self, report: StepReport, eta_seconds: float) -> None:
        is_due = time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES
        if self.shows_steps and (is_due or report.step in (1, report.total_steps)):
            self._last = time.monotonic()
            self.say(progress_line(report, eta_seconds))


class LiveBar(Display):
    """Progress bar with loss, learning rate, throughput, memory and remaining time."""

    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self.console = console
        title, facts = TextColumn("[bold]{task.description}"), TextColumn("{task.fields[facts]}")
        self._progress = Progress(title, BarColumn(bar_width=20), facts, console=console)
        self._title = ""
        self._progress.start()

    def say(self, text: str) -> None:
        self.console.print(printable_without_secrets(text), markup=False, highlight=False)

    def work(self, what: str, done: int, total: int, facts: str = "") -> None:
        from rich.markup import escape

        title = escape(printable_without_secrets(what))
        self._show(title, done, total, f"{100 * done / max(total, 1):.0f} % {facts}")

    def step(self, report: StepReport, eta_seconds: float) -> None:
        losses = f"loss [green]{report.loss:.4f}[/] lr {report.learning_rate:.1e}"
        speed = f"{report.tokens_per_second:,.0f} tok/s {in_mib(report.memory_bytes)} MiB"
        facts = f"{report.step}/{report.total_steps} {losses} {speed} left [cyan]{duration(eta_seconds)}[/]"
        self._show("training", report.step, report.total_steps, facts)

    def _show(self, title: str, done: int, total: int, facts: str) -> None:
        if title != self._title:
            for task in self._progress.task_ids:
                self._progress.remove_task(task)
            self._progress.add_task(title, total=total, facts=facts)
            self._title = title
        self._progress.update(self._progress.task_ids[0], completed=done, total=total, facts=facts)

    def close(self) -> None:
        self._progress.stop()


def open_display(mode: str, out: TextIO | None = None, shows_steps: bool = True) -> Display:
    """Returns the display of rank 0.

    `auto` shows a bar on a terminal. `shows_steps`: print steps without a bar.
    """
    stream = out or sys.stdout
    plain = PlainLines(stream, shows_steps)
    if mode == "off" or (mode == "auto" and not stream.isatty()):
        return plain
    try:
        from rich.console import Console
    except ImportError:
        plain.say("no progress bar: the rich library is not installed (pip install rich)")
        return plain
    return LiveBar(Console(file=stream, force_terminal=True if mode == "on" else None))

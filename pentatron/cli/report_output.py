"""The answer of a command: one report, shown as text for people or as JSON for programs."""

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pentatron.cli.terminal import say

Report = TypeVar("Report")


def show(
    report: Report,
    as_json: bool,
    text: Callable[[Report], str | Iterable[str]],
    data: Callable[[Report], Any],
) -> None:
    """Prints a report. `text` makes one text of it or lines that are printed as they come, `data` what JSON can hold."""
    if as_json:
        say_json(data(report))
        return
    made = text(report)
    for lines in (made,) if isinstance(made, str) else made:
        say(lines)


def say_json(data: Any, *, indent: int | None = 1, ascii_only: bool = True) -> None:
    say(json.dumps(data, indent=indent, ensure_ascii=ascii_only))


def say_json_rows(rows: Iterable[Any]) -> None:
    """A list with one element on every line."""
    say("[\n " + ",\n ".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]")

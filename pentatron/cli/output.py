"""Words for the user."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pentatron.errors import UserError, file_sentence
from pentatron.monitor.terminal import OutputLost
from pentatron.text import spoken


def say(text: str) -> None:
    """What it is about may come from files of strangers, so nothing of it steers the terminal."""
    paint(spoken(text))


def paint(text: str) -> None:
    """The same with colours of our own."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def complain(text: str) -> None:
    """An error the user can act on, without a traceback."""
    sys.stderr.write(f"pentatron: {spoken(text)}\n")
    sys.stderr.flush()


def remark(text: str) -> None:
    """A note beside the answer of a command, which may be JSON for another program."""
    sys.stderr.write(f"note: {spoken(text)}\n")
    sys.stderr.flush()


def show_generated(text: str) -> None:
    """What a model has written, without an end of line. A young one writes control characters, which a terminal would obey; a file or
    another program gets them as they are."""
    if sys.stdout.isatty():
        text = "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)
    sys.stdout.write(text)
    sys.stdout.flush()


# The answer of a command: one report, shown as text for people or as JSON for programs.


Report = TypeVar("Report")


def show_report(
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


# Commands about files: what the system says of one of them is a sentence, not a traceback.


@contextmanager
def file_errors_told() -> Iterator[None]:
    try:
        yield
    except OutputLost:
        # Not about a file of the command.
        raise
    except OSError as error:
        raise UserError(file_sentence(error)) from error

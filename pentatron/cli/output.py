"""Prints text, errors, notes and reports to the terminal."""

import functools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from pentatron.text import printable_without_secrets

Report = TypeVar("Report")
P = ParamSpec("P")
# A command of the command line: its words, and for some further arguments.
Command = Callable[Concatenate[Sequence[str], P], int]


def with_help(usage: str, without_words: bool = False) -> "Callable[[Command[P]], Command[P]]":
    """Decorates a command to print its usage on `--help`, and also if it is called `without_words`."""

    def decorate(command: "Command[P]") -> "Command[P]":
        @functools.wraps(command)
        def run(words: Sequence[str], *args: P.args, **keywords: P.kwargs) -> int:
            if "--help" in words or "-h" in words or (without_words and not words):
                say(usage)
                return 0
            return command(words, *args, **keywords)

        return run

    return decorate


def say(text: str) -> None:
    """Prints a line. Control characters are escaped, because the text may quote untrusted files."""
    say_unescaped(printable_without_secrets(text))


def say_unescaped(text: str) -> None:
    """Prints a line as it is, with terminal escape sequences such as colours."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def print_error(text: str) -> None:
    """Prints an error or a warning to stderr."""
    sys.stderr.write(f"pentatron: {printable_without_secrets(text)}\n")
    sys.stderr.flush()


def print_note(text: str) -> None:
    """Prints a note to stderr, because stdout may be JSON for another program."""
    sys.stderr.write(f"note: {printable_without_secrets(text)}\n")
    sys.stderr.flush()


def show_generated(text: str) -> None:
    """Prints generated text without a newline.

    A terminal gets a dot for each control character, which an undertrained model may generate; a file or pipe
    gets the text as it is.
    """
    if sys.stdout.isatty():
        text = "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)
    sys.stdout.write(text)
    sys.stdout.flush()


def show_report(
    report: Report,
    as_json: bool,
    text: Callable[[Report], str | Iterable[str]],
    data: Callable[[Report], Any],
) -> None:
    """Prints the result of a command.

    Args:
        text: formats the report as one text, or as texts that are printed while they are produced.
        data: converts the report to JSON types.
    """
    if as_json:
        say_json(data(report))
        return
    formatted = text(report)
    for part in (formatted,) if isinstance(formatted, str) else formatted:
        say(part)


def say_json(data: Any, *, indent: int | None = 1, ascii_only: bool = True) -> None:
    say(json.dumps(data, indent=indent, ensure_ascii=ascii_only))


def say_json_rows(rows: Iterable[Any]) -> None:
    """Prints a JSON array with one element per line."""
    say("[\n " + ",\n ".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]")

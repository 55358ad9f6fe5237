"""Words for the user."""

import sys

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


def show(text: str) -> None:
    """What a model has written, without an end of line. A young one writes control characters, which a terminal would obey; a file or
    another program gets them as they are."""
    if sys.stdout.isatty():
        text = "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)
    sys.stdout.write(text)
    sys.stdout.flush()

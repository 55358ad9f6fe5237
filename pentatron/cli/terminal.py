"""Words for the user."""

import sys


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def complain(text: str) -> None:
    """An error the user can act on, without a traceback."""
    sys.stderr.write(f"pentatron: {text}\n")
    sys.stderr.flush()

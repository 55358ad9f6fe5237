"""Options of the small commands; training has the table of settings instead."""

from collections.abc import Mapping, Sequence
from typing import Any

from pentatron.config.errors import UserError
from pentatron.config.flags import did_you_mean, is_flag, normal


def read_options(
    words: Sequence[str], defaults: Mapping[str, int | float], command: str
) -> tuple[dict[str, Any], list[str]]:
    """Options with the type of their default, and the words that are no options."""
    options, plain, queue = dict(defaults), [], list(words)
    while queue:
        word = queue.pop(0)
        if not is_flag(word):
            plain.append(word)
            continue
        name = normal(word)
        if name not in options:
            raise UserError(
                f"unknown flag {word}{did_you_mean(name, options, '--')}; {command} --help lists them"
            )
        written = word.partition("=")[2] or (queue.pop(0) if queue else "")
        kind = type(defaults[name])
        try:
            options[name] = kind(written)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise UserError(f"--{name} wants {wanted}, not '{written}'") from None
    return options, plain

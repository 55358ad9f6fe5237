"""Options of the small commands; training has the table of settings instead."""

from collections.abc import Mapping, Sequence
from typing import Any

from pentatron.config.errors import UserError
from pentatron.config.flags import did_you_mean, is_flag, normal


def read_options(
    words: Sequence[str],
    defaults: Mapping[str, Any],
    command: str,
    also: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Options with the type of their default, and the words that are no options.

    An option whose default is False takes no value, one whose default is a tuple all words up to the next option.
    `also` has further spellings of options; after `--` no word is one.
    """
    options: dict[str, Any] = dict(defaults)
    plain: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word == "--":
            return options, [*plain, *queue]
        if not is_flag(word):
            plain.append(word)
            continue
        name = (also or {}).get(normal(word), normal(word))
        if name not in options:
            raise UserError(
                f"unknown flag {word}{did_you_mean(name, options, '--')}; {command} --help lists them"
            )
        if defaults[name] is False:
            if "=" in word:
                raise UserError(f"--{name} takes no value")
            options[name] = True
        elif isinstance(defaults[name], tuple):
            options[name] = (word.partition("=")[2],) if "=" in word else _until_option(queue)
            if not any(options[name]):
                raise UserError(f"--{name} wants a value")
        else:
            written = word.partition("=")[2] or (queue.pop(0) if queue else "")
            options[name] = _value(name, defaults[name], written)
    return options, plain


def _until_option(queue: list[str]) -> tuple[str, ...]:
    taken = []
    while queue and not is_flag(queue[0]):
        taken.append(queue.pop(0))
    return tuple(taken)


def _value(name: str, default: int | float | str, written: str) -> int | float | str:
    kind = type(default)
    if kind is str and not written:
        raise UserError(f"--{name} wants a value")
    try:
        return kind(written)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise UserError(f"--{name} wants {wanted}, not '{written}'") from None

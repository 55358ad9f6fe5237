"""Options of the small commands; training has the table of settings instead."""

from collections.abc import Mapping, Sequence
from typing import Any

from pentatron.config.flags import did_you_mean, is_flag, normal
from pentatron.errors import ConfigError, UserError


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
    problems: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word == "--":
            plain += queue
            break
        if not is_flag(word):
            plain.append(word)
            continue
        name = (also or {}).get(normal(word), normal(word))
        if name not in options:
            typed = word.partition("=")[0]
            guess = did_you_mean(name, options, "--")
            problems.append(f"unknown flag {typed}{guess}; {command} --help lists them")
            continue
        try:
            options[name] = _read(name, defaults[name], word, queue, [*options, *(also or {})])
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(problems)
    return options, plain


def _read(name: str, default: Any, word: str, queue: list[str], known: Sequence[str]) -> Any:
    """The value of one option; consumes its words from the queue."""
    _, equals, written = word.partition("=")
    if default is False:
        if equals:
            raise UserError(f"--{name} takes no value")
        return True
    if isinstance(default, tuple):
        words = (written,) if equals else _until_option(queue)
        if not any(words):
            raise UserError(f"--{name} wants a value")
        return words
    # A value may begin with dashes, as options of another program do; one of our own has its own meaning.
    is_next = queue and not (is_flag(queue[0]) and "=" not in queue[0] and normal(queue[0]) in known)
    return _value(name, default, written if equals else queue.pop(0) if is_next else "")


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
        found = f", not '{written}'" if written else ""
        raise UserError(f"--{name} wants {wanted}{found}") from None

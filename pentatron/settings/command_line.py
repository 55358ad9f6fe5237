"""Parses a command line into settings.

argparse is not used: it cannot record the origin of a value, report all mistakes at once, treat `-` and `_`
alike or give a flag another meaning per entry point.
"""

import difflib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pentatron.errors import ConfigError, UserError
from pentatron.settings.declaration import Setting, Spelling, coerce
from pentatron.settings.entry_points import EntryPoint
from pentatron.settings.presets import presets
from pentatron.settings.run_config import all_settings
from pentatron.settings.settings import Assigned

# Unicode hyphens, dashes and the minus sign, which word processors and web pages substitute for `-`.
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"


@dataclass(frozen=True)
class ParsedFlags:
    """Settings given as flags, by name, and notices about them."""

    values: dict[str, Assigned] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


class FlagTable:
    """Maps each spelling of a flag that an entry point accepts to its setting."""

    def __init__(self, entry: EntryPoint) -> None:
        self.entry = entry
        settings = all_settings()
        self._by_flag = {s.flag: (item, s) for item in settings.values() for s in item.spellings}
        self._by_flag |= {flag: (settings[name], Spelling(flag)) for flag, name in entry.spellings.items()}

    def find(self, word: str) -> tuple[Setting, Spelling] | None:
        return self._by_flag.get(normalize_flag(word))

    def refusal(self, word: str) -> str:
        """Returns why this entry point refuses an ambiguous flag, or an empty string if it does not."""
        return self.entry.refused.get(normalize_flag(word), "")

    def unknown(self, word: str) -> str:
        """Returns the error message for an unknown or refused flag."""
        typed = word.split("=", 1)[0]
        if refusal := self.refusal(word):
            return f"{typed} is ambiguous here: {refusal}"
        guess = did_you_mean(normalize_flag(word), [*self.entry.own, *self._by_flag], "--")
        is_own = any(f"--{flag}?" in guess for flag in self.entry.own)
        program = self.entry.own_help if is_own and self.entry.own_help else self.entry.name
        return f"unknown flag {typed}{guess}; {program} --help lists them all"


def normalize_flag(word: str) -> str:
    """Normalizes the spelling of a flag: `--Tp_size=2` → `tp-size`."""
    return word.split("=", 1)[0].lstrip("-").replace("_", "-").lower()


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns ` (did you mean X?)` for the closest known word, or an empty string if none is close.

    If no known word is similar, the shortest one that contains `word` between dashes is suggested.
    """
    words = list(known)
    similar = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    matches = similar or sorted((k for k in words if word in k.replace("_", "-").split("-")), key=len)[:1]
    return f" (did you mean {prefix}{matches[0]}?)" if matches else ""


def parse_flags(words: Sequence[str], entry: EntryPoint) -> ParsedFlags:
    """Parses the words of a command line into settings. Raises `ConfigError` with all mistakes in them."""
    flags, parsed = FlagTable(entry), ParsedFlags()
    problems: list[str] = []
    # The shell passes a backslash followed by a space, as before a trailing comment, as a word of spaces.
    queue = [word for word in words if not word.isspace()]
    while queue:
        word = queue.pop(0)
        if word.startswith("#"):
            dropped = [word, *_take_until_flag(queue)]
            parsed.notices.append(f"dropped the comment '{' '.join(dropped)}' from the command line")
        elif not is_flag(word):
            problems.append(_not_a_flag(word, flags))
            if word.startswith(tuple(_DASHES)):
                _take_until_flag(queue)
        elif (match := flags.find(word)) is None:
            problems.append(flags.unknown(word))
            _take_until_flag(queue)
        else:
            try:
                _assign(parsed, word, *match, queue)
            except UserError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError(problems)
    return parsed


def _not_a_flag(word: str, flags: FlagTable) -> str:
    """Returns the error message for a word in the place of a flag, with a suggestion."""
    if word.startswith(tuple(_DASHES)):
        dash = f"U+{ord(word[0]):04X}"
        return f"'{word}' begins with the Unicode dash {dash} instead of '-'; write --{word.lstrip(_DASHES + '-')}"
    if "=" in word and flags.find(word) is not None:
        return f"'{word}' is not a flag; write --{word}"
    meant = f"--preset {word}" if word in presets() else "--name value (a value with spaces needs quotes)"
    return f"'{word}' is not a flag; write {meant}"


def _assign(parsed: ParsedFlags, word: str, item: Setting, spelling: Spelling, queue: list[str]) -> None:
    """Parses one flag.

    The last of repeated flags wins, as scripts that append flags expect, with a notice.
    """
    value = _parse_value(item, spelling, word, queue)
    source = f"flag {word.split('=', 1)[0]}"
    previous = parsed.values.get(item.name)
    if previous is not None and previous.value != value:
        earlier, later = item.written(previous.value, previous.source), item.written(value, source)
        parsed.notices.append(f"{earlier} has no effect: the later {later} replaces it")
    parsed.values[item.name] = Assigned(value, source)


def _parse_value(item: Setting, spelling: Spelling, word: str, queue: list[str]) -> Any:
    """Returns the value of one flag, and consumes its words from the queue."""
    typed, equals, written = word.partition("=")
    if not spelling.takes_value:
        return _parse_switch(item, spelling, typed, written if equals else None, queue)
    if equals:
        return coerce(item, written, typed)
    has_value = queue and not is_flag(queue[0])
    taken = _take_until_flag(queue) if item.is_list else [queue.pop(0)] if has_value else []
    if not taken:
        dashed = queue and not queue[0].startswith("--")
        hint = f"; a value that starts with '-' is written {typed}={queue[0]}" if dashed else ""
        raise UserError(f"{typed} needs a value{hint}")
    return coerce(item, taken if item.is_list else taken[0], typed)


def _parse_switch(item: Setting, flag: Spelling, typed: str, written: str | None, queue: list[str]) -> Any:
    """Parses `--flag`, `--flag=true` or `--flag true`."""
    is_boolean = isinstance(flag.sets, bool)
    if written is not None and not is_boolean:
        raise UserError(f"{typed} takes no value")
    if written is None and is_boolean and queue and queue[0].lower() in ("true", "false"):
        written = queue.pop(0)
    return flag.sets if written is None else coerce(item, written, typed) == flag.sets


def _take_until_flag(queue: list[str]) -> list[str]:
    taken = list(itertools.takewhile(lambda word: not is_flag(word) and not word.startswith("#"), queue))
    del queue[: len(taken)]
    return taken


def is_flag(word: str) -> bool:
    """Whether a word is a flag. Negative numbers are not."""
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False

"""Reading a command line against the table of settings.

argparse is not used: it cannot say where a value came from, report every mistake at once, treat `-` and `_`
alike or let the entry point decide what a word means.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pentatron.errors import ConfigError, UserError
from pentatron.settings.declaration import Setting, Spelling, coerce
from pentatron.settings.entry import EntryPoint
from pentatron.settings.presets import presets
from pentatron.settings.run import table
from pentatron.settings.settings import Assigned

# Hyphens, dashes and the minus sign, which word processors and web pages put in the place of `-`.
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"


@dataclass(frozen=True)
class ParsedFlags:
    values: dict[str, Assigned] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


class FlagTable:
    """Every spelling an entry point understands."""

    def __init__(self, entry: EntryPoint) -> None:
        self.entry = entry
        self._by_flag: dict[str, tuple[Setting, Spelling]] = {}
        for item in table().values():
            for spelling in item.spellings:
                self._by_flag[spelling.flag] = (item, spelling)
        for flag, name in entry.spellings.items():
            self._by_flag[flag] = (table()[name], Spelling(flag))

    def find(self, word: str) -> tuple[Setting, Spelling] | None:
        return self._by_flag.get(normal(word))

    def refusal(self, word: str) -> str:
        """Why this entry point does not take a flag that others take, or nothing."""
        return self.entry.refused.get(normal(word), "")

    def unknown(self, word: str) -> str:
        """The sentence for a flag this entry point does not take."""
        typed = word.split("=", 1)[0]
        if refusal := self.refusal(word):
            return f"{typed} is ambiguous here: {refusal}"
        guess = did_you_mean(normal(word), [*self.entry.own, *self._by_flag], "--")
        is_own = any(f"--{flag}?" in guess for flag in self.entry.own)
        program = self.entry.own_help if is_own and self.entry.own_help else self.entry.name
        return f"unknown flag {typed}{guess}; {program} --help lists them all"


def normal(word: str) -> str:
    """`--Tp_size=2` → `tp-size`."""
    return word.split("=", 1)[0].lstrip("-").replace("_", "-").lower()


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """` (did you mean X?)` for the known word that looks most like this one, else one that has it as a part."""
    words = list(known)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    parts = [k for k in words if word in k.replace("_", "-").split("-")]
    found = close or sorted(parts, key=len)[:1]
    return f" (did you mean {prefix}{found[0]}?)" if found else ""


def parse_flags(words: Sequence[str], entry: EntryPoint) -> ParsedFlags:
    """Turns the words of a command line into settings, or reports every mistake in them at once."""
    flags, parsed = FlagTable(entry), ParsedFlags()
    problems: list[str] = []
    # A backslash followed by a space, as at the end of a commented line, reaches us as a word of spaces.
    queue = [word for word in words if not word.isspace()]
    while queue:
        word = queue.pop(0)
        if word.startswith("#"):
            dropped = [word, *_take_until_flag(queue)]
            parsed.notices.append(f"dropped the comment '{' '.join(dropped)}' from the command line")
        elif not is_flag(word):
            problems.append(_no_flag(word, flags))
            if word.startswith(tuple(_DASHES)):
                _take_until_flag(queue)
        elif (found := flags.find(word)) is None:
            problems.append(flags.unknown(word))
            _take_until_flag(queue)
        else:
            try:
                _assign(parsed, word, *found, queue)
            except UserError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError(problems)
    return parsed


def _no_flag(word: str, flags: FlagTable) -> str:
    """What was meant by a word that stands where a flag should."""
    if word.startswith(tuple(_DASHES)):
        dash = f"U+{ord(word[0]):04X}"
        return f"'{word}' begins with a dash of printed text ({dash}); write --{word.lstrip(_DASHES + '-')}"
    meant = "--name value (a value with spaces needs quotes)"
    if "=" in word and flags.find(word) is not None:
        meant = f"--{word}"
    elif word in presets():
        meant = f"--preset {word}"
    return f"'{word}' is no flag; write {meant}"


def _assign(parsed: ParsedFlags, word: str, item: Setting, spelling: Spelling, queue: list[str]) -> None:
    """Reads one flag. The last of several wins, as scripts that append words expect, but not silently."""
    value = _read(item, spelling, word, queue)
    source = f"flag {word.split('=', 1)[0]}"
    before = parsed.values.get(item.name)
    if before is not None and before.value != value:
        earlier, later = item.written(before.value, before.source), item.written(value, source)
        parsed.notices.append(f"{earlier} has no effect: the later {later} replaces it")
    parsed.values[item.name] = Assigned(value, source)


def _read(item: Setting, spelling: Spelling, word: str, queue: list[str]) -> Any:
    """The value of one flag; consumes its words from the queue."""
    typed, equals, written = word.partition("=")
    if not spelling.takes_value:
        return _read_switch(item, spelling, typed, written if equals else None, queue)
    if equals:
        return coerce(item, written, typed)
    taken = _take_until_flag(queue) if item.is_list else _take_one(queue)
    if not taken:
        dashed = queue and not queue[0].startswith("--")
        hint = f"; a value that starts with '-' is written {typed}={queue[0]}" if dashed else ""
        raise UserError(f"{typed} needs a value{hint}")
    return coerce(item, taken if item.is_list else taken[0], typed)


def _read_switch(item: Setting, spelling: Spelling, typed: str, written: str | None, queue: list[str]) -> Any:
    """`--flag`, `--flag=true` or `--flag true`."""
    if not isinstance(spelling.sets, bool):
        if written is not None:
            raise UserError(f"{typed} takes no value")
        return spelling.sets
    if written is None and queue and queue[0].lower() in ("true", "false"):
        written = queue.pop(0)
    return spelling.sets if written is None else coerce(item, written, typed) == spelling.sets


def _take_one(queue: list[str]) -> list[str]:
    return [queue.pop(0)] if queue and not is_flag(queue[0]) else []


def _take_until_flag(queue: list[str]) -> list[str]:
    taken = []
    while queue and not is_flag(queue[0]) and not queue[0].startswith("#"):
        taken.append(queue.pop(0))
    return taken


def is_flag(word: str) -> bool:
    """Whether a word starts a flag; negative numbers do not."""
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False

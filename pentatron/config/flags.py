"""Reading a command line against the table of settings.

argparse is not used: it cannot say where a value came from, report every mistake at once, treat `-` and `_`
alike or let the entry point decide what a word means, and building 200 options costs more than reading them.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pentatron.config.entry import EntryPoint
from pentatron.config.errors import ConfigError, UserError
from pentatron.config.run import table
from pentatron.config.setting import Setting, Spelling, coerce


@dataclass(frozen=True)
class Assigned:
    """A value and where it came from."""

    value: Any
    source: str


@dataclass(frozen=True)
class ParsedFlags:
    values: dict[str, Assigned]
    notices: list[str]


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

    def unknown(self, word: str) -> str:
        """The sentence for a flag nobody knows."""
        bare = normal(word)
        if bare in self.entry.refused:
            return f"--{bare} is ambiguous here: {self.entry.refused[bare]}"
        return f"unknown flag {word.split('=')[0]}{did_you_mean(bare, self._by_flag, '--')}; {self.entry.name} --help lists them"


def normal(word: str) -> str:
    """`--Tp_size=2` → `tp-size`."""
    return word.split("=", 1)[0].lstrip("-").replace("_", "-").lower()


def did_you_mean(word: str, known: "dict[str, Any] | Sequence[str]", prefix: str = "") -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def parse_flags(words: Sequence[str], entry: EntryPoint) -> ParsedFlags:
    """Turns the words of a command line into settings, or reports every mistake in them at once."""
    flags = FlagTable(entry)
    values: dict[str, Assigned] = {}
    notices: list[str] = []
    problems: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word.startswith("#"):
            dropped = [word, *_take_until_flag(queue)]
            notices.append(f"dropped the comment '{' '.join(dropped)}' from the command line")
            continue
        if not is_flag(word):
            problems.append(f"'{word}' is no flag; write --name value (a value with spaces needs quotes)")
            continue
        found = flags.find(word)
        if found is None:
            problems.append(flags.unknown(word))
            _take_until_flag(queue)
            continue
        item, spelling = found
        try:
            values[item.name] = Assigned(_read(item, spelling, word, queue), f"flag --{spelling.flag}")
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(problems)
    return ParsedFlags(values, notices)


def _read(item: Setting, spelling: Spelling, word: str, queue: list[str]) -> Any:
    """The value of one flag; consumes its words from the queue."""
    _, equals, written = word.partition("=")
    if not spelling.takes_value:
        if not equals:
            return spelling.sets
        if isinstance(spelling.sets, bool):
            return coerce(item, written, "command line") == spelling.sets
        raise UserError(f"--{spelling.flag} takes no value")
    if equals:
        return coerce(item, written, "command line")
    taken = _take_until_flag(queue) if item.is_list else _take_one(queue)
    if not taken:
        raise UserError(f"--{spelling.flag} needs a value")
    return coerce(item, taken if item.is_list else taken[0], "command line")


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

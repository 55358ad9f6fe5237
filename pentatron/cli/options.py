"""Options of the commands beside training: fields of a dataclass made by `option`, read and described from that declaration.

Training has hundreds of settings and files to take them from; a side command has a handful of options and positional words.
Values, spellings and choices follow the rules of settings.
"""

import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from pentatron.errors import ConfigError, UserError
from pentatron.settings.command_line import did_you_mean, is_flag, normal, parse_flags
from pentatron.settings.declaration import Limit, Setting, Spelling, coerce, setting, settings_of
from pentatron.settings.entry import ENTRY_POINTS, TRAIN, EntryPoint
from pentatron.settings.run import sections, table

_WIDTH = 110
# A longer list of spellings stands on a line of its own.
_WIDEST = 34
_VALUE_WORDS: dict[type, str] = {int: "N", float: "X", str: "TEXT"}


@dataclass(frozen=True)
class Options:
    """Base of the options of a command."""

    def problems(self) -> Iterable[str]:
        """Mistakes in values that can be read and are within their limits."""
        return ()


T = TypeVar("T", bound=Options)


def option(
    default: Any,
    help: str,
    *,
    also: str = "",
    unlisted: str = "",
    choices: Sequence[Any] = (),
    limit: Limit | None = None,
    parse: Callable[[str, str], Any] | None = None,
    value: str = "",
    alone: str | None = None,
    missing: str = "",
    notice: str = "",
) -> Any:
    """A dataclass field that is an option. One without help is not listed.

    `also` and `unlisted` are further spellings, of which help shows the former; `value` stands for the value there.
    `parse(written, flag)` converts what the type alone cannot, or raises a UserError.
    `alone` is the value if none follows. `missing` says what to do about an option that has to be given.
    `notice` says why an option that is accepted has no effect.
    """
    made = setting(default, help, also=f"{also} {unlisted}", choices=choices, notice=notice, limit=limit)
    listed = tuple(flag.lstrip("-").replace("_", "-") for flag in also.split())
    extra = _Extra(parse, value, alone, missing, listed)
    return field(default=default, metadata={**made.metadata, "option": extra})


@dataclass(frozen=True)
class _Extra:
    parse: Callable[[str, str], Any] | None
    value: str
    alone: str | None
    missing: str
    listed: tuple[str, ...]


@dataclass(frozen=True)
class _Option:
    """An option as it is read and shown."""

    setting: Setting
    extra: _Extra

    @property
    def is_switch(self) -> bool:
        return self.setting.annotation is bool

    def usage(self, separator: str = ", ") -> str:
        """`--flag VALUE`, `--switch` or `--flag [VALUE]`."""
        flags = (self.setting.flag, *(f"--{flag}" for flag in self.extra.listed))
        if self.is_switch:
            return separator.join(flags)
        choices = self.setting.choices
        word = self.extra.value or "|".join(map(str, choices)) or _VALUE_WORDS[self.setting.base_type]
        word = f"{word} ..." if self.setting.is_list and not self.extra.value else word
        word = word if self.extra.alone is None else f"[{word}]"
        return separator.join(f"{flag} {word}" for flag in flags)

    def description(self) -> str:
        default = self.setting.default
        if default is None or default is False or default in ("", ()) or self.setting.help.endswith(")"):
            # Help that ends in brackets gives the default in the user's own words.
            return self.setting.help
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        shown = f"{shown:g}" if isinstance(shown, float) else shown
        return f"{self.setting.help} ({shown})"


def _options_of(cls: type) -> list[_Option]:
    extras = {f.name: f.metadata["option"] for f in fields(cls)}
    return [_Option(_as_typed(item), extras[item.name]) for item in settings_of("options", cls)]


def _as_typed(item: Setting) -> Setting:
    """As users type it: `as_` is `--as`, a keyword of Python, and `none` is the name of a file like any other."""
    spellings = tuple(replace(spelling, flag=spelling.flag.rstrip("-")) for spelling in item.spellings)
    annotation = item.annotation if item.is_list else item.base_type
    return replace(item, spellings=spellings, annotation=annotation)


# --- help ---


def options_help(cls: type[Options], beside: type[Options] | None = None) -> str:
    """Lines on every listed option of the class, without those it shares with the class `beside`."""
    known = set() if beside is None else {f.name for f in fields(beside)}
    options = [one for one in _options_of(cls) if one.setting.help and one.setting.name not in known]
    shown = [(f"  {one.usage()}", one.description()) for one in options]
    column = max((len(left) for left, _ in shown if len(left) <= _WIDEST), default=_WIDEST) + 2
    lines: list[str] = []
    for left, right in shown:
        wrapped = textwrap.wrap(right, _WIDTH - column, break_on_hyphens=False)
        fits = len(left) <= column - 2
        lines.append(f"{left:<{column}}{wrapped.pop(0)}" if fits and wrapped else left)
        lines += [" " * column + line for line in wrapped]
    return "\n".join(lines)


def synopsis(cls: type[Options]) -> str:
    """`--needed VALUE [--flag VALUE] [--switch]`: the listed options of the class on one line."""
    return " ".join(_synopses(cls))


def usage(call: str, cls: type[Options], after: str = "") -> str:
    """`usage: CALL [--flag VALUE] ... AFTER` in lines of the usual width, none of which breaks an option."""
    first, *rest = [f"usage: {call}", *_synopses(cls), *([after] if after else [])]
    lines = [first]
    for part in rest:
        if len(lines[-1]) + 1 + len(part) <= _WIDTH:
            lines[-1] += f" {part}"
        else:
            lines.append(f"       {part}")
    return "\n".join(lines)


def _synopses(cls: type[Options]) -> list[str]:
    listed = [one for one in _options_of(cls) if one.setting.help]
    return [one.usage(" | ") if one.extra.missing else f"[{one.usage(' | ')}]" for one in listed]


def flags_of(cls: type[Options]) -> tuple[str, ...]:
    """Every spelling of the options, without dashes."""
    return tuple(spelling.flag for one in _options_of(cls) for spelling in one.setting.spellings)


def idle(options: Options) -> list[str]:
    """Why options that were given have no effect."""
    found = [(one.setting, getattr(options, one.setting.name)) for one in _options_of(type(options))]
    return [
        f"{item.flag} has no effect: {item.notice}"
        for item, value in found
        if item.notice and value != item.default
    ]


# --- reading ---


def read(
    cls: type[T],
    words: Sequence[str],
    command: str,
    refused: Mapping[str, str] | None = None,
    stray: str = "",
) -> tuple[T, list[str]]:
    """The options of a command, and its positional words; raises every problem at once.

    After `--` no word is an option. `refused` says of further flags why they are not taken, and `stray` what is wrong
    with a positional word (`{word}`) of a command that takes none.
    """
    reader, plain, queue = _Reader(cls, refused or {}), list[str](), list(words)
    while queue:
        word = queue.pop(0)
        if word == "--":
            plain += queue
            break
        if not is_flag(word):
            plain.append(word)
        elif not reader.take(word, queue):
            guess = did_you_mean(normal(word), reader.flags, "--")
            reader.problems.append(
                f"unknown flag {word.partition('=')[0]}{guess}; {command} --help lists them"
            )
    if plain and stray:
        reader.problems.append(stray.replace("{word}", plain[0]))
    if reader.problems:
        raise ConfigError(reader.problems)
    return reader.checked(cls), plain


def read_among(
    cls: type[T],
    words: Sequence[str],
    entry: EntryPoint | Callable[[T], EntryPoint],
    refused: Mapping[str, str] | None = None,
) -> tuple[T, list[str]]:
    """The options of a command that stand among settings, and the other words; raises every problem of both at once.

    `entry` reads the settings; where it depends on the options, it is made of them.
    """
    settings = {spelling.flag for item in table().values() for spelling in item.spellings}
    renamed = {flag for one in ENTRY_POINTS.values() for flag in one.spellings}
    reader, rest, queue = _Reader(cls, refused or {}, settings | renamed), list[str](), list(words)
    while queue:
        word = queue.pop(0)
        if not (is_flag(word) and reader.take(word, queue)):
            rest.append(word)
    problems: list[str] = []
    try:
        parse_flags(rest, entry if isinstance(entry, EntryPoint) else entry(reader.options(cls)))
    except ConfigError as error:
        # A misspelt flag comes first: it may be the one whose value is missing.
        problems = error.problems
    if problems or reader.problems:
        raise ConfigError([*problems, *reader.problems])
    return reader.checked(cls), rest


class _Reader:
    """Collects values and problems. `foreign` are flags that are no options of the class, and no value of one either."""

    def __init__(self, cls: type[Options], refused: Mapping[str, str], foreign: Collection[str] = ()) -> None:
        self.problems: list[str] = []
        self._options = _options_of(cls)
        self._by_flag: dict[str, tuple[_Option, Spelling]] = {
            spelling.flag: (one, spelling) for one in self._options for spelling in one.setting.spellings
        }
        self._refused, self._foreign = refused, foreign
        # By the name of the option, with the flag as it was typed.
        self._given: dict[str, tuple[str, Any]] = {}

    @property
    def flags(self) -> list[str]:
        return list(self._by_flag)

    def take(self, word: str, queue: list[str]) -> bool:
        """Reads one option and consumes its words from the queue; returns False if the word is none."""
        typed, equals, written = word.partition("=")
        if (why := self._refused.get(normal(word))) is not None:
            self.problems.append(f"{typed} {why}")
            _until_flag(queue)
            return True
        if normal(word) not in self._by_flag:
            return False
        one, spelling = self._by_flag[normal(word)]
        try:
            value = self._value(one, spelling, typed, written if equals else None, queue)
            self._given[one.setting.name] = typed, value
        except UserError as error:
            self.problems.append(str(error))
        return True

    def options(self, cls: type[T]) -> T:
        return cls(**{name: value for name, (_, value) in self._given.items()})

    def checked(self, cls: type[T]) -> T:
        """The options, if all that have to be given are there and every value is possible."""
        found = []
        for one in self._options:
            given = self._given.get(one.setting.name)
            limit = one.setting.limit
            if given is None and one.extra.missing:
                found.append(f"{one.setting.flag} is missing; {one.extra.missing}")
            elif given is not None and limit is not None and not limit.allows(given[1]):
                found.append(f"{given[0]} {given[1]} must be {limit.words}")
        options = self.options(cls)
        if problems := [*found, *options.problems()]:
            raise ConfigError(problems)
        return options

    def _value(
        self, one: _Option, spelling: Spelling, typed: str, written: str | None, queue: list[str]
    ) -> Any:
        if one.is_switch:
            return spelling.sets if written is None else coerce(one.setting, written, typed) == spelling.sets
        if one.setting.is_list and one.extra.parse is None:
            words = _until_flag(queue) if written is None else [written]
            if not any(words):
                raise UserError(f"{typed} needs a value")
            return coerce(one.setting, words, typed)
        if written is None and one.extra.alone is not None and not (queue and not is_flag(queue[0])):
            return one.extra.alone
        if written is None:
            # A value may begin with dashes, as options of another program do; a flag that is known has its own meaning.
            written = queue.pop(0) if queue and not self._is_known(queue[0]) else ""
        if one.extra.parse is not None and written:
            return one.extra.parse(written, typed)
        return coerce(one.setting, written, typed)

    def _is_known(self, word: str) -> bool:
        return is_flag(word) and "=" not in word and normal(word) in {*self._by_flag, *self._foreign}


def _until_flag(queue: list[str]) -> list[str]:
    taken = []
    while queue and not is_flag(queue[0]):
        taken.append(queue.pop(0))
    return taken


# Help texts, made from the table of settings.


_HELP_WIDTH = 110
_COLUMN = 38


def entry_help(entry: EntryPoint, only: str | None = None) -> str:
    """Every setting by group; with `only`, one group."""
    lines = [f"usage: {entry.name} [--setting value ...]", "", entry.summary, ""]
    for section, cls in sections().items():
        if only is not None and only.lower() != section:
            continue
        lines.append(f"{cls.__doc__}  ({entry.name} --help {section})")
        lines += [*section_help(entry, section), ""]
    lines += _closing(entry)
    return "\n".join(lines)


def section_help(entry: EntryPoint, section: str) -> list[str]:
    """One group of settings, without a title."""
    return [line for item in table().values() if item.section == section for line in _entry(item, entry)]


def _entry(item: Setting, entry: EntryPoint) -> list[str]:
    shown = [s for s in item.spellings if not _is_negation(item, s.flag)]
    with_value = [s.flag for s in shown if s.takes_value]
    with_value += [flag for flag, name in entry.spellings.items() if name == item.name]
    alone = [s.flag for s in shown if not s.takes_value]
    groups = [f"{_joined(with_value)} {_value_word(item)}" if with_value else "", _joined(alone)]
    left = f"  {', '.join(filter(None, groups))}"
    return _columns(left, "; ".join(_notes(item, entry.defaults.get(item.name, item.default))))


def _joined(flags: list[str]) -> str:
    return ", ".join(f"--{flag}" for flag in flags)


def _value_word(item: Setting) -> str:
    words = {int: "N", float: "X", str: "TEXT"}[item.base_type]
    value = "|".join(str(c) for c in item.choices) if 0 < len(item.choices) <= 4 else words
    return f"{value} ..." if item.is_list else value


def _notes(item: Setting, default: Any) -> list[str]:
    notes = [item.help]
    if len(item.choices) > 4:
        notes.append(f"one of {', '.join(str(c) for c in item.choices)}")
    if default is True:
        notes.append("default on")
    elif default not in (None, False, ()) or (default == 0 and default is not False):
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        notes.append(f"default {shown}")
    if item.notice:
        notes.append("accepted, changes nothing")
    if item.not_yet:
        missing = [str(c) for c in item.choices if item.available and item.refuses(c)]
        notes.append(f"{', '.join(missing)} not available yet".strip())
    return notes


def _is_negation(item: Setting, flag: str) -> bool:
    """`--no-x` goes without saying, except for settings that are on unless told otherwise."""
    return flag == f"no-{item.spellings[0].flag}" and item.default is not True


def _columns(left: str, right: str) -> list[str]:
    wrapped = textwrap.wrap(right, _HELP_WIDTH - _COLUMN)
    lines = [f"{left:<{_COLUMN}}{wrapped.pop(0)}"] if len(left) < _COLUMN - 1 else [left]
    return lines + [" " * _COLUMN + line for line in wrapped]


def _closing(entry: EntryPoint) -> list[str]:
    command = "pentatron config" if entry is TRAIN else f"pentatron config --as {entry.name}"
    return [
        "Flags take '-' or '_', '--flag value' or '--flag=value'; a switch is turned off by --no-SWITCH.",
        "What an open value becomes stands in parentheses. Settings come from the preset, then --config FILE, then flags.",
        f"`{command}` with the same words shows the result and where each value came from.",
    ]

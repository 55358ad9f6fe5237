"""Declares, parses and documents command-line options.

A command other than `train` declares its options as fields of a dataclass with `option()`. Values, spellings
and choices follow the rules of `pentatron.settings`, whose settings (`entry_help`) are documented here too.
"""

import itertools
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from pentatron.errors import ConfigError, UserError
from pentatron.settings.command_line import did_you_mean, is_flag, normalize_flag, parse_flags
from pentatron.settings.declaration import Limit, Setting, Spelling, coerce, setting, settings_of
from pentatron.settings.entry_points import ENTRY_POINTS, TRAIN, EntryPoint
from pentatron.settings.run_config import all_settings, sections

_WIDTH = 110
# Column of the descriptions in the help of settings, and the widest one in the help of options.
_SETTINGS_COLUMN = 38
_MAX_OPTIONS_COLUMN = 36
_VALUE_WORDS: dict[type, str] = {int: "N", float: "X", str: "TEXT"}


@dataclass(frozen=True)
class Options:
    """Base class of the options of a command."""

    def problems(self) -> Iterable[str]:
        """Returns the errors that the types and limits of the options do not catch."""
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
    """Declares a dataclass field as an option. An option without help text is not listed.

    Args:
        also: further spellings that the help lists.
        unlisted: further spellings that the help does not list.
        parse: `parse(written, flag)` converts the value if its type is not enough, or raises `UserError`.
        value: placeholder of the value in the help.
        alone: the value if the flag stands without one.
        missing: makes the option required; the fix that the error names.
        notice: why the option is accepted but has no effect.
    """
    declared = setting(default, help, limit, also=f"{also} {unlisted}", choices=tuple(choices), notice=notice)
    listed = tuple(flag.lstrip("-").replace("_", "-") for flag in also.split())
    extras = {"parse": parse, "value": value, "alone": alone, "missing": missing, "listed": listed}
    return field(default=default, metadata={**declared.metadata, "option": extras})


@dataclass(frozen=True)
class _Option:
    """One declared option: its setting and the arguments of `option()` that a setting does not have."""

    setting: Setting
    parse: Callable[[str, str], Any] | None
    value: str
    alone: str | None
    missing: str
    listed: tuple[str, ...]

    @property
    def is_switch(self) -> bool:
        return self.setting.annotation is bool

    def usage(self, separator: str = ", ") -> str:
        """Returns `--flag VALUE`, `--switch` or `--flag [VALUE]`, with all listed spellings."""
        flags = (self.setting.flag, *(f"--{flag}" for flag in self.listed))
        if self.is_switch:
            return separator.join(flags)
        word = self.value or "|".join(map(str, self.setting.choices)) or _VALUE_WORDS[self.setting.base_type]
        word = f"{word} ..." if self.setting.is_list and not self.value else word
        word = word if self.alone is None else f"[{word}]"
        return separator.join(f"{flag} {word}" for flag in flags)

    def description(self) -> str:
        default = self.setting.default
        # A help text that ends in parentheses states the default itself.
        if default is None or default is False or default in ("", ()) or self.setting.help.endswith(")"):
            return self.setting.help
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        shown = f"{shown:g}" if isinstance(shown, float) else shown
        return f"{self.setting.help} ({shown})"


def _options_of(cls: type) -> list[_Option]:
    """Returns the options of a class: field `as_` becomes `--as`, and value `none` has no special meaning."""
    options = []
    for item, declared in zip(settings_of("options", cls), fields(cls)):
        spellings = tuple(replace(spelling, flag=spelling.flag.rstrip("-")) for spelling in item.spellings)
        annotation = item.annotation if item.is_list else item.base_type
        typed = replace(item, spellings=spellings, annotation=annotation)
        options.append(_Option(typed, **declared.metadata["option"]))
    return options


def flags_of(cls: type[Options]) -> tuple[str, ...]:
    """Returns every spelling of the options, without dashes."""
    return tuple(spelling.flag for one in _options_of(cls) for spelling in one.setting.spellings)


def options_without_effect(options: Options) -> list[str]:
    """Returns why given options have no effect."""
    items = [one.setting for one in _options_of(type(options)) if one.setting.notice]
    given = [item for item in items if getattr(options, item.name) != item.default]
    return [f"{item.flag} has no effect: {item.notice}" for item in given]


# --- help of options ---


def options_help(cls: type[Options], excluding: type[Options] | None = None) -> str:
    """Returns the help of every listed option of the class that class `excluding` does not have."""
    known = set() if excluding is None else {f.name for f in fields(excluding)}
    options = [one for one in _options_of(cls) if one.setting.help and one.setting.name not in known]
    rows = [(f"  {one.usage()}", one.description()) for one in options]
    fitting = [len(left) + 2 for left, _ in rows if len(left) + 2 <= _MAX_OPTIONS_COLUMN]
    column = max(fitting, default=_MAX_OPTIONS_COLUMN)
    return "\n".join(line for left, right in rows for line in _columns(left, right, column))


def _columns(left: str, right: str, column: int) -> list[str]:
    """Wraps `right` beside `left`, or below it if `left` reaches the column."""
    wrapped = textwrap.wrap(right, _WIDTH - column, break_on_hyphens=False)
    fits = len(left) <= column - 2 and bool(wrapped)
    lines = [f"{left:<{column}}{wrapped.pop(0)}" if fits else left]
    return lines + [" " * column + line for line in wrapped]


def synopsis(cls: type[Options]) -> str:
    """Returns the listed options on one line: `--needed VALUE [--flag VALUE] [--switch]`."""
    return " ".join(_synopses(cls))


def usage(call: str, cls: type[Options], after: str = "") -> str:
    """Returns `usage: CALL [--flag VALUE] ... AFTER`, wrapped between options."""
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
    return [one.usage(" | ") if one.missing else f"[{one.usage(' | ')}]" for one in listed]


# --- parsing ---


def parse_options(
    cls: type[T], words: Sequence[str], command: str, refused: Mapping[str, str] = {}, stray: str = ""
) -> tuple[T, list[str]]:
    """Parses a command line into options and positional words; raises every problem at once.

    All words after `--` are positional.

    Args:
        refused: the reason for each further flag that is refused.
        stray: the error for a positional word (`{word}`) if the command takes none.
    """
    parser, positional, queue = _Parser(cls, refused), list[str](), list(words)
    while queue:
        word = queue.pop(0)
        if word == "--":
            positional += queue
            break
        if not is_flag(word):
            positional.append(word)
        elif not parser.take(word, queue):
            typed, guess = word.partition("=")[0], did_you_mean(normalize_flag(word), parser.by_flag, "--")
            parser.problems.append(f"unknown flag {typed}{guess}; {command} --help lists them")
    if positional and stray:
        parser.problems.append(stray.replace("{word}", positional[0]))
    if parser.problems:
        raise ConfigError(parser.problems)
    return parser.checked(cls), positional


def parse_options_and_settings(
    cls: type[T],
    words: Sequence[str],
    entry: EntryPoint | Callable[[T], EntryPoint],
    refused: Mapping[str, str] = {},
) -> tuple[T, list[str]]:
    """Parses options that are mixed with settings; returns the options and the remaining words.

    Raises the problems of both at once. `entry` parses the settings; it is a function of the options if it
    depends on them.
    """
    settings = {spelling.flag for item in all_settings().values() for spelling in item.spellings}
    renamed = {flag for one in ENTRY_POINTS.values() for flag in one.spellings}
    parser, rest, queue = _Parser(cls, refused, settings | renamed), list[str](), list(words)
    while queue:
        word = queue.pop(0)
        if not (is_flag(word) and parser.take(word, queue)):
            rest.append(word)
    problems: list[str] = []
    try:
        settings_entry = entry if isinstance(entry, EntryPoint) else entry(parser.options(cls))
        parse_flags(rest, replace(settings_entry, own=flags_of(cls)))
    except ConfigError as error:
        # Listed first: a misspelt flag may be the reason that another one seems to have no value.
        problems = error.problems
    if problems or parser.problems:
        raise ConfigError([*problems, *parser.problems])
    return parser.checked(cls), rest


class _Parser:
    """Collects values and problems. `foreign`: flags of settings, which are never the value of an option."""

    def __init__(self, cls: type[Options], refused: Mapping[str, str], foreign: Collection[str] = ()) -> None:
        self.problems: list[str] = []
        self._options = _options_of(cls)
        self.by_flag: dict[str, tuple[_Option, Spelling]] = {
            spelling.flag: (one, spelling) for one in self._options for spelling in one.setting.spellings
        }
        self._refused, self._known = refused, {*self.by_flag, *foreign}
        # By the name of the option: the flag as typed, and its value.
        self._given: dict[str, tuple[str, Any]] = {}

    def take(self, word: str, queue: list[str]) -> bool:
        """Parses one option and takes its values from the queue; returns False if the word is no option."""
        typed, equals, written = word.partition("=")
        if (why := self._refused.get(normalize_flag(word))) is not None:
            self.problems.append(f"{typed} {why}")
            # Its values would be reported as further errors.
            _take_values(queue)
            return True
        if normalize_flag(word) not in self.by_flag:
            return False
        one, spelling = self.by_flag[normalize_flag(word)]
        try:
            value = self._value(one, spelling, typed, written if equals else None, queue)
            self._given[one.setting.name] = typed, value
        except UserError as error:
            self.problems.append(str(error))
        return True

    def options(self, cls: type[T]) -> T:
        return cls(**{name: value for name, (_, value) in self._given.items()})

    def checked(self, cls: type[T]) -> T:
        """Returns the options; raises if a required one is missing or a value is out of range."""
        problems = []
        for one in self._options:
            typed, value = self._given.get(one.setting.name, ("", None))
            if not typed and one.missing:
                problems.append(f"{one.setting.flag} is missing; {one.missing}")
            elif one.setting.limit is not None and not one.setting.limit.allows(value):
                problems.append(f"{typed} {value} must be {one.setting.limit.words}")
        options = self.options(cls)
        if problems := [*problems, *options.problems()]:
            raise ConfigError(problems)
        return options

    def _value(
        self, one: _Option, spelling: Spelling, typed: str, written: str | None, queue: list[str]
    ) -> Any:
        if one.is_switch:
            return spelling.sets if written is None else coerce(one.setting, written, typed) == spelling.sets
        if one.setting.is_list and one.parse is None:
            words = _take_values(queue) if written is None else [written]
            if not any(words):
                raise UserError(f"{typed} needs a value")
            return coerce(one.setting, words, typed)
        if written is None and one.alone is not None and not (queue and not is_flag(queue[0])):
            return one.alone
        if written is None:
            # A value may begin with dashes, such as options for another program, but a known flag is never a
            # value.
            word = queue[0] if queue else ""
            known = is_flag(word) and "=" not in word and normalize_flag(word) in self._known
            written = queue.pop(0) if queue and not known else ""
        if one.parse is not None and written:
            return one.parse(written, typed)
        return coerce(one.setting, written, typed)


def _take_values(queue: list[str]) -> list[str]:
    """Consumes the words up to the next flag."""
    values = list(itertools.takewhile(lambda word: not is_flag(word), queue))
    del queue[: len(values)]
    return values


# --- help of settings ---


def entry_help(entry: EntryPoint, only: str | None = None) -> str:
    """Returns the help of all settings by group, or of group `only`."""
    lines = [f"usage: {entry.name} [--setting value ...]", "", entry.summary, ""]
    for section, cls in sections().items():
        if only is None or only.lower() == section:
            lines += [f"{cls.__doc__}  ({entry.name} --help {section})", *section_help(entry, section), ""]
    command = "pentatron config" if entry is TRAIN else f"pentatron config --as {entry.name}"
    lines += [
        "Flags take '-' or '_', '--flag value' or '--flag=value'; a switch is turned off by --no-SWITCH.",
        "Parentheses give the default. --config FILE overrides the preset, and flags override both.",
        f"`{command}` with the same arguments shows the result and the origin of each value.",
    ]
    return "\n".join(lines)


def section_help(entry: EntryPoint, section: str) -> list[str]:
    """Returns the help lines of one group of settings, without a title."""
    items = [item for item in all_settings().values() if item.section == section]
    return [line for item in items for line in _setting_help(item, entry)]


def _setting_help(item: Setting, entry: EntryPoint) -> list[str]:
    # `--no-x` of a switch that is off by default is left out.
    implied = f"no-{item.spellings[0].flag}" if item.default is not True else ""
    shown = [s for s in item.spellings if s.flag != implied]
    with_value = [f"--{s.flag}" for s in shown if s.takes_value]
    with_value += [f"--{flag}" for flag, name in entry.spellings.items() if name == item.name]
    switches = [f"--{s.flag}" for s in shown if not s.takes_value]
    if with_value:
        choices = "|".join(map(str, item.choices)) if len(item.choices) <= 4 else ""
        value = choices or _VALUE_WORDS[item.base_type]
        with_value[-1] += f" {value} ..." if item.is_list else f" {value}"
    left = f"  {', '.join(with_value + switches)}"
    right = "; ".join(_setting_notes(item, entry.defaults.get(item.name, item.default)))
    return _columns(left, right, _SETTINGS_COLUMN)


def _setting_notes(item: Setting, default: Any) -> list[str]:
    notes = [item.help]
    if len(item.choices) > 4:
        notes.append(f"one of {', '.join(str(c) for c in item.choices)}")
    if default is True:
        notes.append("default on")
    elif default not in (None, False, ()) or (default == 0 and default is not False):
        notes.append(f"default {' '.join(map(str, default)) if isinstance(default, tuple) else default}")
    if item.notice:
        notes.append("accepted, has no effect")
    if item.not_yet:
        missing = [str(c) for c in item.choices if item.available and item.refuses(c)]
        notes.append(f"{', '.join(missing)} not available yet".strip())
    return notes

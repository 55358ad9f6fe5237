"""Help texts, made from the table of settings."""

import textwrap
from typing import Any

from pentatron.config.entry import TRAIN, EntryPoint
from pentatron.config.run import sections, table
from pentatron.config.setting import Setting

_WIDTH = 110
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
    wrapped = textwrap.wrap(right, _WIDTH - _COLUMN)
    lines = [f"{left:<{_COLUMN}}{wrapped.pop(0)}"] if len(left) < _COLUMN - 1 else [left]
    return lines + [" " * _COLUMN + line for line in wrapped]


def _closing(entry: EntryPoint) -> list[str]:
    command = "pentatron config" if entry is TRAIN else f"pentatron config --as {entry.name}"
    return [
        "Flags take '-' or '_', '--flag value' or '--flag=value'; a switch is turned off by --no-SWITCH.",
        "What an open value becomes stands in parentheses. Settings come from the preset, then --config FILE, then flags.",
        f"`{command}` with the same words shows the result and where each value came from.",
    ]

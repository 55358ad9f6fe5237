"""Help texts, made from the table of settings."""

import textwrap

from pentatron.config.entry import EntryPoint
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
        lines += [line for item in table().values() if item.section == section for line in _entry(item)]
        lines.append("")
    lines += _closing(entry)
    return "\n".join(lines)


def _entry(item: Setting) -> list[str]:
    names = [f"--{s.flag}" for s in item.spellings if not _is_negation(item, s.flag)]
    words = {int: "N", float: "X", str: "TEXT", bool: ""}[item.base_type]
    value = "|".join(str(c) for c in item.choices) if item.choices and len(item.choices) <= 4 else words
    left = f"  {', '.join(names)} {value + (' ...' if item.is_list else '')}".rstrip()
    notes = [item.help]
    if item.choices and len(item.choices) > 4:
        notes.append(f"one of {', '.join(str(c) for c in item.choices)}")
    if item.default not in (None, False, ()) and item.default is not True:
        notes.append(f"default {item.default}")
    if item.default is True:
        notes.append("default on")
    if item.not_yet:
        notes.append("not available yet")
    return _columns(left, "; ".join(notes))


def _is_negation(item: Setting, flag: str) -> bool:
    """`--no-x` goes without saying, except for settings that are on unless told otherwise."""
    return flag == f"no-{item.spellings[0].flag}" and item.default is not True


def _columns(left: str, right: str) -> list[str]:
    wrapped = textwrap.wrap(right, _WIDTH - _COLUMN)
    lines = [f"{left:<{_COLUMN}}{wrapped.pop(0)}"] if len(left) < _COLUMN - 1 else [left]
    return lines + [" " * _COLUMN + line for line in wrapped]


def _closing(entry: EntryPoint) -> list[str]:
    lines = [
        "Flags take '-' or '_', '--flag value' or '--flag=value'. Settings come from the preset, then --config FILE,",
        "then flags; `pentatron config` with the same words shows the result and where each value came from.",
    ]
    if entry.spellings:
        meant = ", ".join(
            f"--{flag} means --{name.replace('_', '-')}" for flag, name in entry.spellings.items()
        )
        lines.append(f"Here {meant}.")
    return lines

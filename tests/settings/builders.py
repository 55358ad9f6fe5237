"""Builds configurations for the tests of this folder."""

from collections.abc import Iterable
from typing import Any

from pentatron.errors import ConfigError
from pentatron.settings.declaration import Setting
from pentatron.settings.entry_points import TRAIN, EntryPoint
from pentatron.settings.resolve import Resolved, gather, resolve
from pentatron.settings.run_config import all_settings
from pentatron.settings.settings import Draft, ProcessFacts

# The settings that a run without the demo preset needs at least.
LEAST = "--mock-data --vocab-size 100 --train-iters 10"


def resolved(
    words: str = "", facts: ProcessFacts | None = None, entry: EntryPoint = TRAIN, least: str = LEAST
) -> Resolved:
    return resolve(gather([*least.split(), *words.split()], entry), facts or ProcessFacts(1))


def values(
    words: str = "", facts: ProcessFacts | None = None, entry: EntryPoint = TRAIN, least: str = LEAST
) -> dict[str, Any]:
    return resolved(words, facts, entry, least).config.flat()


def problems(
    words: str = "", facts: ProcessFacts | None = None, entry: EntryPoint = TRAIN, least: str = LEAST
) -> list[str]:
    """Returns the problems of a command line, or an empty list."""
    try:
        resolved(words, facts, entry, least)
    except ConfigError as error:
        return error.problems
    return []


def notices(
    words: str = "", facts: ProcessFacts | None = None, entry: EntryPoint = TRAIN, least: str = LEAST
) -> list[str]:
    return list(resolved(words, facts, entry, least).notices)


def about(name: str, words: str, facts: ProcessFacts) -> list[str]:
    """Returns the notices about one setting."""
    flag = all_settings()[name].flag
    spelled = (flag, f"--no-{flag[2:]}")
    return [n for n in notices(words, facts, least="") if n.split()[0].rstrip(":") in spelled]


def draft(words: str, entry: EntryPoint = TRAIN) -> Draft:
    return gather(words.split(), entry)


def not_built(found: Iterable[str]) -> list[str]:
    """Returns those problems that say only that a feature is not implemented yet."""
    return [p for p in found if "which this version does not have yet" in p]


def other_value(item: Setting) -> Any:
    """Returns a value of the setting's type that is not its default."""
    if item.choices:
        choice = next(c for c in item.choices if c != item.default and c not in item.available)
        return (choice,) if item.is_list else choice
    samples: dict[type, Any] = {bool: not item.default, int: 7, float: 0.25, str: "something"}
    sample = samples[item.base_type]
    return (sample,) if item.is_list else sample


def setting_names() -> list[str]:
    return list(all_settings())

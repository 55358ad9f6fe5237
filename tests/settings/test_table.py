"""Tests the table of settings: unambiguous, explained, reachable, and never silently ignored."""

import dataclasses
from collections import Counter
from typing import Any

import pytest

from pentatron.settings.command_line import parse_flags
from pentatron.settings.entry_points import ENTRY_POINTS, TRAIN
from pentatron.settings.presets import presets
from pentatron.settings.rules import problems_of
from pentatron.settings.run_config import RunConfig, all_settings, sections
from pentatron.settings.settings import Assigned, Settings
from tests.settings.builders import other_value, resolved, setting_names
from tests.settings.usage import settings_read, settings_read_anywhere

# Read by a rule alone, which compares it with the real number of processes.
ONLY_CHECKED = {"world_size"}
# Settings of a refused feature, which must be read as soon as the feature is implemented.
WAITS_FOR: dict[str, str] = {}


def entries(value: Any) -> tuple[Any, ...]:
    """Returns the values of a list, or a tuple of the single value."""
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def test_no_two_settings_share_a_spelling() -> None:
    counts = Counter(spelling.flag for item in all_settings().values() for spelling in item.spellings)
    assert [flag for flag, count in counts.items() if count > 1] == []


def test_no_spelling_hides_an_entry_points_own_meaning() -> None:
    flags = {spelling.flag for item in all_settings().values() for spelling in item.spellings}
    for entry in ENTRY_POINTS.values():
        assert flags.isdisjoint(entry.refused), entry.name
        assert flags.isdisjoint(entry.spellings), entry.name


@pytest.mark.parametrize("name", setting_names())
def test_every_setting_has_a_help_and_a_dashed_flag(name: str) -> None:
    item = all_settings()[name]
    assert item.help and not item.help.endswith(".")
    assert item.flag == "--" + name.replace("_", "-")


def test_every_section_is_a_frozen_dataclass_with_a_title() -> None:
    for section, cls in sections().items():
        assert cls.__doc__ and not cls.__doc__.startswith(cls.__name__), section
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(cls(), dataclasses.fields(cls)[0].name, None)


def test_defaults_are_of_the_declared_type_and_among_the_choices() -> None:
    for name, item in all_settings().items():
        if item.default is None:
            assert item.optional, name
        for value in entries(item.default):
            assert type(value) is item.base_type, name
            assert not item.choices or value in item.choices, name
        assert set(item.available) <= set(item.choices or item.available), name


def test_build_puts_every_value_into_its_section() -> None:
    values = {name: object() for name in all_settings()}
    config = RunConfig.of(Settings(values))
    assert config.flat() == values
    assert {s.section for s in all_settings().values()} == {f.name for f in dataclasses.fields(RunConfig)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model = config.model  # type: ignore[misc]


@pytest.mark.parametrize("name", setting_names())
def test_every_setting_is_reached_by_its_own_flag(name: str) -> None:
    item = all_settings()[name]
    value = other_value(item)
    flag = f"--no-{item.flag[2:]}" if value is False else item.flag
    if isinstance(value, bool):
        words = [flag]
    else:
        words = [flag, *map(str, value)] if item.is_list else [flag, str(value)]
    parsed = parse_flags(words, TRAIN)
    assert parsed.values == {name: Assigned(value, f"flag {flag}")}
    assert type(parsed.values[name].value) is type(value)


@pytest.mark.parametrize("name", [name for name, item in all_settings().items() if item.not_yet])
def test_every_missing_feature_is_refused(name: str) -> None:
    item = all_settings()[name]
    settings = resolved().settings.changed(**{name: other_value(item)})
    refusals = [p for p in problems_of(settings) if "which this version does not have yet" in p]
    assert refusals == [
        f"{item.written(getattr(settings, name))} needs {item.not_yet}, which this version does not have yet; leave it out"
    ]
    assert not item.refuses(item.default)
    assert not any(item.refuses(value) for value in item.available)


@pytest.mark.parametrize(
    "name", [name for name, item in all_settings().items() if item.base_type in (int, float)]
)
def test_every_number_has_limits(name: str) -> None:
    item = all_settings()[name]
    elsewhere = item.choices or (item.is_list and item.not_yet)
    assert (item.limit is not None) != bool(elsewhere), (
        "choices are limits of their own, and a refused list needs none"
    )


def test_limits_admit_the_defaults() -> None:
    for name, item in all_settings().items():
        assert item.limit is None or item.limit.allows(item.default), name


@pytest.fixture(scope="module")
def read() -> dict[str, set[str]]:
    return settings_read_anywhere()


@pytest.mark.parametrize("name", setting_names())
def test_no_setting_is_silently_ignored(name: str, read: dict[str, set[str]]) -> None:
    """Every setting is read by code that acts on it, refused as not implemented, or gives a notice."""
    item = all_settings()[name]
    if name in WAITS_FOR and not read.get(name):
        assert all_settings()[WAITS_FOR[name]].not_yet, f"{name} must be used now, or refused"
        assert item.needs
        return
    assert read.get(name) or item.not_yet or item.notice or name in ONLY_CHECKED


@pytest.mark.parametrize("name", [name for name, item in all_settings().items() if item.notice])
def test_a_notice_does_not_hide_a_setting_that_acts(name: str, read: dict[str, set[str]]) -> None:
    assert not read.get(name)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(config): return config.optim.lr", {"lr"}),
        ("def f(config: OptimConfig): return config.lr", {"lr"}),
        (
            "class A:\n    def __init__(self, c: OptimConfig): self.c = c\n    def f(self): return self.c.lr",
            {"lr"},
        ),
        ("def f(config):\n    data, x = config.data, 1\n    return data.split", {"split"}),
        ("x = draft.lr", {"lr"}),
        ("x = text.split(',')", set()),
        ("x = worker.local_rank", set()),
        ("x = row['lr']", set()),
        ("config.optim.lr = 3", set()),
        ("x = config.model.lr", set()),
    ],
)
def test_reads_of_settings_are_distinguished_from_lookalikes(source: str, found: set[str]) -> None:
    assert settings_read(source) == found


def test_presets_and_entry_points_name_settings_with_values_of_their_type() -> None:
    tables = {**presets(), **{e.name: e.defaults for e in ENTRY_POINTS.values()}}
    for where, values in tables.items():
        for name, value in values.items():
            item = all_settings()[name]
            assert isinstance(value, tuple) == item.is_list, (where, name)
            for entry in entries(value):
                assert isinstance(entry, item.base_type), (where, name)
                assert not item.choices or entry in item.choices, (where, name)
    for entry in ENTRY_POINTS.values():
        assert set(entry.spellings.values()) <= set(all_settings())

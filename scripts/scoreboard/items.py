"""Reads and checks the contract's data file, and decides the state of an item from outcomes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import yaml

NOT_YET = "not yet"


class DataError(ValueError):
    """Raised if the data file is wrong; the message is one sentence that names the place."""


class State(StrEnum):
    HOLDS = "holds"
    BROKEN = "broken"
    SKIPPED = "skipped"  # has entries, none failed, but one could not run on this machine
    NOT_YET = NOT_YET


@dataclass(frozen=True)
class Entry:
    """Evidence for an item: a pytest node id or a shell command."""

    kind: Literal["test", "command"]
    target: str
    note: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.target


@dataclass(frozen=True)
class Outcome:
    """Result of an entry. `label` is stable between runs; `reason` may quote an error message."""

    status: Literal["passed", "failed", "skipped"]
    label: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Item:
    id: int
    section: str
    guides: tuple[str, ...]
    text: str
    implied: bool
    kind: str
    shown_by: tuple[Entry, ...]
    # Why it has no entries yet.
    waits_for: str = ""

    @property
    def section_number(self) -> str:
        return self.section.split()[0]


@dataclass(frozen=True)
class Conflict:
    id: str
    guides: tuple[str, ...]
    text: str
    decision: str


@dataclass(frozen=True)
class Contract:
    guides: Mapping[str, str]
    items: tuple[Item, ...]
    conflicts: tuple[Conflict, ...]

    def sections(self) -> list[str]:
        return list(dict.fromkeys(item.section for item in self.items))

    def targets(self, kind: str) -> list[str]:
        """Distinct test ids or commands, in the order of the file."""
        found = (entry.target for item in self.items for entry in item.shown_by if entry.kind == kind)
        return list(dict.fromkeys(found))


Outcomes = Mapping[tuple[str, str], Outcome]
NEVER_RUN = Outcome("failed", "not run", "it was not run")


def judge(item: Item, outcomes: Outcomes) -> State:
    """Returns the state of an item, which holds only if it has entries and all of them passed."""
    if not item.shown_by:
        return State.NOT_YET
    statuses = {outcomes.get(entry.key, NEVER_RUN).status for entry in item.shown_by}
    if "failed" in statuses:
        return State.BROKEN
    return State.SKIPPED if "skipped" in statuses else State.HOLDS


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise DataError(f"line {key.start_mark.line + 1}: the key '{name}' is given twice")
            seen.add(name)
        return super().construct_mapping(node, deep)


def load(path: Path) -> Contract:
    """Reads and checks the data file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    return parse(text)


def parse(text: str) -> Contract:
    try:
        data = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise DataError(f"line {line}: not valid YAML, {error.problem}") from error
    except yaml.YAMLError as error:
        raise DataError(f"not valid YAML, {' '.join(str(error).split())}") from error
    data = _keys("the file", data, {"total", "guides", "items"}, {"conflicts"})
    if type(data["total"]) is not int:
        raise DataError("total must be the number of items")
    guides = data["guides"]
    if not isinstance(guides, dict) or not all(isinstance(key, str) for key in guides):
        raise DataError('guides must map quoted numbers such as "001" to titles')
    if not isinstance(data["items"], list) or not isinstance(data.get("conflicts", []), list):
        raise DataError("items and conflicts must be lists")
    items = tuple(_item(raw, guides) for raw in data["items"])
    conflicts = tuple(_conflict(raw, guides) for raw in data.get("conflicts", []))
    _check_ids("item", [item.id for item in items], range(1, data["total"] + 1))
    _check_ids("conflict", [c.id for c in conflicts], [f"C{i + 1}" for i in range(len(conflicts))])
    _check_sections(items)
    return Contract(guides, items, conflicts)


def _keys(where: str, raw: object, required: set[str], optional: set[str]) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise DataError(f"{where} must be a mapping of keys to values, not {raw!r}")
    if unknown := sorted(str(key) for key in set(raw) - required - optional):
        raise DataError(f"{where} has the unknown key '{unknown[0]}'")
    if missing := sorted(required - set(raw)):
        raise DataError(f"{where} lacks the key '{missing[0]}'")
    return raw


def _name(word: str, raw: object) -> str:
    return f"{word} {raw['id']}" if isinstance(raw, dict) and "id" in raw else f"an {word} without an id"


def _text(where: str, key: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: {key} must be text, not {value!r}")
    return value


def _guides(where: str, value: object, known: Mapping[str, str]) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not set(map(str, value)) <= set(known):
        raise DataError(f"{where}: guides must list some of {', '.join(known)}, each quoted, not {value!r}")
    return tuple(value)


def _item(raw: object, guides: Mapping[str, str]) -> Item:
    where = _name("item", raw)
    raw = _keys(where, raw, {"id", "section", "guides", "text", "shown_by"}, {"implied", "kind", "waits_for"})
    if type(raw["id"]) is not int:
        raise DataError(f"{where}: the id must be a whole number")
    section = _text(where, "section", raw["section"])
    if not re.fullmatch(r"\d+\.\d+ \S.*", section):
        raise DataError(f"{where}: section must be a number and a title, not '{section}'")
    if raw.get("implied", True) is not True:
        raise DataError(f"{where}: implied is either true or left out")
    if raw.get("kind", "documentation") != "documentation":
        raise DataError(f"{where}: kind is either documentation or left out")
    waits_for = _text(where, "waits_for", raw["waits_for"]) if "waits_for" in raw else ""
    if waits_for and raw["shown_by"] != NOT_YET:
        raise DataError(f"{where}: waits_for is for items with shown_by: {NOT_YET}")
    return Item(
        id=raw["id"],
        section=section,
        guides=_guides(where, raw["guides"], guides),
        text=_text(where, "text", raw["text"]),
        implied="implied" in raw,
        kind=raw.get("kind", ""),
        shown_by=_entries(where, raw["shown_by"]),
        waits_for=waits_for,
    )


def _entries(where: str, value: object) -> tuple[Entry, ...]:
    if value == NOT_YET:
        return ()
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: shown_by must be '{NOT_YET}' or a list of entries, not {value!r}")
    return tuple(_entry(f"{where}, an entry of shown_by", raw) for raw in value)


def _entry(where: str, raw: object) -> Entry:
    raw = _keys(where, raw, set(), {"test", "command", "note"})
    note = _text(where, "note", raw["note"]) if "note" in raw else ""
    if ("test" in raw) == ("command" in raw):
        raise DataError(f"{where} must have either a test or a command")
    if "command" in raw:
        return Entry("command", _text(where, "command", raw["command"]), note)
    target = _text(where, "test", raw["test"])
    if not re.match(r"[^:\s]+\.py($|::)", target):
        raise DataError(f"{where}: '{target}' is neither a test file nor FILE.py::NAME")
    return Entry("test", target, note)


def _conflict(raw: object, guides: Mapping[str, str]) -> Conflict:
    where = _name("conflict", raw).replace("an conflict", "a conflict")
    raw = _keys(where, raw, {"id", "guides", "text", "decision"}, set())
    text, decision = (_text(where, key, raw[key]) for key in ("text", "decision"))
    return Conflict(str(raw["id"]), _guides(where, raw["guides"], guides), text, decision)


def _check_ids(word: str, given: list[Any], expected: Iterable[Any]) -> None:
    seen = set()
    for name in given:
        if name in seen:
            raise DataError(f"{word} {name} is there twice")
        seen.add(name)
    wanted = list(expected)
    if missing := [name for name in wanted if name not in seen]:
        raise DataError(f"{word} {missing[0]} is missing")
    if extra := [name for name in given if name not in set(wanted)]:
        raise DataError(f"{word} {extra[0]} is beyond the total of {len(wanted)}")


def _check_sections(items: Iterable[Item]) -> None:
    """Refuses two titles of one section: a typing error would otherwise open a new section."""
    titles: dict[str, str] = {}
    for item in items:
        if titles.setdefault(item.section_number, item.section) != item.section:
            raise DataError(
                f"item {item.id}: section {item.section_number} is called '{titles[item.section_number]}' above"
            )

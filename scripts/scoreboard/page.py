"""Renders docs/contract.md, which changes only if a state or the data changed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from .items import NEVER_RUN, NOT_YET, Conflict, Contract, Entry, Item, Outcomes, State

INTRODUCTION = """\
# Contract scoreboard

What the source guides ask for, item by item, and whether it is shown to hold. `make contract` writes
this page from [items.yaml](contract/items.yaml): it runs every listed test and command once. An item

- **holds** when it has at least one entry and all of its entries passed,
- is **broken** when one of its entries failed, or names a test that does not exist,
- is **skipped** when none failed but one could not run on the machine that wrote this page,
- is **not yet** shown when nothing is listed for it; the last column then says what it waits for.

To change a row, edit items.yaml and run `make contract`; edits of this page are lost."""


def render(contract: Contract, states: Mapping[int, State], outcomes: Outcomes) -> str:
    guides = [f"- {number}: {title}" for number, title in contract.guides.items()]
    parts = [INTRODUCTION, "The guides, by number:", "\n".join(guides)]
    parts += ["## Summary", _summary(contract, states)]
    for section in contract.sections():
        rows = [
            _item_row(item, states[item.id], outcomes) for item in contract.items if item.section == section
        ]
        parts += [f"## {section}", _table(("id", "guides", "item", "state", "shown by"), rows)]
    if contract.conflicts:
        rows = [_conflict_row(conflict) for conflict in contract.conflicts]
        note = "Where the guides contradict each other or reality, and where it is decided what we do."
        parts += ["## Conflicts", note, _table(("id", "guides", "conflict", "decision"), rows)]
    return "\n\n".join(parts) + "\n"


def _summary(contract: Contract, states: Mapping[int, State]) -> str:
    rows = []
    for section in contract.sections():
        counts = Counter(states[item.id] for item in contract.items if item.section == section)
        rows.append((section, *_counts(counts)))
    rows.append(("**all**", *_counts(Counter(states.values()))))
    return _table(("section", *State, "total"), rows)


def _counts(counts: Counter[State]) -> list[str]:
    return [str(counts[state]) for state in State] + [str(counts.total())]


def _item_row(item: Item, state: State, outcomes: Outcomes) -> tuple[str, ...]:
    shown = "<br>".join(_entry_cell(entry, outcomes) for entry in item.shown_by)
    return str(item.id), " ".join(item.guides), item.text, state, shown or item.waits_for or item.kind


def _entry_cell(entry: Entry, outcomes: Outcomes) -> str:
    # The label, not the reason: error messages may carry addresses, times and paths.
    label = outcomes.get(entry.key, NEVER_RUN).label
    note = f" ({entry.note})" if entry.note else ""
    return f"`{entry.target}`{note}{f' **{label}**' if label else ''}"


def _conflict_row(conflict: Conflict) -> tuple[str, ...]:
    decision = conflict.decision
    if decision != NOT_YET:
        decision = f"[{PurePosixPath(decision).name}]({os.path.relpath(decision, 'docs')})"
    return conflict.id, " ".join(conflict.guides), conflict.text, decision


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [_row(head), "|" + "---|" * len(head)]
    return "\n".join(lines + [_row(cells) for cells in rows])


def _row(cells: Iterable[str]) -> str:
    """Formats a row; `|` is escaped, as it ends a cell even inside backticks, and line ends are removed."""
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"

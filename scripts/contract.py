"""Writes the contract scoreboard: which items of the guides are shown to hold.

Reads docs/contract/items.yaml, runs the tests and commands listed there, prints the count and writes
docs/contract.md. Exit code 0: nothing broken; 1: a listed item is broken; 2: the data file or the call is
wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from scoreboard import evidence, page
from scoreboard.items import NEVER_RUN, Contract, DataError, Item, Outcomes, State, judge, load

ROOT = Path(__file__).resolve().parents[1]
ITEMS = Path("docs/contract/items.yaml")
PAGE = Path("docs/contract.md")
BAR_WIDTH = 20


class Ticker:
    """Shows progress on stderr: one line updated in place on a terminal, periodic lines in a log."""

    LOG_EVERY_S = 5.0
    WIDTH = 110

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()
        self.last = float("-inf")

    def __call__(self, message: str) -> None:
        message = " ".join(message.split())[: self.WIDTH]
        if self.live:
            print(f"\r\x1b[K{message}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self.last >= self.LOG_EVERY_S:
            self.last = time.monotonic()
            print(message, file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def of_section(contract: Contract, number: str | None) -> Contract:
    """Returns the contract with the items of one section only, or all of it without a number."""
    if number is None:
        return contract
    items = tuple(item for item in contract.items if item.section_number == number)
    if not items:
        known = ", ".join(section.split()[0] for section in contract.sections())
        raise DataError(f"there is no section {number}; the sections are {known}")
    return replace(contract, items=items)


def section_table(contract: Contract, good: Mapping[int, bool]) -> list[str]:
    """Returns one bar per section, with the number of its good items."""
    width = max(map(len, contract.sections()))
    lines = []
    for section in contract.sections():
        marks = [good[item.id] for item in contract.items if item.section == section]
        filled = BAR_WIDTH * sum(marks) // len(marks)
        bar = "█" * filled + "·" * (BAR_WIDTH - filled)
        lines.append(f"{section:<{width}}  {bar} {sum(marks):>3} / {len(marks)}")
    return lines


def complaints(item: Item, outcomes: Outcomes, status: str) -> list[str]:
    """Returns why an item is broken or skipped, one line per entry."""
    found = [(entry, outcomes.get(entry.key, NEVER_RUN)) for entry in item.shown_by]
    return [f"    {entry.target}: {outcome.reason}" for entry, outcome in found if outcome.status == status]


def report(contract: Contract, states: Mapping[int, State], outcomes: Outcomes) -> list[str]:
    lines = section_table(contract, {number: state is State.HOLDS for number, state in states.items()})
    for state, status in ((State.SKIPPED, "skipped"), (State.BROKEN, "failed")):
        for item in contract.items:
            if states[item.id] is state:
                lines += [f"{state} {item.id}: {item.text}", *complaints(item, outcomes, status)]
    return lines


def last_line(states: Mapping[int, State], name: str) -> str:
    counts = Counter(states.values())
    line = (
        f"{name}: {counts[State.HOLDS]} of {len(states)} items hold, "
        f"{counts[State.BROKEN]} broken, {counts[State.NOT_YET]} not yet"
    )
    # Skipped items are mentioned if there are any, so that the numbers always add up to the total.
    return line + (f", {counts[State.SKIPPED]} skipped here" if counts[State.SKIPPED] else "")


def declared(contract: Contract, name: str) -> list[str]:
    """Lists the entries of the data file without running any."""
    lines = []
    for item in contract.items:
        entries = [f"{entry.kind} {entry.target}" for entry in item.shown_by]
        lines += [f"{item.id:>3}  {shown}" for shown in entries or [str(State.NOT_YET)]]
    listed = {item.id: bool(item.shown_by) for item in contract.items}
    lines += section_table(contract, listed)
    count = sum(listed.values())
    return [*lines, f"{name}: {count} of {len(listed)} items have entries, {len(listed) - count} not yet"]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/contract.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the declared entries without running them")
    parser.add_argument(
        "--section", metavar="1.3", help="run only this section; docs/contract.md is not written"
    )
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="repository root (default: the one of this script)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    root = options.root.resolve()
    name = f"contract {options.section}" if options.section else "contract"
    try:
        contract = of_section(load(root / ITEMS), options.section)
    except DataError as error:
        print(f"{ITEMS}: {error}.", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(declared(contract, name)))
        return 0
    tick = Ticker()
    try:
        outcomes = evidence.gather(contract, root, tick)
    finally:
        tick.clear()
    states = {item.id: judge(item, outcomes) for item in contract.items}
    if not options.section:
        (root / PAGE).write_text(page.render(contract, states, outcomes), encoding="utf-8")
    print("\n".join([*report(contract, states, outcomes), last_line(states, name)]))
    return int(State.BROKEN in states.values())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

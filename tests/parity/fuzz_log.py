"""Log of random cases: a line of docs/fuzz.csv for every run, and a section of docs/parity.md."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

PATH = Path("docs/fuzz.csv")
TITLE = "## Random cases"


@dataclass(frozen=True)
class Entry:
    """One run of `make fuzz`; `refused` cases are not among `cases`."""

    date: str
    seed: int
    cases: int
    refused: int
    failures: int
    torch: str


NAMES = tuple(field.name for field in fields(Entry))


def read(log: Path) -> list[Entry]:
    if not log.exists():
        return []
    with log.open(newline="", encoding="utf-8") as lines:
        return [
            Entry(
                row["date"],
                int(row["seed"]),
                int(row["cases"]),
                int(row["refused"]),
                int(row["failures"]),
                row["torch"],
            )
            for row in csv.DictReader(lines)
        ]


def append(log: Path, entry: Entry) -> None:
    new = not log.exists() or log.stat().st_size == 0
    with log.open("a", newline="", encoding="utf-8") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        if new:
            writer.writerow(NAMES)
        writer.writerow([getattr(entry, name) for name in NAMES])


def section(entries: Sequence[Entry]) -> str:
    """Returns the section of docs/parity.md about random cases, which is the last one."""
    cases, refused = sum(e.cases for e in entries), sum(e.refused for e in entries)
    text = (
        f"`make fuzz` draws models and layouts at random and judges each of them in the same way: {cases} cases have been run in "
        f"all ([the ledger](fuzz.csv)), {refused} more were drawn and refused by the configuration."
    )
    failing = [i for i, e in enumerate(entries) if e.failures]
    if failing:
        failed, since = sum(e.failures for e in entries), entries[failing[-1] + 1 :]
        text += (
            f" {failed} did not agree when run, last on {entries[failing[-1]].date} ([the log](LOG.md) says why); the "
            f"{sum(e.cases for e in since)} cases since then all agree."
        )
    else:
        text += " All of them agree."
    return f"{TITLE}\n\n{text}\n"


def renewed(page: str, entries: Sequence[Entry]) -> str:
    """Returns the page with an updated section about random cases."""
    return f"{page.partition(TITLE)[0].rstrip()}\n\n{section(entries)}"

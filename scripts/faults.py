"""Runs the fault matrix: injects faults into real processes and files and judges the outcome.

    python scripts/faults.py [--only storage] [--list] [--quick] [--jobs 2] [--keep] [--no-page]

Prints the table and writes docs/faults.md. The exit code is 1 if a case does not hold or a fault was accepted
silently.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tests.faults.cases import GROUPS, Case, Outcome  # noqa: E402
from tests.faults.catalogue import cases  # noqa: E402
from tests.faults.commands import Zygote  # noqa: E402
from tests.faults.lab import Lab, References  # noqa: E402
from tests.faults.page import write_matrix  # noqa: E402

INTRODUCTION = """# The fault matrix

Written by `make faults`. Each row is a fault injected into real processes and real files on this machine's CPU: ranks of tiny models
in several layouts, with dropout, so that random states count. The cases are in `tests/faults`; `make test` runs the quick ones of them.
`make faults ARGS="--only storage"` repeats some.

- **detected after**: seconds from the fault, or from the start of the command that meets it, until a line names it.
- **steps lost**: steps that had to be computed again.
- **named**: the line has the right rank, file or setting.
- **state equal**: parameters, optimizer, random states and the cursor of the data at the end are those of the undisturbed run, bit for
  bit (other layouts: as the remark says).
- **control**: the protection is switched off, and the fault goes unnoticed: so this table could show it.
"""
HEADINGS = ("fault", "detected after", "steps lost", "exit code", "named", "state equal", "verdict")


@dataclass(frozen=True)
class Row:
    case: Case
    outcome: Outcome
    seconds: float

    @property
    def is_silent(self) -> bool:
        return not self.outcome.detected and not self.case.control

    @property
    def holds(self) -> bool:
        if self.case.control:
            return not self.outcome.detected and not self.outcome.problems
        return self.outcome.detected and not self.outcome.problems

    def cells(self) -> list[str]:
        found = self.outcome
        if self.case.control:
            verdict = "control: not detected" if self.holds else "CONTROL FAILS"
        else:
            verdict = (found.remark or "holds") if self.holds else "SILENT" if self.is_silent else "FAILS"
        return [
            self.case.fault,
            _or_dash(found.detected_after, "{:.1f} s"),
            _or_dash(found.steps_lost, "{}"),
            _or_dash(found.exit_code, "{}"),
            _yes(found.named if not self.case.control else found.detected),
            _yes(found.equal),
            verdict,
        ]


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _yes(value: bool | None) -> str:
    return "–" if value is None else "yes" if value else "no"


def judge(case: Case, folder: Path, references: References) -> Row:
    began = time.monotonic()
    try:
        outcome = case.run(Lab(folder / case.name, references))
    except Exception:
        # Also for a command that hangs: the case fails, and the others still run.
        outcome = Outcome(detected=True, problems=[traceback.format_exc(limit=-3)])
    return Row(case, outcome, time.monotonic() - began)


def run_all(chosen: list[Case], folder: Path, jobs: int, keep: bool) -> list[Row]:
    zygote = Zygote()
    references = References(folder / "undisturbed", zygote)
    rows = []
    try:
        with ThreadPoolExecutor(jobs) as pool:
            waiting = [pool.submit(judge, case, folder, references) for case in chosen]
            try:
                for number, done in enumerate(as_completed(waiting), 1):
                    row = done.result()
                    rows.append(row)
                    tell(row, number, len(chosen), folder)
                    if row.holds and not keep:
                        shutil.rmtree(folder / row.case.name, ignore_errors=True)
            except KeyboardInterrupt:
                print("stopping when the cases under way are done", flush=True)
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        zygote.close()
    return sorted(rows, key=lambda row: chosen.index(row.case))


def tell(row: Row, number: int, count: int, folder: Path) -> None:
    print(
        f"[{number:2d}/{count}] {row.seconds:5.1f} s  {row.case.group}: {row.case.fault}: {row.cells()[-1]}",
        flush=True,
    )
    if not row.holds:
        for problem in row.outcome.problems:
            print("        " + problem.replace("\n", "\n        "))
        print(
            f'        again: python scripts/faults.py --keep --no-page --only "{row.case.name}"; its folder: {folder / row.case.name}',
            flush=True,
        )


def summary(rows: list[Row], seconds: float) -> str:
    real = [row for row in rows if not row.case.control]
    held = sum(row.holds for row in real)
    silent = sum(row.is_silent for row in real)
    controls = sum(row.holds for row in rows if row.case.control)
    return (
        f"{held} of {len(real)} faults end as they should, silent acceptances: {silent}; {controls} of {len(rows) - len(real)} controls "
        f"go unnoticed, as they must ({seconds:.0f} s, {os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()})"
    )


def table(rows: list[Row]) -> str:
    lines = []
    for group in GROUPS:
        of_group = [row for row in rows if row.case.group == group]
        if of_group:
            lines += [
                f"## {group.capitalize()}",
                "",
                f"| {' | '.join(HEADINGS)} |",
                "|---|---|---|---|---|---|---|",
            ]
            lines += [f"| {' | '.join(row.cells())} |" for row in of_group]
            lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="run only cases whose group, fault or name contains this")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and exit")
    parser.add_argument("--quick", action="store_true", help="run only the cases of make test")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--keep", action="store_true", help="keep the folders of cases that hold")
    parser.add_argument("--no-page", action="store_true", help="do not write docs/faults.md")
    given = parser.parse_args()
    chosen = [
        c for c in cases() if given.only in f"{c.group}: {c.fault} {c.name}" and (c.quick or not given.quick)
    ]
    if given.list or not chosen:
        print("\n".join(case.name for case in chosen) or f"no case has '{given.only}' in its name")
        return 0 if chosen else 2
    # In shared memory: no case cuts the power, and waiting for a disk would take most of the time.
    shared_memory = Path("/dev/shm")
    in_memory = shared_memory if os.access(shared_memory, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="pentatron-faults-", dir=in_memory))
    began = time.monotonic()
    rows = run_all(chosen, folder, given.jobs, given.keep)
    text = summary(rows, time.monotonic() - began)
    print(f"\n{table(rows)}\n{text}")
    if not given.no_page and not given.only and not given.quick:
        write_matrix(f"{INTRODUCTION}\n{table(rows)}\n{text}.\n")
    if all(row.holds for row in rows):
        if not given.keep:
            shutil.rmtree(folder)
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""Runs trials from a seed: failing disks, power cuts, damaged folders, hostile files, lost output.

    python scripts/adversary.py [--seed 1 2 3] [--all] [--only faults --case 37] [--jobs 2] [--list]
        [--keep] [--no-page]

Prints a line for each group, each defect with the command that repeats it, and a table. Writes the table into
docs/faults.md. The exit code is 1 if there was a defect.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tests.adversary import shim  # noqa: E402
from tests.adversary.bench import ACCEPTED, DEFECTS, EQUAL, REFUSED, Bench, Trial, Verdict, attempt  # noqa: E402
from tests.adversary.catalogue import GROUPS, ON_A_FAILING_DISK  # noqa: E402
from tests.faults.page import write_section  # noqa: E402

HEADING = "## The adversary"
INTRODUCTION = """Written by `make adversary`. Trials are drawn from a seed: the k-th change of a file fails or kills the process, in \
six ways; the power is cut
after any call, with four models of what the disk then holds; entries of a run folder are damaged or of a wrong kind; manifests are
changed and signed again; Hugging Face folders and chat templates are hostile; standard output cannot be written. `tests/adversary`
has them, `make test` a small part. `make adversary ARGS="--seed 2 3"` draws others, `ARGS=--all` leaves none out.

- **equal**: the same command ends with the state of the undisturbed run, bit for bit, in the end.
- **refused**: one sentence and a non-zero exit code; **accepted**: what was given is used within the bounds of time and memory.
- **silent**: exit code 0 without the result, or another end than the one that was reported.
"""
OUTCOMES = (EQUAL, REFUSED, ACCEPTED)
COLUMNS = (*OUTCOMES, *DEFECTS)
PLURALS = {
    "silent acceptance": "silent acceptances",
    "traceback": "tracebacks",
    "hang": "hangs",
    "memory": "memory above the bound",
}


@dataclass
class Tally:
    """Outcomes of the trials of a group, and kinds of defects, each kind counted once per trial."""

    trials: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    faulty: int = 0

    def add(self, verdict: Verdict) -> None:
        self.trials += 1
        kinds = {kind for kind, _ in verdict.defects}
        self.faulty += bool(kinds)
        self.counts.update(kinds or [verdict.outcome])

    def words(self) -> str:
        found = ", ".join(
            f"{self.counts[name]} {PLURALS.get(name, name)}" for name in COLUMNS if self.counts[name]
        )
        return f"{self.trials} trials: {found or 'none'} ({self.seconds:.0f} s)"


def draw(bench: Bench, group: str, seed: int, every: bool) -> list[Trial]:
    return GROUPS[group][0](bench, random.Random(f"{seed} {group}"), every)


def run_group(
    bench: Bench,
    group: str,
    seed: int,
    trials: Sequence[tuple[int, Trial]],
    given: argparse.Namespace,
    tally: Tally,
) -> None:
    def one(entry: tuple[int, Trial]) -> tuple[int, Trial, Verdict]:
        number, trial = entry
        folder = bench.folder / f"{group}-{seed}-{number}"
        verdict = attempt(bench, trial, folder)
        if not verdict.defects and not given.keep:
            shutil.rmtree(folder, ignore_errors=True)
        return number, trial, verdict

    began = time.monotonic()
    with ThreadPoolExecutor(given.jobs) as pool:
        try:
            for number, trial, verdict in pool.map(one, trials):
                tally.add(verdict)
                tell(group, seed, number, trial, verdict, given.all)
        except KeyboardInterrupt:
            print("stopping when the trials under way are done", flush=True)
            pool.shutdown(cancel_futures=True)
            raise
    tally.seconds += time.monotonic() - began


def tell(group: str, seed: int, number: int, trial: Trial, verdict: Verdict, every: bool) -> None:
    if not verdict.defects:
        return
    print(f"\n{group}, case {number}: {trial.label}")
    for kind, what in verdict.defects:
        print(f"  {kind}: " + what.replace("\n", "\n    "))
    whole = " --all" if every else ""
    print(
        f'  again: make adversary ARGS="--seed {seed}{whole} --only {group} --case {number} --keep"',
        flush=True,
    )


def table(tallies: dict[str, Tally]) -> str:
    headings = ["trial", "trials", *(PLURALS.get(name, name) for name in COLUMNS)]
    rows = [
        [GROUPS[group][1], str(t.trials), *(str(t.counts[name]) for name in COLUMNS)]
        for group, t in tallies.items()
    ]
    total = [sum(int(row[n]) for row in rows) for n in range(1, len(headings))]
    rows.append(["**all**", *(f"**{number}**" for number in total)])
    lines = [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows)]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seed", type=int, nargs="+", default=[1], help="one or more seeds, summarised in one table"
    )
    parser.add_argument(
        "--all", action="store_true", help="run every call, cut and mutation instead of a sample"
    )
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=[], help="run only these groups")
    parser.add_argument("--case", type=int, nargs="+", default=[], help="run only these trials of the group")
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time")
    parser.add_argument("--list", action="store_true", help="print the names of the trials and exit")
    parser.add_argument("--keep", action="store_true", help="keep the folders of all trials")
    parser.add_argument("--no-page", action="store_true", help="do not write docs/faults.md")
    given = parser.parse_args()
    groups = list(given.only or GROUPS)
    if why := shim.missing():
        print(f"left out {', '.join(g for g in groups if g in ON_A_FAILING_DISK)}: {why}")
        groups = [group for group in groups if group not in ON_A_FAILING_DISK]
    # In shared memory: power cuts are computed, and waiting for a disk would take most of the time.
    shared_memory = Path("/dev/shm")
    folder = Path(
        tempfile.mkdtemp(
            prefix="pentatron-adversary-", dir=shared_memory if os.access(shared_memory, os.W_OK) else None
        )
    )
    began, tallies, bench = time.monotonic(), {group: Tally() for group in groups}, Bench(folder)
    try:
        for seed in given.seed:
            for group in groups:
                trials = list(enumerate(draw(bench, group, seed, given.all)))
                if given.case:
                    trials = [(n, trial) for n, trial in trials if n in given.case]
                if given.list:
                    print("\n".join(f"{group}, case {n}: {trial.label}" for n, trial in trials))
                    continue
                tally = Tally()
                run_group(bench, group, seed, trials, given, tally)
                print(f"seed {seed}, {group}: {tally.words()}", flush=True)
                tallies[group].trials += tally.trials
                tallies[group].counts += tally.counts
                tallies[group].faulty += tally.faulty
    finally:
        bench.close()
    faulty = sum(tally.faulty for tally in tallies.values())
    if not given.list:
        report(given, tallies, faulty, time.monotonic() - began)
    if not faulty and not given.keep:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"folders of the trials: {folder}")
    return 1 if faulty else 0


def report(given: argparse.Namespace, tallies: dict[str, Tally], faulty: int, seconds: float) -> None:
    count = sum(tally.trials for tally in tallies.values())
    seeds = f"seed{'s' if len(given.seed) > 1 else ''} {', '.join(map(str, given.seed))}{', all trials' if given.all else ''}"
    text = (
        f"{count - faulty} of {count} trials without a defect ({seeds}; {seconds:.0f} s, {given.jobs} at a time on {os.cpu_count()} "
        f"cores, torch {torch.__version__}, Python {platform.python_version()})"
    )
    print(f"\n{table(tallies)}\n\n{text}")
    if not given.no_page and not given.only and not given.case and not shim.missing():
        write_section(HEADING, f"{INTRODUCTION}\n{table(tallies)}\n\n{text}.\n")


if __name__ == "__main__":
    sys.exit(main())

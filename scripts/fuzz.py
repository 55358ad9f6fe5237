"""Compares random models in random layouts with the same model on one process.

    python scripts/fuzz.py [--cases 500] [--seed 1] [--minutes 10] [--only zbv] [--jobs 4] [--keep-going]
    python scripts/fuzz.py --replay SEED:NUMBER
    python scripts/fuzz.py --ranks 4 --case='--num-layers 3 ...'

A case that disagrees, raises or hangs is made smaller and printed as a command that repeats it; the exit code
is then 1. Every run of drawn cases is added to docs/fuzz.csv and counted in docs/parity.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tests.harness.report import RanksFailed  # noqa: E402
from tests.parity import fuzz_log  # noqa: E402
from tests.parity.fuzzing import (  # noqa: E402
    TIMEOUT,
    Campaign,
    Tally,
    judged,
    replay_command,
    sensitivity,
    shrunk,
)
from tests.parity.random_cases import Case, draw, read_case  # noqa: E402

PAGE = ROOT / "docs" / "parity.md"
LOG_EVERY_S = 30.0
LINES = 12


class Progress:
    """Shows progress: one line updated in place on a terminal, periodic lines in a log."""

    def __init__(self, campaign: Campaign, shrink_seconds: float) -> None:
        self.campaign, self.shrink_seconds = campaign, shrink_seconds
        self.live = sys.stdout.isatty()
        self.mark_reported, self.last = 0, -math.inf

    def __call__(self, tally: Tally, passed: float) -> None:
        for number, case, outcome in tally.failures[self.mark_reported :]:
            self.clear()
            name = f"seed {self.campaign.seed}, case {number}"
            report(name, case, outcome.failed, self.shrink_seconds, self.campaign.bug)
        self.mark_reported = len(tally.failures)
        line = f"{tally.run} of {self.campaign.wanted}: {tally.in_words()}; {self._left(tally, passed)}"
        if self.live:
            print(f"\r\x1b[K{line}", end="", flush=True)
        elif passed - self.last >= LOG_EVERY_S:
            self.last = passed
            print(line, flush=True)

    def _left(self, tally: Tally, passed: float) -> str:
        each = passed / max(1, tally.run)
        left = min(each * (self.campaign.wanted - tally.run), self.campaign.seconds - passed)
        return f"{max(0.0, left) / 60:.0f} min left" if left >= 60 else f"{max(0.0, left):.0f} s left"

    def clear(self) -> None:
        if self.live:
            print("\r\x1b[K", end="", flush=True)


def report(name: str, case: Case, failed: tuple[str, ...], shrink_seconds: float, bug: str = "") -> None:
    """Prints how a case fails, the command that repeats it, and a smaller case that fails as well."""
    print(f"\n{name} fails:")
    print("\n".join(f"  {line}" for line in failed[:LINES]))
    if len(failed) > LINES:
        print(f"  ... {len(failed) - LINES} more lines")
    print(f"again: {replay_command(case)}", flush=True)
    with contextlib.suppress(RanksFailed):
        itself = sensitivity(case)
        print(
            f"one process against itself, its weights rounded otherwise: {itself:.2g} times what is allowed"
        )
    # A short limit, because every smaller case that hangs would otherwise cost a whole timeout.
    limit = min(TIMEOUT, shrink_seconds / 4)
    small = shrunk(case, lambda c: bool(judged(c, bug, limit).failed), shrink_seconds)
    if small != case:
        print(f"smaller: {replay_command(small)}\n", flush=True)


def run_one(name: str, case: Case, shrink_seconds: float) -> int:
    outcome = judged(case)
    if outcome.refused:
        print(f"{name} is refused: {outcome.refused}")
    elif outcome.failed:
        report(name, case, outcome.failed, shrink_seconds)
    else:
        ties = f", after {len(outcome.ties)} seed(s) with a tie" if outcome.ties else ""
        print(f"{name} agrees; its largest gap is {outcome.share:.1%} of what is allowed{ties}")
    return 1 if outcome.failed else 0


def run_many(campaign: Campaign, shrink_seconds: float, book: Path | None) -> int:
    """Runs a campaign; `book` is the ledger to enter it into."""
    tally, started = Tally(), time.monotonic()
    progress = Progress(campaign, shrink_seconds)
    try:
        campaign.run(tally, progress)
    except KeyboardInterrupt:
        print("\ninterrupted")
    progress.clear()
    if book is not None and tally.run:
        enter(campaign, tally, book)
    minutes = (time.monotonic() - started) / 60
    for number, closest in tally.ties.items():
        print(
            f"case {number} was asked again: its closest choice was {', '.join(f'{c:.1e}' for c in closest)}"
        )
    print(f"seed {campaign.seed}: {tally.run} cases run, {tally.in_words()}; {minutes:.1f} minutes")
    return 1 if tally.failures else 0


def enter(campaign: Campaign, tally: Tally, book: Path) -> None:
    """Adds the run to the ledger, and its cases to those counted on the page."""
    counts = (tally.run, tally.refused, len(tally.failures))
    today = datetime.date.today().isoformat()
    fuzz_log.append(book, fuzz_log.Entry(today, campaign.seed, *counts, torch.__version__.partition("+")[0]))
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(fuzz_log.renewed(page, fuzz_log.read(book)), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=500, help="number of cases to run")
    parser.add_argument("--seed", type=int, default=1, help="seed from which cases are drawn")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this many minutes")
    parser.add_argument("--only", default="", help="run only cases whose flags contain this")
    parser.add_argument("--shrink", type=float, default=120, help="seconds to make a failing case smaller")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time; use one per two or three cores")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failing case")
    parser.add_argument(
        "--no-ledger", action="store_true", help="do not write docs/fuzz.csv and docs/parity.md"
    )
    parser.add_argument("--replay", metavar="SEED:NUMBER", help="run one case of a seed")
    parser.add_argument("--case", help="run the case with these flags")
    parser.add_argument("--ranks", type=int, default=1, help="number of processes for --case")
    words = parser.parse_args()
    if words.case is not None:
        return run_one("the case", read_case(words.ranks, words.case), words.shrink)
    if words.replay is not None:
        seed, _, number = words.replay.partition(":")
        if not (seed.isdigit() and number.isdigit()):
            print(f"--replay must be SEED:NUMBER, such as 1:17, not {words.replay}")
            return 2
        return run_one(f"case {words.replay}", draw(int(seed), int(number)), words.shrink)
    campaign = Campaign(
        words.seed, words.cases, 60 * words.minutes, words.only, words.keep_going, jobs=words.jobs
    )
    return run_many(campaign, words.shrink, None if words.no_ledger else ROOT / fuzz_log.PATH)


if __name__ == "__main__":
    sys.exit(main())

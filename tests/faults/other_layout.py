"""Resumes in another layout: exactly the same samples, and losses within the published tolerance."""

import json
from collections.abc import Callable
from pathlib import Path

from pentatron.compare.trial import SCALAR_TOLERANCE
from tests.faults.cases import Outcome, Series
from tests.faults.lab import LAST, LAYOUTS, Lab, recorders, samples

SERIES = Series("other layout")
AFTER = 6


def losses(run: Path) -> dict[int, float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows}


def goes_on(before: str, after: str) -> Callable[[Lab], Outcome]:
    def run(lab: Lab) -> Outcome:
        lab.interrupted(before, AFTER)
        ran, outcome = lab.fork(after, faults=recorders(after, lab.folder)), Outcome()
        outcome.expect_output(
            ran, "note: (the checkpoint was made on .*; it resumes on |the layout is not the checkpoint's: )"
        )
        outcome.ended(ran, 0)
        outcome.lost(AFTER - ran.resumed_at[-1], 0)
        read = samples(lab.folder, LAYOUTS[after].ranks)[: LAST - AFTER]
        outcome.expect(read == lab.references.samples(before)[AFTER:LAST], "other samples were read")
        now, then = losses(lab.run), losses(lab.references.of(before))
        gap = max(abs(now[step] / then[step] - 1) for step in then)
        outcome.equal = gap <= SCALAR_TOLERANCE
        outcome.expect(outcome.equal, f"the losses are not those of the undisturbed run: {now} {then}")
        outcome.remark = f"same samples; losses within {gap:.0e}"
        return outcome

    return run


PAIRS = {
    "half the world": ("any dp2", "any alone"),
    "twice the world": ("any dp2", "any dp4"),
    "TP 1 to 2": ("any dp2", "any tp2"),
    "PP 1 to 2": ("any dp2", "any pp2"),
    "CP 1 to 2": ("any dp2", "any cp2"),
    "ZeRO 1 to 3": ("any dp2", "any zero3"),
    "TP and PP from 2 to 1": ("any tp2 pp2", "any dp2"),
    "EP 1 to 2": ("any experts", "any ep2"),
}
for _name, (_before, _after) in PAIRS.items():
    SERIES.case(_name)(goes_on(_before, _after))

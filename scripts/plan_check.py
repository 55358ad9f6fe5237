"""A plan against a real step, layout by layout: bytes of weights, gradients, optimizer state and activations.

Weights, gradients and optimizer state are the memory behind the tensors a rank holds; activations the most memory behind what
autograd saves between forward and backward. Prints the table and ends with code 1 if a number is off by more than 5 %.

    python scripts/plan_check.py [--only "PP 2"]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.plan.cases import CASES, Row, compared  # noqa: E402

ALLOWED = 0.05
COLUMNS = ("weights", "gradients", "optimizer", "host", "activations")


def cell(row: Row) -> str:
    if not row.planned and not row.measured:
        return f"{'-':>18}"
    return f"{row.planned / 2**20:>8.2f} {row.gap:>+8.2%} "


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="layouts whose name contains this")
    wanted = [case for case in CASES if parser.parse_args().only in case.name]
    width = max(len(case.name) for case in wanted)
    print("planned MiB on a rank, and how far that is from what was measured\n")
    print(f"{'layout':<{width}}  stage" + "".join(f"{name:>18}" for name in COLUMNS))
    worst = 0.0
    for case in wanted:
        rows: dict[int, list[Row]] = {}
        for row in compared(case):
            rows.setdefault(row.pipeline_rank, []).append(row)
            worst = max(worst, abs(row.gap))
        for at, found in rows.items():
            name = case.name if at == 0 else ""
            print(f"{name:<{width}}  {at:>5}" + "".join(map(cell, found)), flush=True)
    verdict = "agree" if worst <= ALLOWED else "DISAGREE"
    print(
        f"\n{len(wanted)} layouts {verdict}: the largest difference is {worst:.2%}, {ALLOWED:.0%} are allowed"
    )
    return int(worst > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())

"""Compares every model family with `transformers`, layout by layout, trained from the same folder.

    python scripts/families.py [--only qwen3] [--layouts tp2] [--jobs 4] [--no-page]

Prints for each cell the gaps of logits, gradients and twenty steps as a share of what is allowed, and writes
docs/families.md. The exit code is 1 if a cell is out of tolerance.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402

from tests.hf.families import CASES, Case  # noqa: E402
from tests.hf.layouts import SPREADS, Spread  # noqa: E402
from tests.hf.oracle import ALLOWED, STEPS, Gaps, compare, run  # noqa: E402

PAGE = ROOT / "docs" / "families.md"

Task = tuple[Case, Spread]


def measured(task: Task) -> Gaps | str:
    case, spread = task
    try:
        return compare(case, run(case, spread.command, spread.ranks))
    except Exception as error:
        return str(error).strip().splitlines()[-1]


def measure_all(tasks: Sequence[Task], jobs: int) -> Iterator[Gaps | str]:
    if jobs == 1:
        yield from map(measured, tasks)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(measured, tasks)


def shown(found: Gaps | str) -> str:
    if isinstance(found, str):
        return "fails"
    return " ".join(f"{share:.0%}" for share in found.shares.values())


def passes(found: Gaps | str) -> bool:
    return isinstance(found, Gaps) and not found.failures


def page(cases: Sequence[Case], spreads: Sequence[Spread], found: dict[Task, Gaps | str]) -> str:
    lines = [
        "# Families against transformers",
        "",
        "Written by `make families`. Small models with random weights, made and saved by `transformers`, are loaded from their",
        f"folder in every layout and trained {STEPS} steps beside the original, on the same batches with uneven loss masks, AdamW,",
        "weight decay and clipping. Each cell: logits, gradients of the first step (the worst tensor), losses of all steps, weights",
        "after the last step, each as a share of what is allowed ("
        + ", ".join(f"{k} {v:g}" for k, v in ALLOWED.items())
        + ").",
        "Logits and gradients are judged relative to the largest logit and the tensor's norm, weights absolutely.",
        "",
        "| family | " + " | ".join(spread.name for spread in spreads) + " |",
        "|---|" + "---|" * len(spreads),
    ]
    for case in cases:
        cells = [shown(found[case, s]) if s.suits(case) else "–" for s in spreads]
        lines.append(f"| {case.name} | " + " | ".join(cells) + " |")
    good = sum(passes(f) for f in found.values())
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    lines += ["", f"{good} of {len(found)} cells hold ({versions}).", ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="run only families whose name contains this")
    parser.add_argument("--layouts", default="", help="run only layouts whose name contains this")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time")
    parser.add_argument("--no-page", action="store_true", help="do not write docs/families.md")
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in case.name]
    spreads = [spread for spread in SPREADS if options.layouts in spread.name]
    tasks = [(case, spread) for case in cases for spread in spreads if spread.suits(case)]
    if not tasks:
        parser.error("no family and layout contain these words")
    started = time.monotonic()
    print(f"shares of what is allowed: {', '.join(ALLOWED)}")
    found: dict[Task, Gaps | str] = {}
    for task, result in zip(tasks, measure_all(tasks, options.jobs)):
        found[task] = result
        case, spread = task
        print(f"{case.name:<26} {spread.name:<18} {shown(result)}", flush=True)
        if isinstance(result, str):
            print(f"    {result}")
        else:
            for failure in result.failures:
                print(f"    {failure}")
    good = sum(passes(f) for f in found.values())
    print(f"{good} of {len(found)} cells hold, {time.monotonic() - started:.0f} s")
    whole = len(cases) == len(CASES) and len(spreads) == len(SPREADS)
    if whole and not options.no_page:
        PAGE.write_text(page(cases, spreads, found), encoding="utf-8")
    return 0 if good == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Writes the parity table: families × layouts, each against the same model on one process.

    python scripts/parity.py [--families gpt,llama] [--only tp2] [--largest 4] [--device cuda]
        [--backend nccl] [--jobs 4] [--no-page]
    python scripts/parity.py --only "tp2 sp" --families qwen3 --largest 2 --also "--num-layers 5 --lr 1e-2"

Each cell has five training steps and compares losses, gradient norms, every gradient at steps 1 and 5, every
weight at the end, and the validation loss. Prints the table and writes docs/parity.md. The exit code is 1 if
a cell is out of tolerance or a planted bug is missed.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from pentatron.compare.trial import (  # noqa: E402
    GRADIENT_TOLERANCES,
    SCALAR_TOLERANCE,
    SMALL_GRADIENT,
    STEPS,
    WEIGHT_TOLERANCE,
)
from tests.harness import GLOO, NCCL  # noqa: E402
from tests.parity import fuzz_log  # noqa: E402
from tests.parity.bf16 import ALLOWED, BF16_CASES, FP16, FP16_CASES, excess  # noqa: E402
from tests.parity.bugs import BUGS  # noqa: E402
from tests.parity.cases import FAMILIES, LAYOUTS, MIXTURES, Layout  # noqa: E402
from tests.parity.judge import Cell, Task, judge_all  # noqa: E402
from tests.parity.mixtures import MIXTURE_LAYOUTS  # noqa: E402
from tests.parity.verdicts import failures, largest_gap  # noqa: E402

PAGE = ROOT / "docs" / "parity.md"
WIDTH = 10


def sweep(
    layouts: list[Layout], families: list[str], device: str, jobs: int, backend: str = GLOO
) -> list[list[Cell]]:
    name_width = max(len(layout.name) for layout in layouts)
    heading = f"{'layout':<{name_width}}  ranks  " + "".join(f"{f:>{WIDTH}}" for f in families)
    print("\nlargest gap as a share of what is allowed (below 100% passes)\n")
    print(heading)
    tasks = [Task(layout, family, device, backend=backend) for layout in layouts for family in families]
    cells = judge_all(tasks, jobs)
    rows = []
    for layout in layouts:
        print(f"{layout.name:<{name_width}}  {layout.ranks:>5}  ", end="", flush=True)
        row = []
        for cell in itertools.islice(cells, len(families)):
            row.append(cell)
            print(f"{cell.text if cell.passes else 'FAILS':>{WIDTH}}", end="", flush=True)
        print()
        rows.append(row)
    return rows


def plant_all(jobs: int) -> list[tuple[str, Cell]]:
    """Runs every planted bug on the layout where it acts, and prints the largest gap it causes."""
    print("\nplanted bugs, and the largest gap each one causes (as a multiple of what is allowed)\n")
    tasks = [
        Task(
            next(x for x in (MIXTURE_LAYOUTS if family in MIXTURES else LAYOUTS) if x.name == layout),
            family,
            bug=bug,
        )
        for bug, (_, family, layout) in BUGS.items()
    ]
    found = []
    for task, cell in zip(tasks, judge_all(tasks, jobs)):
        found.append((task.bug, cell))
        seen = largest_gap(cell.judged)
        verdict = "caught" if not cell.passes else "MISSED"
        print(
            f"{verdict}  {task.bug:<45} {cell.family:<9} {cell.layout.name:<20} {seen.ratio:>10.3g} ×  {seen.what}"
        )
    return found


@dataclass(frozen=True)
class Rounded:
    """Largest distance of a bf16 or fp16 layout from fp32, as a multiple of that of one process."""

    precision: str
    layout: str
    family: str
    excess: float

    @property
    def passes(self) -> bool:
        return self.excess < ALLOWED


def in_halves() -> list[Rounded]:
    print(f"\nbf16 and fp16: distance from fp32 as a multiple of one process's, which may be {ALLOWED}\n")
    found = []
    for name, flags, cases in (("bf16", "--bf16", BF16_CASES), ("fp16", FP16, FP16_CASES)):
        for layout, family in cases:
            far = max(excess(layout, family, half=flags).values())
            found.append(Rounded(name, layout, family, far))
            print(f"{name}  {layout:<28} {family:<10} {far:.2f}{'' if found[-1].passes else '  FAILS'}")
    return found


def page(
    tables: list[list[list[Cell]]], bugs: list[tuple[str, Cell]], rounded: list[Rounded], seconds: float
) -> str:
    rows = [row for table in tables for row in table]
    worst_cell = max((cell for row in rows for cell in row), key=lambda c: largest_gap(c.judged).ratio)
    lines = [
        "# Parity: every layout computes the same numbers",
        "",
        "Written by `make parity`; do not edit.",
        "",
        f"Each cell trains a small model of that family for {STEPS} steps in that layout, on as many processes (CPU, gloo, fp32), "
        f"and compares it with the same model on one process that takes the whole batch at once. The settings are chosen so "
        f"that mistakes show: initial standard deviation 0.1, norm weights 1 + N(0, 0.1), biases N(0, 0.1), AdamW with epsilon "
        f"1e-6, active clipping, masks that leave very different numbers of valid tokens in each sample. The family gpt "
        f"always trains with hidden dropout.",
        "",
        f"Allowed: losses, gradient norms and validation loss within {SCALAR_TOLERANCE:g} (relative); every gradient within "
        + ", ".join(f"{t:g} at step {s}" for s, t in GRADIENT_TOLERANCES.items())
        + f" (‖Δg‖ against the larger of ‖g‖ and {SMALL_GRADIENT:g} of the whole gradient's norm); every weight within {WEIGHT_TOLERANCE:g} "
        f"(largest element) after {STEPS} steps. A cell shows its largest gap as a share of what is allowed.",
        "",
        "Layouts of mixtures of experts whose balancing loss or capacity is defined by micro-batch have the same micro-batches on "
        "one process. Every second layout multiplies its loss by 4096 before backward and divides gradients by it, as fp16 does; one "
        "process does not.",
    ]
    for table in tables:
        lines += in_markdown(table)
    count = sum(len(row) for row in rows)
    good = sum(cell.passes for row in rows for cell in row)
    lines += [
        "",
        f"{good} of {count} cells pass; the largest gap is {worst_cell.text} of what is allowed "
        f"({largest_gap(worst_cell.judged).what}, {worst_cell.family}, {worst_cell.layout.name}).",
        "",
        "## Planted bugs are detected",
        "",
        "Each bug is planted into the ranks of one layout; the table shows the largest gap it causes, as a multiple of what "
        "is allowed, and the comparison that saw it.",
        "",
        "| planted bug | family | layout | gap | seen by |",
        "|---|---|---|---|---|",
    ]
    for bug, cell in bugs:
        seen = largest_gap(cell.judged)
        gap = f"{seen.ratio:.3g} ×" if not cell.passes else "**missed**"
        lines.append(f"| {bug} | {cell.family} | {cell.layout.name} | {gap} | {seen.what} |")
    lines += [
        "",
        "## bf16 and fp16",
        "",
        f"Rounding differs between layouts, so a layout in bf16 or fp16 is not compared with one process in the same precision but both with one process in "
        f"fp32: its gradients at steps 1 and {STEPS} and its weights, each as one long vector, may be at most {ALLOWED} times as far away as "
        f"those of one process are. The largest of the three:",
        "",
        "| precision | layout | family | distance |",
        "|---|---|---|---|",
        *(
            f"| {r.precision} | {r.layout} | {r.family} | {r.excess:.2f}{'' if r.passes else ' **fails**'} |"
            for r in rounded
        ),
        "",
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}; {seconds / 60:.0f} minutes.",
        "",
    ]
    return fuzz_log.renewed("\n".join(lines), fuzz_log.read(ROOT / fuzz_log.PATH))


def in_markdown(rows: list[list[Cell]]) -> list[str]:
    families = [cell.family for cell in rows[0]]
    lines = ["", "| layout | ranks | " + " | ".join(families) + " |", "|---|---|" + "---|" * len(families)]
    for row in rows:
        layout = row[0].layout
        cells = " | ".join(c.text if c.passes else f"**fails: {c.text}**" for c in row)
        lines.append(f"| {layout.name} | {layout.ranks} | {cells} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", default=",".join(FAMILIES | MIXTURES), help="comma-separated families")
    parser.add_argument("--only", default="", help="run only layouts whose name contains this")
    parser.add_argument(
        "--largest", type=int, default=8, help="run only layouts of at most this many processes"
    )
    parser.add_argument("--device", default="cpu", help="cpu, or cuda with all processes on one GPU")
    parser.add_argument(
        "--backend",
        default="gloo",
        choices=("gloo", "nccl"),
        help="process-group backend of processes that share a GPU",
    )
    parser.add_argument(
        "--also", default="", metavar="FLAGS", help="further flags for both runs of every cell"
    )
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time; use one per two or three cores")
    parser.add_argument("--no-page", action="store_true", help="do not write docs/parity.md")
    words = parser.parse_args()
    families = words.families.split(",")
    unknown = [f for f in families if f not in FAMILIES | MIXTURES]
    kinds = [
        (
            [
                replace(x, both=f"{x.both} {words.also}")
                for x in layouts
                if words.only in x.name and x.ranks <= words.largest
            ],
            [f for f in families if f in of_kind],
        )
        for layouts, of_kind in ((LAYOUTS, FAMILIES), (MIXTURE_LAYOUTS, MIXTURES))
    ]
    kinds = [(layouts, chosen) for layouts, chosen in kinds if layouts and chosen]
    if unknown or not kinds:
        print(f"there is no family {unknown[0]}" if unknown else "no layout fits these words")
        return 2
    everything = len(LAYOUTS) * len(FAMILIES) + len(MIXTURE_LAYOUTS) * len(MIXTURES)
    whole = sum(len(x) * len(f) for x, f in kinds) == everything and words.device == "cpu" and not words.also
    started = time.perf_counter()
    backend = NCCL if words.backend == "nccl" else GLOO
    tables = [sweep(layouts, chosen, words.device, words.jobs, backend) for layouts, chosen in kinds]
    bugs = plant_all(words.jobs) if whole else []
    rounded = in_halves() if whole else []
    cells = [cell for rows in tables for row in rows for cell in row]
    bad = [cell for cell in cells if not cell.passes]
    for cell in bad:
        print(f"\n{cell.family}, {cell.layout.name}:")
        print("\n".join(f"  {line}" for line in failures(cell.judged)[:10]))
    missed = [bug for bug, cell in bugs if cell.passes]
    if whole and not words.no_page:
        PAGE.write_text(page(tables, bugs, rounded, time.perf_counter() - started), encoding="utf-8")
    print(
        f"\n{len(cells) - len(bad)} of {len(cells)} cells pass, {len(bugs) - len(missed)} of {len(bugs)} bugs caught"
    )
    return 1 if bad or missed or not all(r.passes for r in rounded) else 0


if __name__ == "__main__":
    sys.exit(main())

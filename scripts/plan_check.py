"""Compares the memory plan with a real step, layout by layout.

    python scripts/plan_check.py [--only "PP 2"]
    python scripts/plan_check.py --device cuda [--only Qwen3] [--json FOLDER]

On a CPU: weights, gradients and optimizer state are the memory behind the tensors that a rank holds;
activations are the peak of the memory behind tensors that autograd saves between forward and backward. Prints
the table. The exit code is 1 if a number is off by more than 5 %.

On a GPU: the allocator's peak in steps of real shapes on one GPU against the formula (weights, optimizer
state, gradients, saved activations, logits), and the memory that one layer keeps.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tests.plan import on_gpu  # noqa: E402
from tests.plan.cases import CASES, Row, compared  # noqa: E402

ALLOWED = 0.05
COLUMNS = ("weights", "gradients", "optimizer", "host", "activations")
GIB = 2**30


def cell(row: Row) -> str:
    if not row.planned and not row.measured:
        return f"{'-':>18}"
    return f"{row.planned / 2**20:>8.2f} {row.gap:>+8.2%} "


def nothing(only: str, names: list[str]) -> int:
    print(f"--only {only!r}: no name contains it; there are {', '.join(names)}")
    return 2


def on_a_cpu(only: str) -> int:
    wanted = [case for case in CASES if only in case.name]
    if not wanted:
        return nothing(only, [case.name for case in CASES])
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


def on_a_gpu(only: str, folder: str | None = None) -> int:
    """Measures each case in its own process, so that no memory of another case remains.

    `folder`: where the numbers are written, in bytes.
    """
    rows: list[dict[str, Any]] = []
    wanted = {name: words for name, words in on_gpu.CASES.items() if only in name}
    if not wanted:
        return nothing(only, list(on_gpu.CASES))
    if not torch.cuda.is_available():
        print("there is no GPU here that torch can use: nothing was measured")
        return 2
    width = max(map(len, wanted))
    heads = ("weights", "optimizer", "gradients", "activations", "logits", "working")
    print("GiB by formula; then planned against measured\n")
    print(
        f"{'':<{width}} " + "".join(f"{head:>12}" for head in heads) + "   peak         held       layer MiB"
    )
    worst = 0.0
    for name, words in wanted.items():
        done = subprocess.run(
            [sys.executable, __file__, "--words", words], capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(f"{name:<{width}}  failed: {(done.stderr.strip() or 'no word').splitlines()[-1]}")
            worst = 1.0
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        whole, layer = on_gpu.planned(on_gpu.configured(words))
        held = whole.static
        parts = (held.weights, held.optimizer, held.gradients, whole.activations, whole.logits, whole.working)
        gap = whole.total / found["peak"] - 1
        worst = max(worst, abs(gap))
        kept = held.weights + held.optimizer
        by_formula = dict(zip(heads, parts, strict=True)) | {"total": whole.total, "layer": layer}
        rows.append({"name": name, "words": words, "planned": by_formula, "measured": found})
        print(
            f"{name:<{width}} "
            + "".join(f"{part / GIB:>12.2f}" for part in parts)
            + f"   {whole.total / GIB:.2f} / {found['peak'] / GIB:.2f} ({gap:+.1%})"
            + f"   {kept / GIB:.2f} / {found['between'] / GIB:.2f}"
            + f"   {layer / 2**20:.0f} / {found['layer'] / 2**20:.0f} ({layer / found['layer'] - 1:+.1%})",
            flush=True,
        )
        if folder is not None:
            keep(Path(folder), rows)
    print(
        f"\nthe largest difference of a peak is {worst:.2%}, {ALLOWED:.0%} are allowed: {'agree' if worst <= ALLOWED else 'DISAGREE'}"
    )
    return int(worst > ALLOWED)


def keep(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Writes all rows so far, after every case, so that an interrupted run keeps its results."""
    folder.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "scripts/plan_check.py", *sys.argv[1:]])
    told = {"kind": "plan", "command": command, "allowed": ALLOWED, "rows": rows}
    (folder / "plan_check.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="run only layouts whose name contains this")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", metavar="FOLDER", help="on a GPU: write the numbers into this folder")
    parser.add_argument("--words", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.words is not None:
        print(json.dumps(asdict(on_gpu.measured(on_gpu.configured(options.words)))))
        return 0
    return on_a_gpu(options.only, options.json) if options.device == "cuda" else on_a_cpu(options.only)


if __name__ == "__main__":
    sys.exit(main())

"""Measures how far losses of equal runs drift apart through rounding errors that training amplifies.

Trains the demo's model in several ways that compute the same numbers up to rounding, and prints the relative
gap of each loss to that of the first way. Gradient accumulation on one process sets the scale: layouts must
not drift more than that.

    python bench/drift.py --steps 100
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
WAYS = {
    "one process, whole batch": "--nproc-per-node 1 --micro-batch-size 16",
    "one process, accumulation": "--nproc-per-node 1 --micro-batch-size 4",
    "2 data": "--nproc-per-node 2 --tensor-model-parallel-size 1 --micro-batch-size 4",
    "2 tensor": "--nproc-per-node 2 --tensor-model-parallel-size 2 --micro-batch-size 4",
    "2 tensor × 2 pipeline": "--nproc-per-node 4",
}
SHOWN = (1, 2, 5, 10, 20, 50, 100, 200, 400)


def losses(words: str, steps: int, folder: Path) -> list[float]:
    command = [sys.executable, "-m", "pentatron", "train", *words.split(), "--train-iters", str(steps)]
    # The learning-rate schedule of the whole demo, also for fewer steps.
    command += [
        "--lr-decay-iters",
        "400",
        "--eval-interval",
        "0",
        "--progress-bar",
        "off",
        "--run-dir",
        str(folder),
    ]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    shown = [step for step in SHOWN if step <= steps]
    print("relative gap of the loss at step" + "".join(f"{step:>9}" for step in shown))
    with tempfile.TemporaryDirectory() as folder:
        reference: list[float] = []
        for number, (name, words) in enumerate(WAYS.items()):
            found = losses(words, steps, Path(folder) / str(number))
            reference = reference or found
            gaps = [abs(found[s - 1] - reference[s - 1]) / reference[s - 1] for s in shown]
            print(f"{name:<32}" + "".join(f"{gap:>9.1e}" for gap in gaps), flush=True)


if __name__ == "__main__":
    main()

"""Measures a grouped matmul of experts against one matmul per expert and against a dense matmul.

    python bench/grouped.py [--experts 64] [--rows 65536] [--hidden 2048] [--inner 1536]

The dense matmul has the same number of operations. The grouped kernel needs a GPU and bf16; elsewhere the
first two are the same.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from pentatron.ops.linear import Groups


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Returns the median of ten runs after three warm-up runs."""
    found = []
    for _ in range(13):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return sorted(found[3:])[5]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("experts", 64), ("rows", 65536), ("hidden", 2048), ("inner", 1536)):
        parser.add_argument(f"--{name}", type=int, default=default)
    words = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = torch.randn(words.rows, words.hidden, device=device, dtype=dtype)
    made = torch.randn(words.rows, words.inner, device=device, dtype=dtype)
    weight = torch.randn(words.experts, words.inner, words.hidden, device=device, dtype=dtype)
    counts = (words.rows // words.experts,) * words.experts
    operations = 2 * sum(counts) * words.hidden * words.inner
    products: dict[str, Callable[[Groups], object]] = {
        "forward": lambda groups: groups.matmul(rows, weight.transpose(1, 2)),
        "gradient of the rows": lambda groups: groups.matmul(made, weight),
        "gradient of the weights": lambda groups: groups.weight_gradient(made, rows),
    }
    print(
        f"{words.experts} experts, {words.rows} rows, {words.inner} × {words.hidden}, {device.type}, {dtype}"
    )
    dense = seconds(lambda: rows @ weight[0].t(), device)
    for name, product in products.items():
        together = seconds(partial(product, Groups(counts, True)), device)
        apart = seconds(partial(product, Groups(counts, False)), device)
        print(
            f"{name:<24} one kernel {operations / together / 1e12:7.2f} TFLOP/s, one by one {operations / apart / 1e12:7.2f}, "
            f"a dense product {operations / dense / 1e12:7.2f}; one kernel takes {together / dense:.2f} times the dense one's time"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

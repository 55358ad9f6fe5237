"""Measures the host time to launch one operation, torch's and ours, as a compiled layer calls them.

    python bench/launches.py                   # on a GPU; does not wait for results
    python bench/launches.py --device cpu      # includes the operations themselves, on 16 × 16 matrices

Times are in microseconds. Rounding to fp8 is also timed without torch's dispatcher, and as a `custom_op`.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pentatron.ops import fp8
from pentatron.ops.fp8 import E4M3

SIDES = {"cuda": 256, "cpu": 16}
# Fewer calls than the launch queue of a GPU holds, so that the host never waits for it.
CALLS, WARM_UPS, ROUNDS = 300, 20, 15


def microseconds(call: Callable[[], object], on_gpu: bool) -> float:
    """Returns the time of one call in the fastest round, as other load only adds to it."""
    for _ in range(WARM_UPS):
        call()
    found = []
    for _ in range(ROUNDS):
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append(time.perf_counter() - began)
    return 1e6 * min(found) / CALLS


def as_custom_op() -> Callable[..., tuple[Tensor, Tensor]]:
    @torch.library.custom_op("pentatron_bench::rounded_both", mutates_args=())
    def rounded(
        matrix: Tensor, scale: Tensor, columns_scale: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        rows, columns = fp8._like_rounded(matrix, scale, columns_scale, dtype, True, True)
        fp8._write(matrix, rows, columns, scale, scale if columns_scale is None else columns_scale)
        return rows, columns

    return rounded


def calls(device: str) -> dict[str, Callable[[], object]]:
    side = SIDES[device]
    x = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    one, largest = torch.ones((), device=device), torch.ones(side, device=device)
    rows, columns = fp8._like_rounded(x, one, None, E4M3, True, True)
    old = as_custom_op()
    return {
        "an empty tensor": lambda: torch.empty_like(x),
        "a sum": lambda: x + x,
        "a product in bf16": lambda: x @ x,
        "a product in fp8": lambda: fp8.scaled_matmul(rows, columns, (one, one), x.dtype),
        "rounded to fp8, both ways": lambda: fp8._rounded(x, one, None, E4M3, True, True),
        "  its work alone": lambda: fp8._write(x, rows, columns, one, one),
        "  as a custom_op": lambda: old(x, one, None, E4M3),
        "a scale": lambda: fp8.scale_of(largest, E4M3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=SIDES, default="cuda")
    device = parser.parse_args().device
    if device == "cuda" and not torch.cuda.is_available():
        print("There is no GPU here; --device cpu measures on the CPU.")
        return 2
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}; microseconds of the host")
    for name, call in calls(device).items():
        print(f"  {name:<28} {microseconds(call, device == 'cuda'):6.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What the host takes to start one operation on a GPU, in microseconds: of torch's, and of ours, as a compiled layer calls them.

    python bench/launches.py

Beside each operation of ours stand its kernel alone, without the way through torch's dispatcher, and the same function as a `custom_op`.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pentatron.kernels import fp8
from pentatron.kernels.fp8 import E4M3

SIDE = 256
# Fewer than a GPU's queue takes: nobody waits for it.
CALLS, WARM_UPS = 300, 20


def microseconds(call: Callable[[], object]) -> float:
    for _ in range(WARM_UPS):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    took = time.perf_counter() - began
    torch.cuda.synchronize()
    return 1e6 * took / CALLS


def as_custom_op() -> Callable[..., tuple[Tensor, Tensor]]:
    @torch.library.custom_op("pentatron_bench::rounded_both", mutates_args=())
    def rounded(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rows, columns = fp8._as_it_is(matrix, dtype), fp8._transposed(matrix, dtype)
        fp8._write(matrix, rows, columns, scale, scale)
        return rows, columns

    return rounded


def calls() -> dict[str, Callable[[], object]]:
    from pentatron.kernels.fp8_triton import write_rounded

    x = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    one, largest = torch.ones((), device="cuda"), torch.ones(SIDE, device="cuda")
    rows, columns = fp8._as_it_is(x, E4M3), fp8._transposed(x, E4M3)
    old = as_custom_op()
    return {
        "an empty tensor": lambda: torch.empty_like(x),
        "a sum": lambda: x + x,
        "a product in bf16": lambda: x @ x,
        "a product in fp8": lambda: fp8.product(rows, columns, (one, one), x.dtype),
        "rounded to fp8, both ways": lambda: fp8._rounded_both(x, one, None, E4M3),
        "  its kernel alone": lambda: write_rounded(x, rows, columns, one, one),
        "  as a custom_op": lambda: old(x, one, E4M3),
        "a scale": lambda: fp8.scale_of(largest, E4M3),
    }


def main() -> int:
    if not torch.cuda.is_available():
        print("This needs a GPU; there is none here.")
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds of the host")
    for name, call in calls().items():
        print(f"  {name:<28} {microseconds(call):6.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

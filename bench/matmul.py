"""Measures the matrix products of a training step on one GPU: the lower bound of the step time.

    python bench/matmul.py [--shape qwen3-8b-8l qwen2.5-1.5b] [--tokens 16384]
    python bench/matmul.py --parts 1 2 4      # every product split by rows of its weight

Measures forward, input gradient and weight gradient of every matrix of a layer and of the head in bf16, and
forward in fp8 with one scale per tensor and with one per row. Each product is repeated for a fifth of a
second, so that the clock falls to what the power limit allows, as in training; the clock and the power draw
are printed with every shape. `--parts` shows the effect of sizes on the library's choice of a kernel.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.steps import SHAPES, Shape, milliseconds, milliseconds_in_a_row

SECONDS = 0.2
FP8 = torch.float8_e4m3fn


def matrices(shape: Shape) -> dict[str, tuple[int, int]]:
    """Returns rows and columns of the weights of a layer and of the head."""
    attended = shape.heads * shape.head_size
    return {
        "qkv": (attended + 2 * shape.groups * shape.head_size, shape.hidden),
        "attention output": (shape.hidden, attended),
        "gate and up": (2 * shape.feed_forward, shape.hidden),
        "down": (shape.hidden, shape.feed_forward),
        "head": (shape.vocabulary, shape.hidden),
    }


def sustained(product: Callable[[], object]) -> float:
    """Returns the milliseconds of one product when many follow each other without a pause."""
    repeats = max(5, int(1e3 * SECONDS / milliseconds(product, 2)))
    return milliseconds_in_a_row(product, repeats)


Products = dict[str, Callable[[], Tensor]]


def bf16_products(tokens: int, rows: int, columns: int, parts: int = 1) -> Products:
    """Returns the three products of a weight, whole or split by rows of the weight into `parts`.

    The parts write into, or add to, one result.
    """
    x, weight, gradient = (_random(*size) for size in ((tokens, columns), (rows, columns), (tokens, rows)))
    if parts == 1:
        return {
            "forward": lambda: x @ weight.t(),
            "of the stream": lambda: gradient @ weight,
            "of the weight": lambda: gradient.t() @ x,
        }
    weights, gradients = weight.chunk(parts), gradient.chunk(parts, 1)

    def forward() -> Tensor:
        made = x.new_empty(tokens, rows)
        for place, part in zip(made.chunk(parts, 1), weights, strict=True):
            torch.mm(x, part.t(), out=place)
        return made

    def of_the_stream() -> Tensor:
        made = gradients[0] @ weights[0]
        for part, of_part in zip(weights[1:], gradients[1:], strict=True):
            made.addmm_(of_part, part)
        return made

    def of_the_weight() -> Tensor:
        made = weight.new_empty(rows, columns)
        for place, of_part in zip(made.chunk(parts), gradients, strict=True):
            torch.mm(of_part.t(), x, out=place)
        return made

    return {"forward": forward, "of the stream": of_the_stream, "of the weight": of_the_weight}


def in_parts(shape: Shape, tokens: int, counts: Sequence[int]) -> None:
    """Times every product in each number of parts, in two rounds, which shows changes of the clock."""
    for matrix, (rows, columns) in matrices(shape).items():
        found: dict[tuple[str, int], list[float]] = {}
        for _ in range(2):
            for count in counts:
                for way, product in bf16_products(tokens, rows, columns, count).items():
                    found.setdefault((way, count), []).append(sustained(product))
        for way in dict.fromkeys(way for way, _ in found):
            cells = "  ".join(
                f"in {count}: {' '.join(f'{ms:.3f}' for ms in found[way, count])}" for count in counts
            )
            print(f"  {matrix:<17} {way:<14} {cells}", flush=True)


def fp8_products(tokens: int, rows: int, columns: int) -> Products:
    x, weight = _random(tokens, columns).to(FP8), _random(rows, columns).to(FP8)

    def scaled(of_x: Tensor, of_weight: Tensor) -> Callable[[], Tensor]:
        return lambda: torch._scaled_mm(
            x, weight.t(), of_x, of_weight, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    one = torch.ones((), device="cuda")
    return {
        "fp8": scaled(one, one),
        "fp8 by rows": scaled(torch.ones(tokens, 1, device="cuda"), torch.ones(1, rows, device="cuda")),
    }


def _random(*size: int) -> Tensor:
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16) * 0.05


def state_of_gpu() -> str:
    asked = "clocks.sm,power.draw,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        return "unknown (no nvidia-smi)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["qwen3-8b-8l", "qwen2.5-1.5b"])
    parser.add_argument("--tokens", type=int, default=4 * 4096)
    parser.add_argument(
        "--parts", type=int, nargs="+", metavar="N", help="compare products split into these numbers of parts"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("This needs a GPU; there is none here.")
        return 2
    fp8 = torch.cuda.get_device_capability() >= (8, 9)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; milliseconds (TFLOP/s)")
    for name in options.shape:
        shape, whole = SHAPES[name], 0.0
        print(f"{name}, {options.tokens} tokens")
        if options.parts:
            in_parts(shape, options.tokens, options.parts)
            continue
        for matrix, (rows, columns) in matrices(shape).items():
            flops = 2.0 * options.tokens * rows * columns
            found = {way: sustained(f) for way, f in bf16_products(options.tokens, rows, columns).items()}
            whole += sum(found.values()) * (1 if matrix == "head" else shape.layers)
            if fp8:
                found |= {way: sustained(f) for way, f in fp8_products(options.tokens, rows, columns).items()}
            cells = "  ".join(f"{way} {ms:.3f} ({flops / ms / 1e9:.0f})" for way, ms in found.items())
            print(f"  {matrix:<17} {cells}", flush=True)
        print(f"  all products of a step in bf16: {whole:.1f} ms; clock, power, limit, °C: {state_of_gpu()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

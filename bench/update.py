"""Measures the gradient norm and the AdamW update on a GPU: one pass against torch's operators.

    python bench/update.py [--layers 8] [--width 4096] [--inner 12288] [--vocabulary 151936]
        [--blocks 1024:4 8192:16]

Weights and gradients are bf16, master weights and moments fp32. The fused update reads 14 bytes and writes 14
bytes per parameter. torch's way has fp32 gradients (as after a cast), clips them, updates and rounds. Before
each measurement the GPU multiplies matrices, as in a training step.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.adamw import adamw

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import steps
from pentatron.ops.triton_update import AdamWParameters, FusedAdamWKernel, SumOfSquares, Target
from pentatron.optim.update_rules import squared_norm

_DEVICE = torch.device("cuda")
_NUMBERS = AdamWParameters(1e-5, 0.1, 0.9, 0.95, 1e-8, 5)


def sizes(layers: int, width: int, inner: int, vocabulary: int) -> list[int]:
    """Returns the parameter sizes of a Qwen3-like model with a quarter of the heads for keys and values."""
    layer = [width * width * 3 // 2, width * width, 2 * inner * width, inner * width, width, width]
    return [vocabulary * width, *layer * layers, width, vocabulary * width]


def milliseconds(action: Callable[[], object], repeats: int = 5) -> float:
    """Times an action that is launched while matmuls run, so that its launch time does not count."""
    matrix = torch.randn(8192, 8192, device=_DEVICE, dtype=torch.bfloat16)

    def products() -> None:
        for _ in range(40):
            torch.mm(matrix, matrix)

    return steps.milliseconds(action, repeats, products)


def print_rate(what: str, spent: float, moved: float) -> None:
    sys.stdout.write(f"{what:<44} {spent:7.2f} ms  {moved / spent / 1e6:6.0f} GB/s\n")


def by_torch(
    masters: list[Tensor], moments: list[list[Tensor]], weights: list[Tensor], gradients: list[Tensor]
) -> None:
    exact = [gradient.float() for gradient in gradients]
    steps = [torch.zeros((), device=_DEVICE) for _ in exact]

    def update() -> None:
        torch._foreach_mul_(exact, 0.5)
        adamw(
            masters,
            exact,
            moments[0],
            moments[1],
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=_NUMBERS.beta1,
            beta2=_NUMBERS.beta2,
            lr=_NUMBERS.learning_rate,
            weight_decay=_NUMBERS.decay,
            eps=_NUMBERS.epsilon,
            maximize=False,
        )
        torch._foreach_copy_(weights, masters)

    # Bytes per parameter: clipping 8, update 28, rounding 6.
    print_rate(
        "torch: clip, fused AdamW, round", milliseconds(update), 42 * sum(g.numel() for g in gradients)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=12288)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--blocks", nargs="+", default=["1024:4", "2048:8", "4096:8", "8192:16"])
    given = parser.parse_args()
    found = sizes(given.layers, given.width, given.inner, given.vocabulary)
    elements = sum(found)
    sys.stdout.write(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {elements / 1e9:.2f} G parameters in {len(found)} tensors\n"
    )
    masters = [torch.randn(size, device=_DEVICE) for size in found]
    moments = [[torch.zeros_like(master) for master in masters] for _ in range(2)]
    weights, gradients = ([master.bfloat16() for master in masters] for _ in range(2))
    print_rate("torch: norm of bf16", milliseconds(lambda: squared_norm(gradients, _DEVICE)), 2 * elements)
    control = torch.tensor([0.5, 1.0], device=_DEVICE)
    targets = [Target(*tensors, decays=True) for tensors in zip(masters, *moments, weights)]
    for block, warps in (map(int, words.split(":")) for words in given.blocks):
        print_rate(
            f"one launch: norm, blocks of {block}, {warps} warps",
            milliseconds(partial(SumOfSquares(block, warps), gradients)),
            2 * elements,
        )
        spent = milliseconds(partial(FusedAdamWKernel(targets, block, warps), gradients, control, _NUMBERS))
        print_rate(f"one pass: update, blocks of {block}, {warps} warps", spent, 28 * elements)
    by_torch(masters, moments, weights, gradients)


if __name__ == "__main__":
    main()

"""Measures counter-based dropout against torch's `F.dropout`, forward and backward, in turns.

python bench/dropout.py --repeats 50
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from pentatron.nn.dropout import dropout_keys, hidden_dropout

PROBABILITY = 0.1
# Device, dtype, and samples × positions × channels.
CASES = (
    ("cpu", torch.float32, (2, 128, 1024)),
    ("cpu", torch.bfloat16, (2, 128, 1024)),
    ("cuda", torch.float32, (4, 4096, 4096)),
    ("cuda", torch.bfloat16, (4, 4096, 4096)),
)


def ours_and_theirs(device: torch.device, shape: tuple[int, int, int]) -> list[Callable[[Tensor], Tensor]]:
    batch, length, _ = shape
    keys = dropout_keys(1, 0, 0, batch, torch.arange(length, device=device), device)
    return [lambda x: hidden_dropout(x, keys, 1, PROBABILITY), lambda x: F.dropout(x, PROBABILITY)]


def seconds(drop: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> tuple[float, float]:
    """Returns the seconds of forward and of backward."""
    wait = torch.cuda.synchronize if x.is_cuda else lambda: None
    x.grad = None
    wait()
    began = time.perf_counter()
    dropped = drop(x)
    wait()
    between = time.perf_counter()
    dropped.backward(gradient)
    wait()
    return between - began, time.perf_counter() - between


def nanoseconds_per_element(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], repeats: int
) -> list[tuple[float, float]]:
    """Returns (forward, backward) of ours and of torch: the minimum of `repeats`, as other load only adds."""
    x = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    gradient = torch.randn_like(x)
    ways = ours_and_theirs(device, shape)
    found: list[list[tuple[float, float]]] = [[], []]
    for round_number in range(repeats + 1):
        for way, times in zip(ways, found):
            taken = seconds(way, x, gradient)
            if round_number > 0:  # the first round allocates memory and loads kernels
                times.append(taken)
    scale = 1e9 / x.numel()
    return [(scale * min(t[0] for t in times), scale * min(t[1] for t in times)) for times in found]


def main() -> None:
    parser = argparse.ArgumentParser(description="Times counter-based dropout per element against F.dropout.")
    parser.add_argument(
        "--repeats", type=int, default=50, metavar="N", help="number of runs; the fastest counts"
    )
    repeats: int = parser.parse_args().repeats
    torch.set_num_threads(1)
    print(
        f"nanoseconds per element; torch {torch.__version__}, Python {platform.python_version()}, one thread on a CPU\n"
    )
    print(f"{'device':<6}  {'dtype':<8}  {'direction':<9}  {'ours':>8}  {'F.dropout':>9}  {'ratio':>6}")
    for name, dtype, shape in CASES:
        if name == "cuda" and not torch.cuda.is_available():
            continue
        ours, theirs = nanoseconds_per_element(torch.device(name), dtype, shape, repeats)
        rows = zip(("forward", "backward", "both"), (*ours, sum(ours)), (*theirs, sum(theirs)))
        for direction, a, b in rows:
            kind = str(dtype).removeprefix("torch.")
            print(f"{name:<6}  {kind:<8}  {direction:<9}  {a:>8.3f}  {b:>9.3f}  {a / b:>5.2f}x", flush=True)


if __name__ == "__main__":
    main()

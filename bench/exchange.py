"""Measures gather and broadcast of small Python values between ranks against torch's pickled ones.

python bench/exchange.py [RANKS]
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from pentatron.parallel.collectives import Group, broadcast_object, gather_objects
from tests.harness import run_distributed

ROUNDS, CALLS = 9, 60
VALUES: dict[str, Any] = {
    "None": None,
    "a sentence of 120 letters": "x" * 120,
    "12 timers": {f"timer-{number}": 1.5 * number for number in range(12)},
    "60 digests by rectangle": {(f"layers.{n}.mlp.weight", (0, 0), (64, 64)): "a" * 16 for n in range(60)},
}


def microseconds(exchange: Callable[[Any], Any], value: Any) -> float:
    """Returns the microseconds per call of the fastest round."""
    best = float("inf")
    for _ in range(ROUNDS):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(CALLS):
            exchange(value)
        best = min(best, (time.perf_counter() - began) / CALLS)
    return best * 1e6


def measured() -> dict[str, list[float]]:
    """Returns for each value: gather by torch, gather by ours, broadcast by torch, broadcast by ours."""
    size = dist.get_world_size()
    group = Group(dist.get_rank(), size, dist.group.WORLD, key=b"k" * 32)
    ways: list[Callable[[Any], Any]] = [
        lambda value: dist.all_gather_object([None] * size, value),
        lambda value: gather_objects(value, group),
        lambda value: dist.broadcast_object_list([value], src=0),
        lambda value: broadcast_object(value, group),
    ]
    return {name: [microseconds(way, value) for way in ways] for name, value in VALUES.items()}


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    for name, figures in run_distributed(measured, ranks)[0].items():
        print(f"| {name} | {' | '.join(f'{figure:.0f}' for figure in figures)} |")

"""`python -m pentatron.launch.handshake BACKEND RANK SIZE PORT`: one process of a small all-reduce, for `pentatron doctor`."""

import datetime
import sys
import time

import torch
import torch.distributed as dist

from pentatron.parallel.process_group import open_store
from pentatron.parallel.rendezvous import MeetingPoint

_NUMBERS = 2**18


def shake(backend: str, rank: int, size: int, port: int) -> float:
    """Seconds of an all-reduce of a mebibyte, after a first one; raises where its sum is wrong."""
    if backend == "nccl":
        torch.cuda.set_device(rank)
    device = "cuda" if backend == "nccl" else "cpu"
    waiting = datetime.timedelta(seconds=40)
    store = open_store(MeetingPoint("127.0.0.1", port), rank, size, waiting)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=waiting)
    try:
        for _ in range(2):
            numbers = torch.full((_NUMBERS,), rank + 1.0, device=device)
            began = time.perf_counter()
            dist.all_reduce(numbers)
            total = float(numbers.sum())
            seconds = time.perf_counter() - began
        expected = _NUMBERS * size * (size + 1) / 2
        if total != expected:
            raise ValueError(f"the sum is {total}, not {expected}")
        return seconds
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.stdout.write(f"{shake(sys.argv[1], *map(int, sys.argv[2:])):.6f}\n")

"""Runs one rank of the all-reduce test of `pentatron doctor`.

Usage: `python -m pentatron.launch.all_reduce_probe BACKEND RANK SIZE PORT`.
"""

import datetime
import sys
import time

import torch
import torch.distributed as dist

from pentatron.parallel.process_group import open_store
from pentatron.parallel.rendezvous import Rendezvous

_ELEMENTS = 2**18


def all_reduce_seconds(backend: str, rank: int, size: int, port: int) -> float:
    """Returns the seconds of a 1 MiB all-reduce after a warm-up; raises if its sum is wrong."""
    if backend == "nccl":
        torch.cuda.set_device(rank)
    device = "cuda" if backend == "nccl" else "cpu"
    timeout = datetime.timedelta(seconds=40)
    store = open_store(Rendezvous("127.0.0.1", port), rank, size, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        for _ in range(2):
            tensor = torch.full((_ELEMENTS,), rank + 1.0, device=device)
            began = time.perf_counter()
            dist.all_reduce(tensor)
            # Copies the sum to the host, which waits for the device.
            total = float(tensor.sum())
            seconds = time.perf_counter() - began
        expected = _ELEMENTS * size * (size + 1) / 2
        if total != expected:
            raise ValueError(f"the sum is {total}, not {expected}")
        return seconds
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.stdout.write(f"{all_reduce_seconds(sys.argv[1], *map(int, sys.argv[2:])):.6f}\n")

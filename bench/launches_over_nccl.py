"""Measures how a posted NCCL receive delays the launches after it (decision 0057).

Two processes share one GPU. Rank 1 posts a receive and then runs an operation that may synchronise its
device. Prints how long the operation took, and whether both ranks end. `early` cases post the receive before
the work that its sender waits for, `late` cases after it.

    python bench/launches_over_nccl.py [--only early]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ELEMENTS = 1 << 20
LIMIT_SECONDS = 25.0
CYCLES = 2_000_000_000

# Each runs once in a process; only the known kernel has run before.
ACTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a known kernel": lambda x: x * 2,
    "a new kernel": torch.erfinv,
    "cudaMalloc": lambda x: torch.empty(1 << 30, dtype=torch.uint8, device="cuda"),
    "page-locked memory": lambda x: torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True),
    "cudaFree": lambda x: torch.cuda.empty_cache(),
}


class Rank:
    """A process with two one-way channels to its peer, both connected."""

    def __init__(self, rank: int, port: int) -> None:
        os.environ.update(
            NCCL_HOSTID=f"rank{rank}",
            NCCL_SOCKET_IFNAME="lo",
            NCCL_IB_DISABLE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        torch.cuda.set_device(0)
        dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=2)
        self.rank, self.up, self.down = rank, dist.new_group([0, 1]), dist.new_group([0, 1])
        self.ones = torch.ones(ELEMENTS, device="cuda")
        self.received = torch.empty_like(self.ones)
        for group, sender in ((self.up, 0), (self.down, 1)):
            if rank == sender:
                dist.send(self.ones, 1 - sender, group=group)
            else:
                dist.recv(self.received, sender, group=group)
        # Leaves memory that cudaFree can free, and loads the kernel that counts as known.
        del_later = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        del del_later
        (self.ones * 2).sum().item()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        dist.barrier(group=dist.new_group([0, 1], backend="gloo"))

    def timed(self, what: str) -> None:
        began = time.perf_counter()
        ACTIONS[what](self.ones)
        print(f"    {what} took {time.perf_counter() - began:.2f} s", flush=True)

    def reply(self) -> None:
        """Receives from rank 1 and sends the same data back."""
        dist.recv(self.received, 1, group=self.down)
        dist.isend(self.received, 1, group=self.up).wait()

    def end(self) -> None:
        torch.cuda.synchronize()
        dist.barrier(group=dist.new_group([0, 1], backend="gloo"))
        os._exit(0)


def independent(at: Rank, what: str) -> None:
    """The sender waits for nothing: it sends after two seconds."""
    if at.rank == 1:
        work = dist.irecv(at.received, 0, group=at.up)
        time.sleep(0.2)
        at.timed(what)
        work.wait()
    else:
        time.sleep(2)
        dist.isend(at.ones, 1, group=at.up).wait()


def early(at: Rank, what: str) -> None:
    """The sender waits for a message that this rank sends after the action."""
    if at.rank == 1:
        work = dist.irecv(at.received, 0, group=at.up)
        at.timed(what)
        dist.isend(at.ones, 0, group=at.down)
        work.wait()
    else:
        at.reply()


def early_sent(at: Rank, what: str) -> None:
    """The sender waits for work that this rank queued before the action and its GPU has not begun."""
    if at.rank == 1:
        work = dist.irecv(at.received, 0, group=at.up)
        torch.cuda._sleep(CYCLES)
        dist.isend(at.ones * 2, 0, group=at.down)
        at.timed(what)
        work.wait()
    else:
        at.reply()


def late(at: Rank, what: str) -> None:
    """As `early_sent`, with the receive posted after the send that its sender waits for."""
    if at.rank == 1:
        torch.cuda._sleep(CYCLES)
        dist.isend(at.ones * 2, 0, group=at.down)
        work = dist.irecv(at.received, 0, group=at.up)
        at.timed(what)
        work.wait()
    else:
        at.reply()


CASES = [
    *((independent, what) for what in ACTIONS),
    *((early, what) for what in ACTIONS),
    (early_sent, "a known kernel"),
    (early_sent, "a new kernel"),
    (late, "a new kernel"),
    (late, "cudaFree"),
]


def run(rank: int, case: int, port: int) -> None:
    at = Rank(rank, port)
    order, what = CASES[case]
    order(at, what)
    at.end()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    words = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here that torch can use: nothing was run")
        return 2
    context = mp.get_context("spawn")
    for number, (order, what) in enumerate(CASES):
        name = f"{order.__name__}, {what}"
        if words.only not in name:
            continue
        print(name, flush=True)
        ranks = [context.Process(target=run, args=(rank, number, 29600 + number)) for rank in range(2)]
        for process in ranks:
            process.start()
        until = time.perf_counter() + LIMIT_SECONDS
        for process in ranks:
            process.join(max(0.1, until - time.perf_counter()))
        print("    ends" if all(p.exitcode == 0 for p in ranks) else "    NEVER ENDS", flush=True)
        for process in ranks:
            process.kill()
            process.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())

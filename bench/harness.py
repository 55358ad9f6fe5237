"""Measures an empty distributed test: ranks forked from the zygote against new processes.

Both ways start the ranks, form a gloo process group, pass one barrier and end the ranks.

    python bench/harness.py --repeats 5
"""

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.harness import run_distributed
from tests.harness.client import session_zygote

WORLDS = (2, 4, 8)
TARGET_WORLD = 4
TARGET_MILLISECONDS = 200


def pass_barrier() -> None:
    dist.barrier()


def run_forked(world: int) -> None:
    run_distributed(pass_barrier, world)


def fresh_rank(rank: int, world: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    pass_barrier()
    dist.destroy_process_group()


def run_spawned(world: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(fresh_rank, args=(world, f"{directory}/store"), nprocs=world)  # type: ignore[attr-defined]


def median_milliseconds(run: Callable[[int], None], world: int, repeats: int) -> float:
    times: list[float] = []
    for _ in range(repeats):
        started_at = time.perf_counter()
        run(world)
        times.append(time.perf_counter() - started_at)
    return 1000 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Times an empty distributed test with forked ranks and with new processes."
    )
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="number of runs; the median counts"
    )
    repeats: int = parser.parse_args().repeats

    zygote = session_zygote().zygote()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {repeats} repeats, medians")
    print(f"zygote start, once per test session: {zygote.start_seconds:.1f} s\n")
    print(f"{'ranks':>5}  {'forked':>9}  {'fresh processes':>15}  {'ratio':>6}")
    forked_milliseconds: dict[int, float] = {}
    for world in WORLDS:
        run_forked(world)  # warm-up
        forked = forked_milliseconds[world] = median_milliseconds(run_forked, world, repeats)
        spawned = median_milliseconds(run_spawned, world, repeats)
        print(f"{world:>5}  {forked:>6.0f} ms  {spawned:>12.0f} ms  {spawned / forked:>5.0f}x", flush=True)
    session_zygote().close()

    measured = forked_milliseconds[TARGET_WORLD]
    verdict = "under" if measured < TARGET_MILLISECONDS else "NOT under"
    print(f"\n{TARGET_WORLD} ranks: {measured:.0f} ms, {verdict} {TARGET_MILLISECONDS} ms")


if __name__ == "__main__":
    main()

"""A slow rank is reported once, and ranks of equal speed are never reported."""

import time

import torch
import torch.distributed as dist

from pentatron.layout.ranks import Grid
from pentatron.monitor.report import RankReport
from pentatron.parallel.collectives import all_reduce_
from pentatron.parallel.world import create_groups
from pentatron.train.stragglers import StragglerDetector, gather_statistics
from tests.harness import run_distributed


def lines_of(delay: float) -> list[str]:
    """Measures four steps of two ranks, of which rank 1 takes `delay` seconds longer."""
    world = create_groups(Grid(data=2), dist.get_rank(), dist.get_rank(), torch.device("cpu"))
    stragglers, found = StragglerDetector(world.grid), []
    for step in range(4):
        all_reduce_(torch.ones(1), world.all_ranks)
        world.waits.begin()
        started = time.perf_counter()
        time.sleep(0.1 + delay * world.all_ranks.rank)
        all_reduce_(torch.ones(1), world.all_ranks)
        report = gather_statistics(world, time.perf_counter() - started, world.waits.end())
        found += stragglers.check(step, report)
    return found


def test_rank_that_is_three_times_slower_is_reported_once() -> None:
    (line,) = run_distributed(lines_of, 2, delay=0.5)[0]
    assert line.startswith("straggler: rank 1 was busy for ") and "in step 2" in line


def test_healthy_ranks_are_not() -> None:
    assert run_distributed(lines_of, 2, delay=0.0)[0] == []


def report(*busy: float) -> RankReport:
    nothing = [0.0] * len(busy)
    return RankReport(list(busy), nothing, nothing, [], [])


def test_stages_are_compared_with_their_like_and_one_slow_step_is_nothing() -> None:
    stages = StragglerDetector(Grid(pipeline=2, data=2))
    assert not any(stages.check(step, report(0.1, 0.1, 0.5, 0.5)) for step in range(9)), "a heavier stage"
    once = StragglerDetector(Grid(data=3))
    assert not any(once.check(step, report(0.1, 0.1, 0.9 if step % 3 == 0 else 0.1)) for step in range(9))
    again = StragglerDetector(Grid(data=3))
    slow, fast = report(0.1, 0.1, 0.9), report(0.1, 0.1, 0.1)
    told = [bool(again.check(n, r)) for n, r in enumerate([slow, slow, slow, slow, fast, slow, slow, slow])]
    assert told == [False, False, True, False, False, False, False, True]


def test_a_rank_alone_in_its_stage_may_just_have_more_to_compute() -> None:
    """Without a replica to compare with, the likely reason is its stage, not its machine."""
    alone, slow = StragglerDetector(Grid(pipeline=2)), report(0.1, 0.5)
    (line,) = [line for step in range(4) for line in alone.check(step, slow)]
    assert "ranks of other stages for 100 ms" in line and "`pentatron layout`" in line
    beside, slow = StragglerDetector(Grid(pipeline=2, data=2)), report(0.1, 0.5, 0.1, 0.1)
    (line,) = [line for step in range(4) for line in beside.check(step, slow)]
    assert "ranks of the same stage for 100 ms" in line and "layout" not in line

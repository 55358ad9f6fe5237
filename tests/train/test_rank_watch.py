"""Tests straggler statistics: the busy time of a rank excludes waiting for other ranks."""

import time
from dataclasses import astuple, replace
from typing import Any

import pytest
import torch

from pentatron.compare.trial import micro_batches
from pentatron.monitor.report import RankReport
from pentatron.optim.build import build_optimizer
from pentatron.parallel.collectives import Group, all_reduce_, start_all_reduce_
from pentatron.parallel.world import World, create_groups, single_process
from pentatron.train.model import build_parallel_model, model_dtype
from pentatron.train.step import train_step
from pentatron.train.stragglers import RankStatistics, gather_statistics
from tests.harness import run_distributed
from tests.support import resolved

SLOW, DELAY = 1, 0.5


def step_with_a_slow_rank(words: str, world_size: int, bug: str = "") -> RankReport:
    """Runs two steps; the slow rank sleeps at the beginning of the second."""
    config = resolved(f"--micro-batch-size 2 {words}", world_size).config
    rank = torch.distributed.get_rank()
    world = create_groups(config.grid, rank, rank, torch.device("cpu"))
    model = build_parallel_model(config, world)
    optimizer = build_optimizer(
        model.stages, world, config.optim, model.decisions.optimizer, model_dtype(config)
    )
    batches = micro_batches(config, world, 0)
    watch = RankStatistics(config, world, last_step=2)
    found = None
    for step in (1, 2):
        if bug == "waiting is not counted":
            world.waits.begin = lambda: None  # type: ignore[method-assign]
        all_reduce_(torch.ones(1), world.all_ranks)
        watch.begin(step)
        started = time.perf_counter()
        if rank == SLOW and step == 2:
            time.sleep(DELAY)
        train_step(model, optimizer, [next(batches) for _ in range(config.accumulation)], 1e-3, step - 1)
        found = watch.report(step, time.perf_counter() - started)
    assert found is not None
    return found


@pytest.mark.parametrize("words", ["", "--zero-stage 3", "--tp_size 2", "--pp_size 2", "--cp_size 2"])
def test_the_slow_rank_is_found(words: str) -> None:
    report = run_distributed(step_with_a_slow_rank, 2, words=words, world_size=2)[0]
    busy = report.as_metrics()["ranks"]["busy_seconds"]
    assert min(report.seconds) > DELAY / 2, "every rank's step takes as long as the slow rank's"
    # Compares the two ranks only, as other load on this machine delays both.
    assert busy[SLOW] > DELAY and busy[SLOW] > busy[1 - SLOW]
    waited = [c + m for c, m in zip(report.collectives, report.messages)]
    assert waited[1 - SLOW] > waited[SLOW]
    assert (max(report.messages) > 0) == ("--pp_size" in words)


def test_without_counting_it_would_not_be() -> None:
    bug = "waiting is not counted"
    report = run_distributed(step_with_a_slow_rank, 2, words="", world_size=2, bug=bug)[0]
    busy = report.as_metrics()["ranks"]["busy_seconds"]
    assert min(busy) > DELAY / 2


def in_two_ways(world: World) -> list[float]:
    waits = world.waits
    times = []
    for way in ("at once", "later", "not begun"):
        if way != "not begun":
            waits.begin()
        if world.all_ranks.rank == SLOW:
            time.sleep(0.2)
        if way == "later":
            pending = start_all_reduce_(torch.ones(3), world.all_ranks)
            time.sleep(0.4)
            pending.wait()
        else:
            all_reduce_(torch.ones(3), world.all_ranks)
        times.append(waits.end().collectives if way != "not begun" else sum(astuple(waits.end())))
    return times


def waits_of_a_rank() -> list[float]:
    config = resolved("", world_size=2).config
    rank = torch.distributed.get_rank()
    return in_two_ways(create_groups(config.grid, rank, rank, torch.device("cpu")))


def test_overlapped_communication_is_not_counted_as_waiting() -> None:
    quick, slow = run_distributed(waits_of_a_rank, 2)
    assert quick[0] > slow[0]
    assert quick[1] < quick[0], "the sum came while the rank was busy"
    assert quick[2] == quick[1], "nothing is counted after the end"


def test_single_process_has_no_waiting_time() -> None:
    world = single_process()
    world.waits.begin()
    report = gather_statistics(world, 2.0, world.waits.end())
    told: dict[str, Any] = report.as_metrics()["ranks"]
    assert told["busy_seconds"] == [2.0] and told["collective_seconds"] == [0.0]
    assert told["memory_bytes"][0] > 2**20
    assert "gpu_utilisation" not in told
    unknown = gather_statistics(world, 2.0, world.waits.end(), knows_waits=False).as_metrics()["ranks"]
    assert set(unknown) == {"memory_bytes"}, "what cannot be measured is left out, not zero"


def test_many_ranks_tell_less_often() -> None:
    config = resolved("--log-interval 10").config
    few = replace(single_process(), all_ranks=Group(0, 64))
    many = replace(single_process(), all_ranks=Group(0, 1024))
    told = {
        size: [step for step in range(1, 330) if RankStatistics(config, world, last_step=325)._due(step)]
        for size, world in ((64, few), (1024, many))
    }
    assert told[64] == sorted([1, *range(10, 330, 10), 325])
    assert told[1024] == [1, 160, 320, 325]

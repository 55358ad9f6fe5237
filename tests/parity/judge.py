"""Computes cells of the parity table, one at a time or in parallel."""

import functools
import math
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from pentatron.compare.trial import Gap, Trajectory, gaps
from tests.harness import GLOO, run_distributed
from tests.harness.report import RanksFailed
from tests.parity.cases import Layout
from tests.parity.trajectory import on_a_rank, run
from tests.parity.verdicts import failures, largest_gap

TIMEOUT = 300.0


@dataclass(frozen=True)
class Cell:
    layout: Layout
    family: str
    judged: list[Gap]

    @property
    def text(self) -> str:
        """Returns the largest gap as a share of what is allowed."""
        return f"{largest_gap(self.judged).ratio:.1%}"

    @property
    def passes(self) -> bool:
        return not failures(self.judged)


@dataclass(frozen=True)
class Task:
    layout: Layout
    family: str
    device: str = "cpu"
    bug: str = ""
    backend: str = GLOO


@functools.cache
def _alone(words: str, device: str) -> Trajectory:
    return run(words, 1, device)


def judged(task: Task) -> Cell:
    """Compares a layout with one process; ranks that fail count as an infinite gap."""
    layout, family = task.layout, task.family
    expected = _alone(layout.alone(family), task.device)
    try:
        found = run_distributed(
            on_a_rank,
            layout.ranks,
            timeout=TIMEOUT,
            backend=task.backend,
            words=layout.command(family),
            bug=task.bug,
            device=task.device,
        )
        return Cell(layout, family, gaps(found, expected))
    except (RanksFailed, AssertionError) as error:
        return Cell(layout, family, [Gap(str(error).strip().splitlines()[-1], math.inf)])


def judge_all(tasks: Sequence[Task], jobs: int) -> Iterator[Cell]:
    """Yields cells in the order of the tasks; each job has its own process and zygote."""
    if jobs == 1:
        yield from map(judged, tasks)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(judged, tasks)

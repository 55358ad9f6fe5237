"""A rank that is much slower than its like, step after step: it makes everyone wait, and nobody else would say so."""

import statistics
from collections.abc import Sequence

import torch

from pentatron.layout.ranks import Grid
from pentatron.monitor.memory import memory_bytes
from pentatron.monitor.report import RankReport, gpu_utilisation
from pentatron.parallel.collectives import Waited, all_gather_into
from pentatron.parallel.world import World
from pentatron.settings.run import RunConfig

# Collects, now and then, what every rank measured of its own step.


# A percentage that nobody knows.
_UNKNOWN = -1.0
# A row of metrics has some numbers of every rank; where there are more ranks than this, it is written less often.
_RANKS_OF_A_SHORT_ROW = 64


class RankWatch:
    """Steps whose numbers are collected are those that get a line in the log (some of them, where ranks are many), the
    first and the last."""

    def __init__(self, config: RunConfig, world: World, last_step: int) -> None:
        self.world = world
        self.interval = config.log.log_interval * -(-world.everyone.size // _RANKS_OF_A_SHORT_ROW)
        self.last_step = last_step
        # Torch's own sharding tells on a GPU nothing about waiting.
        self.knows_waits = world.device.type == "cpu" or config.parallel.zero_stage < 3

    def begin(self, step: int) -> None:
        """Before the step of this number, from 1, does anything."""
        if self._due(step):
            self.world.waits.begin()

    def report(self, step: int, seconds: float, unheard: int = 0) -> RankReport | None:
        """After it; every rank must ask. `unheard`: how many sentences this one has to say."""
        if not self._due(step):
            return None
        waited = self.world.waits.end()
        return collect(self.world, seconds, waited, self.knows_waits, unheard)

    def _due(self, step: int) -> bool:
        return step % self.interval == 0 or step in (1, self.last_step)


def collect(
    world: World, seconds: float, waited: Waited, knows_waits: bool = True, unheard: int = 0
) -> RankReport:
    """One small gather, in host memory: every process group can do that, and no GPU is waited for."""
    utilisation = gpu_utilisation(world.device)
    own = torch.tensor(
        [
            seconds,
            waited.collectives,
            waited.messages,
            memory_bytes(world.device),
            _UNKNOWN if utilisation is None else utilisation,
            unheard,
        ],
        dtype=torch.float64,
    )
    everyone = torch.empty(world.everyone.size, len(own), dtype=torch.float64)
    all_gather_into(everyone, own.unsqueeze(0), world.everyone)
    steps, collectives, messages, memory, percent, sentences = everyone.T.tolist()
    return RankReport(
        seconds=steps if knows_waits else [],
        collectives=collectives if knows_waits else [],
        messages=messages if knows_waits else [],
        memory_bytes=[int(bytes_) for bytes_ in memory],
        utilisation=[] if _UNKNOWN in percent else percent,
        unheard=[int(count) for count in sentences],
    )


# So many measured steps in a row, so many times as slow, and not for the noise of steps that take no time.
_STEPS, _TIMES, _LEAST_SECONDS = 3, 3.0, 0.01


class Stragglers:
    """Compares the time in which a rank was busy, without its waiting for others."""

    def __init__(self, grid: Grid) -> None:
        # Stages of a pipeline may differ by what they compute; where a stage has several ranks, those are compared.
        self._stages = [grid.coordinates(rank).pipeline for rank in range(grid.world_size)]
        self._slow_for = [0] * grid.world_size
        self._told: set[int] = set()

    def look(self, step: int, report: RankReport) -> list[str]:
        """A line for each rank that has become one; once, until it is as fast as the others again."""
        busy = [
            max(0.0, whole - c - m)
            for whole, c, m in zip(report.seconds, report.collectives, report.messages)
        ]
        if len(busy) < 2:
            return []
        lines = []
        for rank, own in enumerate(busy):
            like, whose, advice = self._like(rank, busy)
            usual = statistics.median(like)
            if own < max(_TIMES * usual, usual + _LEAST_SECONDS):
                self._slow_for[rank] = 0
                self._told.discard(rank)
                continue
            self._slow_for[rank] += 1
            if self._slow_for[rank] >= _STEPS and rank not in self._told:
                self._told.add(rank)
                lines.append(
                    f"straggler: rank {rank} was busy for {1000 * own:.0f} ms in step {step}, {whose} for {1000 * usual:.0f} ms, and so in "
                    f"the last {_STEPS} steps that were measured; {advice}"
                )
        return lines

    def _like(self, rank: int, busy: Sequence[float]) -> tuple[list[float], str, str]:
        """What to compare a rank with, how to call it, and where to look: alone in its stage, it may just have more to compute."""
        others = [other for other in range(len(busy)) if other != rank]
        same = [other for other in others if self._stages[other] == self._stages[rank]]
        look = "look at its GPU, its cores and the data it reads"
        if same:
            return [busy[other] for other in same], "ranks like it", look
        share = (
            "`pentatron layout` with the same settings shows whether its stage has more to compute; if not, "
        )
        return [busy[other] for other in others], "ranks of other stages", share + look

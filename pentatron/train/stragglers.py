"""A rank that is much slower than its like, step after step: it makes everyone wait, and nobody else would say so."""

import statistics
from collections.abc import Sequence

from pentatron.layout.ranks import Grid
from pentatron.monitor.ranks import RankReport

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

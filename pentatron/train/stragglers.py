"""Per-rank step statistics, and the detection of stragglers: ranks much slower than comparable ranks."""

import statistics
from collections.abc import Sequence

import torch

from pentatron.layout.ranks import Grid
from pentatron.monitor.memory import memory_bytes
from pentatron.monitor.report import RankReport, gpu_utilisation
from pentatron.parallel.collectives import WaitTimes, all_gather_into
from pentatron.parallel.world import World
from pentatron.settings.run_config import RunConfig

# Marks an unknown GPU utilisation in the gathered row.
_UNKNOWN = -1.0
# A row of metrics grows with the ranks: with more ranks than this, rows are collected less often.
_RANKS_OF_A_SHORT_ROW = 64
# A straggler is slow in this many measured steps in a row, by this factor, and by at least this many seconds,
# so that noise of very short steps does not count.
_STEPS, _TIMES, _LEAST_SECONDS = 3, 3.0, 0.01


class RankStatistics:
    """Collects the statistics of all ranks in steps that are logged (with many ranks, in some of them), and
    in the first and the last step.
    """

    def __init__(self, config: RunConfig, world: World, last_step: int) -> None:
        self.world = world
        self.interval = config.log.log_interval * -(-world.all_ranks.size // _RANKS_OF_A_SHORT_ROW)
        self.last_step = last_step
        # FSDP's collectives on a GPU are not timed.
        self.knows_waits = world.device.type == "cpu" or config.parallel.zero_stage < 3

    def begin(self, step: int) -> None:
        """Called at the start of a step. `step` counts from 1."""
        if self._due(step):
            self.world.waits.begin()

    def report(self, step: int, seconds: float, pending_messages: int = 0) -> RankReport | None:
        """Called after a step. `pending_messages`: those this rank still has to report. Collective."""
        if not self._due(step):
            return None
        waited = self.world.waits.end()
        return gather_statistics(self.world, seconds, waited, self.knows_waits, pending_messages)

    def _due(self, step: int) -> bool:
        return step % self.interval == 0 or step in (1, self.last_step)


def gather_statistics(
    world: World, seconds: float, waited: WaitTimes, knows_waits: bool = True, pending_messages: int = 0
) -> RankReport:
    """Gathers the statistics of all ranks in host memory, without a GPU synchronization. Collective."""
    used, utilisation = memory_bytes(world.device), gpu_utilisation(world.device)
    known = _UNKNOWN if utilisation is None else utilisation
    row = (seconds, waited.collectives, waited.messages, used, known, pending_messages)
    local = torch.tensor(row, dtype=torch.float64)
    gathered = torch.empty(world.all_ranks.size, len(local), dtype=torch.float64)
    all_gather_into(gathered, local.unsqueeze(0), world.all_ranks)
    steps, collectives, messages, memory, percent, pending = gathered.T.tolist()
    return RankReport(
        seconds=steps if knows_waits else [],
        collectives=collectives if knows_waits else [],
        messages=messages if knows_waits else [],
        memory_bytes=[int(bytes_) for bytes_ in memory],
        utilisation=[] if _UNKNOWN in percent else percent,
        pending_messages=[int(count) for count in pending],
    )


class StragglerDetector:
    """Compares the busy time of ranks: their step time without the time they wait for other ranks."""

    def __init__(self, grid: Grid) -> None:
        # Stages may have different amounts of work: ranks of the same stage are compared if there are
        # several.
        self._stages = [grid.coordinates(rank).pipeline for rank in range(grid.world_size)]
        self._slow_steps = [0] * grid.world_size
        self._reported: set[int] = set()

    def check(self, step: int, report: RankReport) -> list[str]:
        """Returns a line for each new straggler. A rank is reported again only after it has caught up."""
        rows = zip(report.seconds, report.collectives, report.messages)
        busy = [max(0.0, whole - c - m) for whole, c, m in rows]
        if len(busy) < 2:
            return []
        lines = []
        for rank, seconds in enumerate(busy):
            peers, described, advice = self._peers(rank, busy)
            usual = statistics.median(peers)
            if seconds < max(_TIMES * usual, usual + _LEAST_SECONDS):
                self._slow_steps[rank] = 0
                self._reported.discard(rank)
                continue
            self._slow_steps[rank] += 1
            if self._slow_steps[rank] >= _STEPS and rank not in self._reported:
                self._reported.add(rank)
                lines.append(
                    f"straggler: rank {rank} was busy for {1000 * seconds:.0f} ms in step {step}, {described} for {1000 * usual:.0f} ms, and so in "
                    f"the last {_STEPS} steps that were measured; {advice}"
                )
        return lines

    def _peers(self, rank: int, busy: Sequence[float]) -> tuple[list[float], str, str]:
        """Returns the times to compare a rank with, a description of these ranks, and advice.

        A rank that is alone in its stage may only have more to compute.
        """
        others = [other for other in range(len(busy)) if other != rank]
        same_stage = [other for other in others if self._stages[other] == self._stages[rank]]
        advice = "look at its GPU, its cores and the data it reads"
        if same_stage:
            return [busy[other] for other in same_stage], "ranks of the same stage", advice
        share = "`pentatron layout` with the same settings shows whether its stage has more to compute"
        return [busy[other] for other in others], "ranks of other stages", f"{share}; if not, {advice}"

"""Collects, now and then, what every rank measured of its own step."""

import torch

from pentatron.config.run import RunConfig
from pentatron.monitor.memory import memory_bytes
from pentatron.monitor.ranks import RankReport, gpu_utilisation
from pentatron.parallel.collectives import all_gather_into
from pentatron.parallel.waiting import Waited
from pentatron.parallel.world import World

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

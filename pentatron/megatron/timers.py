"""Named timers with Megatron's interface (`get_timers()`)."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pentatron.cli.output import say
from pentatron.errors import UserError
from pentatron.parallel.collectives import Group, gather_objects
from pentatron.parallel.timers import Timers as LoopTimers
from pentatron.parallel.timers import block_of


@dataclass(eq=False)
class Timer:
    """Accumulates the time between `start` and `stop`.

    An `idle` timer measures nothing and does not synchronize the device.
    """

    name: str
    idle: bool
    _timers: "Timers"
    _elapsed: float = 0.0
    _active: float = 0.0
    _started: float | None = None

    def start(self, barrier: bool = False) -> None:
        if self._started is not None:
            raise UserError(f"timer {self.name} was started twice; call stop() in between")
        self._started = self._now(barrier)

    def stop(self, barrier: bool = False) -> None:
        if self._started is None:
            raise UserError(f"timer {self.name} was stopped before it was started")
        passed = self._now(barrier) - self._started
        self._elapsed, self._active, self._started = self._elapsed + passed, self._active + passed, None
        # The only timer of the training loop that programs measure: it runs inside their forward step.
        if not self.idle and self._timers.loop is not None and self.name == "batch-generator":
            self._timers.loop.add(self.name, 2, passed)

    def reset(self) -> None:
        self._elapsed, self._started = 0.0, None

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Returns the seconds since the last reset; a running timer keeps running."""
        running = self._started is not None
        if running:
            self.stop(barrier)
        elapsed = self._elapsed
        if reset:
            self.reset()
        if running:
            self.start(barrier)
        return elapsed

    def active_time(self) -> float:
        """Returns the total seconds, regardless of resets."""
        return self._active

    def _now(self, barrier: bool) -> float:
        if barrier:
            gather_objects(None, self._timers.all_ranks)
        if self.idle:
            return 0.0
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()


class Timers:
    """Timers by name. Those above the level of the run (`--timing-log-level`) are idle.

    The program's `batch-generator` times are added to `loop`, the timers of the training loop.
    """

    def __init__(self, level: int, all_ranks: Group, say: Callable[[str], None]) -> None:
        self.level = level
        self.all_ranks = all_ranks
        self.say = say
        self._timers: dict[str, Timer] = {}
        self.loop: LoopTimers | None = None

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """Returns the timer of that name. The first call sets its level."""
        if name not in self._timers:
            self._timers[name] = Timer(name, (log_level or 0) > self.level, self)
        return self._timers[name]

    def log(
        self,
        names: Sequence[str] | None = None,
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Prints the minimum and maximum time over all ranks, in milliseconds. Every rank must call it.

        `rank` prints, rank 0 by default. `barrier` synchronizes the ranks first.
        """
        if rank is not None and not 0 <= rank < self.all_ranks.size:
            raise UserError(f"timers.log: there is no rank {rank} of {self.all_ranks.size} to print on")
        if barrier:
            gather_objects(None, self.all_ranks)
        local = {
            name: 1000 * timer.elapsed(reset) / normalizer
            for name, timer in self._timers.items()
            if not timer.idle and (names is None or name in names)
        }
        by_rank = gather_objects(local, self.all_ranks)
        if any(by_rank) and rank in (None, 0, self.all_ranks.rank):
            (say if rank else self.say)(block_of(by_rank, "minmax"))

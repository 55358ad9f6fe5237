"""Timers by name, as Megatron's programs use them."""

import time
from collections.abc import Callable, Sequence

import torch

from pentatron.cli.output import say
from pentatron.errors import UserError
from pentatron.parallel.collectives import Group, gather_objects
from pentatron.parallel.timers import Timers as LoopTimers
from pentatron.parallel.timers import block_of

# The one part of the loop's own times that programs measure.
BATCHES = "batch-generator"


class Timer:
    """Adds up the time between `start` and `stop`. With a barrier, ranks begin or end together.

    One that is `idle` measures nothing, so that a GPU need not be waited for.
    """

    def __init__(
        self, name: str, barrier: Callable[[], None], idle: bool, tell: Callable[[float], None]
    ) -> None:
        self.name = name
        self._tell = tell
        self.idle = idle
        self._wait_for_all = barrier
        self._elapsed = 0.0
        self._active = 0.0
        self._started: float | None = None

    def start(self, barrier: bool = False) -> None:
        if self._started is not None:
            raise UserError(f"timer {self.name} was started twice; call stop() in between")
        self._started = self._now(barrier)

    def stop(self, barrier: bool = False) -> None:
        if self._started is None:
            raise UserError(f"timer {self.name} was stopped before it was started")
        passed = self._now(barrier) - self._started
        self._elapsed, self._active, self._started = self._elapsed + passed, self._active + passed, None
        if not self.idle:
            self._tell(passed)

    def reset(self) -> None:
        self._elapsed, self._started = 0.0, None

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Seconds since the last reset; a timer that runs goes on."""
        running = self._started is not None
        if running:
            self.stop(barrier)
        found = self._elapsed
        if reset:
            self.reset()
        if running:
            self.start(barrier)
        return found

    def active_time(self) -> float:
        """Seconds in all, whatever was reset."""
        return self._active

    def _now(self, barrier: bool) -> float:
        if barrier:
            self._wait_for_all()
        if self.idle:
            return 0.0
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()


class Timers:
    """Those above the level of the run (`--timing-log-level`) are idle."""

    def __init__(self, level: int, everyone: Group, say: Callable[[str], None]) -> None:
        self.level = level
        self.everyone = everyone
        self.say = say
        self._timers: dict[str, Timer] = {}
        self._loop: LoopTimers | None = None

    def join(self, loop: LoopTimers) -> None:
        """From now on the loop's own timers show what a forward step times of theirs."""
        self._loop = loop

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """The timer of that name; its level is that of the first call."""
        if name not in self._timers:
            idle = (log_level or 0) > self.level
            self._timers[name] = Timer(name, self._meet, idle, lambda seconds: self._add(name, seconds))
        return self._timers[name]

    def _meet(self) -> None:
        gather_objects(None, self.everyone)

    def _add(self, name: str, seconds: float) -> None:
        if self._loop is not None and name == BATCHES:
            self._loop.add(name, 2, seconds)

    def log(
        self,
        names: Sequence[str] | None = None,
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Prints the smallest and the largest time of any rank, in milliseconds. Every rank must ask.

        `rank` prints, the first one if nobody is named. `barrier`: the ranks meet first, so that a timer that runs has waited for all.
        """
        if rank is not None and not 0 <= rank < self.everyone.size:
            raise UserError(f"timers.log: there is no rank {rank} of {self.everyone.size} to print on")
        if barrier:
            self._meet()
        own = {
            name: 1000 * timer.elapsed(reset) / normalizer
            for name, timer in self._timers.items()
            if not timer.idle and (names is None or name in names)
        }
        everywhere = gather_objects(own, self.everyone)
        if not any(everywhere):
            return
        text = block_of(everywhere, "minmax")
        if not rank:
            self.say(text)
        elif rank == self.everyone.rank:
            say(text)

"""Timers by name, as Megatron's programs use them."""

import time
from collections.abc import Callable, Sequence

import torch

from pentatron.config.errors import UserError
from pentatron.parallel.collectives import Group, gather_objects
from pentatron.parallel.timers import block_of


class Timer:
    """Adds up the time between `start` and `stop`. With a barrier, ranks begin or end together.

    One that is `idle` measures nothing, so that a GPU need not be waited for.
    """

    def __init__(self, name: str, barrier: Callable[[], None], idle: bool) -> None:
        self.name = name
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

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """The timer of that name; its level is that of the first call."""
        if name not in self._timers:
            idle = (log_level or 0) > self.level
            self._timers[name] = Timer(name, lambda: void(gather_objects(None, self.everyone)), idle)
        return self._timers[name]

    def log(
        self,
        names: Sequence[str] | None = None,
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Prints the smallest and the largest time of any rank, in milliseconds. Every rank must ask."""
        own = {
            name: 1000 * timer.elapsed(reset) / normalizer
            for name, timer in self._timers.items()
            if not timer.idle and (names is None or name in names)
        }
        everywhere = gather_objects(own, self.everyone)
        if any(everywhere):
            self.say(block_of(everywhere, "minmax"))


def void(_: object) -> None:
    """For a barrier: what the ranks said does not matter."""

"""Timers by name, as Megatron's programs use them."""

import time
from collections.abc import Callable, Sequence

import torch

from pentatron.config.errors import UserError
from pentatron.parallel.collectives import Group, gather_objects


class Timer:
    """Adds up the time between `start` and `stop`. With a barrier, ranks begin or end together."""

    def __init__(self, name: str, barrier: Callable[[], None]) -> None:
        self.name = name
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
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()


class Timers:
    def __init__(self, everyone: Group, say: Callable[[str], None]) -> None:
        self.everyone = everyone
        self.say = say
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """The timer of that name. Every one measures; `log_level` is for those who choose what to print."""
        if name not in self._timers:
            self._timers[name] = Timer(name, lambda: void(gather_objects(None, self.everyone)))
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
        wanted = list(self._timers) if names is None else [n for n in names if n in self._timers]
        own = {name: 1000 * self._timers[name].elapsed(reset) / normalizer for name in wanted}
        everywhere = gather_objects(own, self.everyone)
        lines = []
        for name in wanted:
            times = [times[name] for times in everywhere if name in times]
            lines.append(f"    {name + ' ':.<48}: ({min(times):.2f}, {max(times):.2f})")
        if lines:
            self.say("\n".join(["(min, max) time across ranks (ms):", *lines]))


def void(_: object) -> None:
    """For a barrier: what the ranks said does not matter."""

"""Timers for the parts of a step, with Megatron's names and levels.

A timer above the chosen level costs one call. On a GPU a running timer synchronizes the device at both ends,
so that it measures exactly its part; that is the price of the higher levels.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from pentatron.parallel.collectives import Group, gather_objects

_NAME_WIDTH = 48
# The order in which the parts of a step are shown; other timers follow, sorted by name.
_ORDER = (
    "forward-backward",
    "forward-compute",
    "backward-compute",
    "batch-generator",
    "forward-recv",
    "forward-send",
    "backward-recv",
    "backward-send",
    "all-grads-sync",
    "optimizer",
)
_INNERMOST = 2


class Timers:
    def __init__(self, level: int = 0, option: str = "minmax", device: torch.device | None = None) -> None:
        self.level, self.option = level, option
        self._on_gpu = device is not None and device.type == "cuda"
        self._disabled: AbstractContextManager[None] = nullcontext()
        self._timers: dict[str, _Timer] = {}
        self._running: list[_Timer] = []

    def __call__(self, name: str, level: int) -> AbstractContextManager[None]:
        """Returns a context manager that times its body.

        Nested timers of the innermost level are subtracted.
        """
        if level > self.level:
            return self._disabled
        if name not in self._timers:
            self._timers[name] = _Timer(self, level)
        return self._timers[name]

    def add(self, name: str, level: int, seconds: float) -> None:
        """Adds time measured elsewhere within the running timer, from which it is subtracted."""
        if level > self.level:
            return
        self._timers.setdefault(name, _Timer(self, level)).seconds += seconds
        if self._running and level == _INNERMOST == self._running[-1].level:
            self._running[-1].seconds -= seconds

    def now(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def block(self, group: Group, steps: int = 1, only: str | None = None) -> str | None:
        """Formats the times of all ranks since the last call, each divided by `steps`; collective.

        Returns None if nothing was timed; timers of level 0 run on all ranks or on none. With `only`, just
        this timer is shown and reset.
        """
        names = [name for name in self._timers if only in (None, name)]
        times = {name: 1000 * self._timers.pop(name).seconds / steps for name in names}
        return block_of(gather_objects(times, group), self.option) if times else None


def block_of(everyone: Sequence[Mapping[str, float]], option: str) -> str:
    """Formats the milliseconds of each timer on each rank, as Megatron does."""
    timed = {name for times in everyone for name in times}
    names = [name for name in _ORDER if name in timed] + sorted(timed - set(_ORDER))
    title = {"max": "max time", "minmax": "(min, max) time", "all": "times"}[option]
    lines = [f"{title} across ranks (ms):"]
    for name in names:
        ranks = {rank: times[name] for rank, times in enumerate(everyone) if name in times}
        smallest, largest = min(ranks.values()), max(ranks.values())
        if option == "all":
            lines += [f"  {name}:", *(f"     rank {rank:2d}: {value:.2f}" for rank, value in ranks.items())]
        else:
            value = f"({smallest:.2f}, {largest:.2f})" if option == "minmax" else f"{largest:.2f}"
            lines.append(f"    {f'{name} '.ljust(_NAME_WIDTH, '.')}: {value}")
    return "\n".join(lines)


class _Timer(AbstractContextManager[None]):
    def __init__(self, timers: Timers, level: int) -> None:
        self.timers, self.level = timers, level
        self.seconds = 0.0
        self._started = 0.0

    def __enter__(self) -> None:
        self.timers._running.append(self)
        self._started = self.timers.now()

    def __exit__(self, *error: object) -> None:
        elapsed = self.timers.now() - self._started
        self.seconds += elapsed
        running = self.timers._running
        running.pop()
        if running and self.level == _INNERMOST == running[-1].level:
            running[-1].seconds -= elapsed

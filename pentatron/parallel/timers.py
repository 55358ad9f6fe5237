"""Timers for the parts of a step, with Megatron's names and levels.

A timer above the chosen level costs one call. On a GPU a running timer synchronizes the device at both ends,
so that it measures exactly its part; that is the price of the higher levels.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from pentatron.parallel.collectives import Group, gather_objects

_NAME_WIDTH = 48
# The order in which the parts of a step are shown; other timers follow, sorted by name.
_ORDER = (
    "forward-backward forward-compute backward-compute batch-generator forward-recv forward-send "
    "backward-recv backward-send all-grads-sync optimizer"
).split()
_INNERMOST = 2


class Timers:
    def __init__(self, level: int = 0, option: str = "minmax", device: torch.device | None = None) -> None:
        self.level, self.option = level, option
        self._on_gpu = device is not None and device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        # The running timers with their levels, the innermost last.
        self._running: list[tuple[str, int]] = []

    def __call__(self, name: str, level: int) -> AbstractContextManager[None]:
        """Returns a context manager that times its body.

        Nested timers of the innermost level are subtracted.
        """
        return nullcontext() if level > self.level else self._measuring(name, level)

    @contextmanager
    def _measuring(self, name: str, level: int) -> Iterator[None]:
        self._running.append((name, level))
        started = self.now()
        try:
            yield
        finally:
            elapsed = self.now() - started
            self._running.pop()
            self.add(name, level, elapsed)

    def add(self, name: str, level: int, seconds: float) -> None:
        """Adds time measured elsewhere within the running timer, from which it is subtracted."""
        if level > self.level:
            return
        self._seconds[name] += seconds
        if self._running and level == _INNERMOST == self._running[-1][1]:
            self._seconds[self._running[-1][0]] -= seconds

    def now(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def block(self, group: Group, steps: int = 1, only: str | None = None) -> str | None:
        """Formats the times of all ranks since the last call, each divided by `steps`; collective.

        Returns None if nothing was timed; timers of level 0 run on all ranks or on none. With `only`, just
        this timer is shown and reset.
        """
        names = [name for name in self._seconds if only in (None, name)]
        times = {name: 1000 * self._seconds.pop(name) / steps for name in names}
        return block_of(gather_objects(times, group), self.option) if times else None


def block_of(times_by_rank: Sequence[Mapping[str, float]], option: str) -> str:
    """Formats the milliseconds of each timer on each rank, as Megatron does."""
    timed = {name for times in times_by_rank for name in times}
    names = [name for name in _ORDER if name in timed] + sorted(timed - set(_ORDER))
    title = {"max": "max time", "minmax": "(min, max) time", "all": "times"}[option]
    lines = [f"{title} across ranks (ms):"]
    for name in names:
        ranks = {rank: times[name] for rank, times in enumerate(times_by_rank) if name in times}
        smallest, largest = min(ranks.values()), max(ranks.values())
        if option == "all":
            lines += [f"  {name}:", *(f"     rank {rank:2d}: {value:.2f}" for rank, value in ranks.items())]
        else:
            value = f"({smallest:.2f}, {largest:.2f})" if option == "minmax" else f"{largest:.2f}"
            lines.append(f"    {f'{name} '.ljust(_NAME_WIDTH, '.')}: {value}")
    return "\n".join(lines)

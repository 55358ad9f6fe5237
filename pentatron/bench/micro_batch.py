"""The largest micro-batch that fits: which sizes are tried, and in what order."""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pentatron.bench.candidates import Candidate
from pentatron.text import in_gib

# No device holds more, whatever the model.
LARGEST = 65536


@dataclass(frozen=True)
class MicroBatch(Candidate):
    """A layout as it was asked for, with micro-batches of one size. `global_batch`: of a step, where it follows from that size."""

    size: int = 1
    global_batch: int | None = None

    @property
    def name(self) -> str:
        return f"micro-batch {self.size}"

    @property
    def words(self) -> list[str]:
        """Beside what was asked for."""
        step = [] if self.global_batch is None else ["--global-batch-size", str(self.global_batch)]
        return ["--micro-batch-size", str(self.size), *step]


@dataclass(frozen=True)
class Trial:
    """What became of one size: `memory` is that of the fullest rank, as far as it is known, also of what did not fit."""

    size: int
    fits: bool
    memory: float | None = None
    rate: float | None = None
    reason: str = ""


def find_largest(
    sizes: Sequence[int], first: int, limit: float | None, attempt: Callable[[int], Trial]
) -> list[Trial]:
    """Tries sizes until the largest that fits is known, and returns all trials in their order.

    Begins with the one next to `first`, which may be a good guess: from there on it goes up or down, in steps that begin small and double, until
    one fits and one does not. Memory grows evenly with the size, so two that fit tell where `limit` is reached, which is tried next; if that was
    wrong, the interval is halved.
    """
    # Indices: `low` fits, `high` does not; between them nothing is known.
    low, high = -1, len(sizes)
    trials: list[Trial] = []
    at = max(0, min(len(sizes) - 1, bisect.bisect_right(sizes, first) - 1))
    misled, stride = False, max(1, sizes[at] // 8)
    while low + 1 < high:
        trial = attempt(sizes[at])
        trials.append(trial)
        if trial.fits:
            low = at
        else:
            high = at
        if low + 1 >= high:
            break
        guess = None if misled or limit is None else _where_full(trials, limit)
        misled = False
        if guess is not None and (low < 0 or guess > sizes[low]):
            at = bisect.bisect_right(sizes, guess) - 1
            misled = True
        elif high == len(sizes) or low < 0:
            at = bisect.bisect_left(sizes, sizes[low] + stride if low >= 0 else sizes[high] - stride)
            stride *= 2
        else:
            at = (low + high) // 2
        at = max(low + 1, min(high - 1, at))
    return trials


def _where_full(trials: Sequence[Trial], limit: float) -> int | None:
    """The size at which the line through the two largest that fit reaches the limit."""
    known = {trial.size: trial.memory for trial in trials if trial.fits and trial.memory}
    if len(known) < 2:
        return None
    smaller, larger = sorted(known)[-2:]
    slope = (known[larger] - known[smaller]) / (larger - smaller)
    return int(smaller + (limit - known[smaller]) / slope) if slope > 0 else None


def largest(trials: Sequence[Trial]) -> Trial | None:
    fitting = [trial for trial in trials if trial.fits]
    return max(fitting, key=lambda trial: trial.size) if fitting else None


def lines(trials: Sequence[Trial]) -> list[str]:
    """A table, by size."""
    shown = [f"{'micro-batch':>11}  {'memory':>9}  {'tokens/s':>9}"]
    for trial in sorted(trials, key=lambda trial: trial.size):
        memory = "-" if trial.memory is None else f"{in_gib(trial.memory, '.2f')} GiB"
        rate = "-" if trial.rate is None else f"{trial.rate:,.0f}"
        shown.append(f"{trial.size:>11}  {memory:>9}  {rate:>9}  {trial.reason}".rstrip())
    return shown

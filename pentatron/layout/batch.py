"""Batch sizes: micro-batch × data-parallel ranks × accumulation steps, and their schedule during a run."""

import bisect
import contextlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from pentatron.text import divisors, join_choices


def accumulation_steps(global_batch: int, micro_batch: int, data_parallel: int) -> int:
    """Returns the micro-batches each data-parallel rank runs in one step."""
    if problem := batch_size_problem(global_batch, micro_batch, data_parallel):
        raise ValueError(problem)
    return global_batch // (micro_batch * data_parallel)


def batch_size_problem(global_batch: int, micro_batch: int, data_parallel: int) -> str | None:
    """Returns why these sizes do not fit together, or None."""
    chunk = micro_batch * data_parallel
    if global_batch % chunk == 0:
        return None
    product = f"micro batch size ({micro_batch}) times data parallel size ({data_parallel}) = {chunk}"
    message = f"global batch size ({global_batch}) is not divisible by {product}"
    if global_batch % data_parallel == 0:
        return f"{message}; use --micro-batch-size {join_choices(divisors(global_batch // data_parallel))}"
    above = -(-global_batch // chunk) * chunk
    return f"{message}; use --global-batch-size {above} or another number of processes"


_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class BatchSizePhase:
    """Consecutive steps with one batch size."""

    first_step: int
    first_sample: int
    size: int


@dataclass(frozen=True)
class BatchSizeSchedule:
    """Batch size schedule: `changes` maps thresholds of consumed samples to batch sizes; the first threshold
    is 0.

    The size depends only on the samples consumed before the step, so a resumed run needs no step count.
    """

    changes: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        thresholds = [threshold for threshold, _ in self.changes]
        assert thresholds[0] == 0 and all(a < b for a, b in itertools.pairwise(thresholds))
        assert all(size > 0 for _, size in self.changes)

    @property
    def is_constant(self) -> bool:
        return len(self.changes) == 1

    def size_at(self, consumed_samples: int) -> int:
        """Returns the batch size of the step that begins after `consumed_samples`."""
        return self.changes[self._entry_at(consumed_samples)][1]

    def _entry_at(self, consumed_samples: int) -> int:
        return bisect.bisect_right(self.changes, consumed_samples, key=lambda change: change[0]) - 1

    @cached_property
    def phases(self) -> tuple[BatchSizePhase, ...]:
        """The phases of a run from sample 0; the last one is unbounded.

        Omits sizes that a large step skips.
        """
        return tuple(self._phases_from(0))

    def _phases_from(self, consumed_samples: int) -> list[BatchSizePhase]:
        phases: list[BatchSizePhase] = []
        step, sample, entry = 0, consumed_samples, self._entry_at(consumed_samples)
        while True:
            size = self.changes[entry][1]
            phases.append(BatchSizePhase(step, sample, size))
            if entry + 1 == len(self.changes):
                return phases
            steps = -(-(self.changes[entry + 1][0] - sample) // size)
            step, sample = step + steps, sample + steps * size
            entry = self._entry_at(sample)

    def samples_after(self, steps: int) -> int:
        """Returns the samples that a run from the start has consumed after `steps`."""
        return self.advance(0, steps)

    def advance(self, consumed_samples: int, steps: int) -> int:
        """Returns the samples consumed `steps` steps after `consumed_samples`."""
        phases = self.phases if consumed_samples == 0 else self._phases_from(consumed_samples)
        phase = phases[bisect.bisect_right(phases, steps, key=lambda s: s.first_step) - 1]
        return phase.first_sample + (steps - phase.first_step) * phase.size

    def steps_within(self, samples: int) -> int:
        """Returns how many whole steps `samples` are enough for."""
        number = bisect.bisect_right(self.phases, samples, key=lambda s: s.first_sample) - 1
        phase = self.phases[number]
        return phase.first_step + (samples - phase.first_sample) // phase.size

    def sizes(self, steps: int | None = None, consumed_samples: int = 0) -> list[BatchSizePhase]:
        """Returns the phases of the next `steps` (default: of all) after `consumed_samples`."""
        phases = self._phases_from(consumed_samples)
        return [s for s in phases if steps is None or s.first_step < max(1, steps)]

    @property
    def common_divisor(self) -> int:
        """Greatest common divisor of all batch sizes."""
        return math.gcd(*(size for _, size in self.changes))


def constant(size: int) -> BatchSizeSchedule:
    return BatchSizeSchedule(((0, size),))


@lru_cache(maxsize=8)
def linear_ramp(start: int, increment: int, samples: int, full: int) -> BatchSizeSchedule:
    """Returns Megatron's linear ramp-up: from `start` to `full` in equal increments over `samples`.

    Raises `ValueError` with a message for the user if the sizes do not fit.
    """
    if start > full:
        problem = f"the batch size ramp cannot start at {start}, above the global batch size {full}"
        raise ValueError(f"{problem}; lower START or raise --global-batch-size")
    increments, rest = divmod(full - start, increment)
    if rest:
        interval = f"global batch size interval ({full} - {start} = {full - start})"
        problem = f"expected {interval} to be divisible by global batch size increment ({increment})"
        sizes = f"{full - rest} or {full - rest + increment}"
        raise ValueError(f"{problem}; use --global-batch-size {sizes}, or another increment")
    if increments == 0:
        return constant(full)
    each = samples / increments
    changes = [(0, start)]
    for number in range(1, increments + 1):
        # The size is `full` after all samples, even if rounding puts the last threshold one later.
        threshold = min(_first_with_quotient(number, each), samples + 1)
        if threshold == changes[-1][0]:
            changes.pop()
        changes.append((threshold, start + number * increment))
    return BatchSizeSchedule(tuple(changes))


def _first_with_quotient(number: int, each: float) -> int:
    """Returns the smallest integer whose floating-point quotient by `each` is at least `number`."""
    count = math.ceil(number * each)
    while count > 0 and (count - 1) / each >= number:
        count -= 1
    while count / each < number:
        count += 1
    return count


def parse_batch_steps(entries: Sequence[str], sequence: int) -> BatchSizeSchedule:
    """Parses `THRESHOLD:SIZE …` with thresholds in tokens, for sequences of length `sequence`.

    Raises `ValueError` with a message for the user.
    """
    changes: list[tuple[int, int]] = []
    for entry in " ".join(entries).replace(",", " ").split():
        threshold, colon, size = entry.partition(":")
        if not colon:
            raise ValueError(f"'{entry}' must look like THRESHOLD:SIZE, for example 250B:1536")
        tokens, samples = _number(threshold, entry), _number(size, entry)
        if samples < 1:
            raise ValueError(f"'{entry}': a batch needs 1 sample or more")
        changes.append((tokens // sequence, samples))
    if not changes or changes[0][0] != 0:
        first = "the first threshold must be 0, so that the first steps have a size"
        raise ValueError(f"{first}; begin with 0:SIZE")
    for (before, _), (after, _) in itertools.pairwise(changes):
        if after <= before:
            first, second = (f"{n * sequence} tokens ({n} samples)" for n in (before, after))
            problem = f"thresholds must grow, but {first} are followed by {second}"
            raise ValueError(f"{problem}; put them in order, further apart than a sequence")
    return BatchSizeSchedule(tuple(changes))


def _number(text: str, entry: str) -> int:
    """Parses a number with an optional suffix: `250B` → 250 000 000 000, `1.5K` → 1500."""
    unit = _SUFFIXES.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    number = -1.0
    with contextlib.suppress(ValueError):
        number = float(digits) * unit
    if not 0 <= number < math.inf:
        numbers = "whole numbers or with K, M, B or T behind them (250B:1536)"
        raise ValueError(f"'{entry}' must look like THRESHOLD:SIZE, {numbers}")
    return int(digits) * unit if digits.isdecimal() else int(number)

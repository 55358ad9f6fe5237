"""The layouts of a number of processes: every way to divide them among the axes."""

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pentatron.errors import UserError
from pentatron.text import divisors, in_gib

# What --variants can name, beside the axes.
VARIANTS = ("zero", "sp", "schedules")
_ZERO_STAGES = (0, 1, 2, 3)
_SCHEDULES = ("1f1b", "gpipe", "zero-bubble", "zbv", "dualpipev")


@dataclass(frozen=True)
class Candidate:
    """Sizes of the axes. What is None is left to the settings that hold for all layouts."""

    data: int
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    zero: int | None = None
    sequence: bool | None = None
    schedule: str | None = None

    @property
    def name(self) -> str:
        sizes = (("dp", self.data), ("tp", self.tensor), ("cp", self.context), ("pp", self.pipeline))
        parts = [f"{axis}{size}" for axis, size in (*sizes, ("ep", self.expert)) if size > 1]
        parts += ["sp"] if self.sequence else []
        parts += [f"zero{self.zero}"] if self.zero else []
        parts += [self.schedule] if self.schedule not in (None, "1f1b") else []
        return " ".join(parts) or "one process"

    @property
    def words(self) -> list[str]:
        """The layout as flags of a training command."""
        found = []
        for flag, size in (
            ("--tensor-model-parallel-size", self.tensor),
            ("--context-parallel-size", self.context),
            ("--pipeline-model-parallel-size", self.pipeline),
            ("--expert-model-parallel-size", self.expert),
        ):
            found += [flag, str(size)] if size > 1 else []
        found += ["--zero-stage", str(self.zero)] if self.zero is not None else []
        if self.sequence is not None:
            found.append("--sequence-parallel" if self.sequence else "--no-sequence-parallel")
        return found + (["--pipeline-schedule", self.schedule] if self.schedule is not None else [])


def candidates(
    processes: int, experts: int | None, fixed: Mapping[str, int], variants: Sequence[str]
) -> list[Candidate]:
    """Every layout of the processes, data parallelism first. `fixed` holds axes of which the user named the size."""
    unknown = [name for name in variants if name not in VARIANTS]
    if unknown:
        raise UserError(f"--variants {unknown[0]} is unknown; there are {', '.join(VARIANTS)}")
    found: list[Candidate] = []
    sizes = divisors(processes)
    for pipeline, context, tensor in itertools.product(sizes, repeat=3):
        data, rest = divmod(processes, pipeline * context * tensor)
        if rest or data == 0:
            continue
        ways = divisors(data * context * tensor) if experts else [1]
        for expert in ways:
            plain = Candidate(data, tensor, context, pipeline, expert)
            if all(getattr(plain, axis) == size for axis, size in fixed.items()):
                found += _with_variants(plain, variants)
    return found


def _with_variants(plain: Candidate, variants: Sequence[str]) -> Iterator[Candidate]:
    """The layout as it is, and in every variant that is not the same thing there."""
    # Who shares nothing (ZeRO) or has nobody to share it with computes the same.
    stages = _ZERO_STAGES if "zero" in variants and plain.data * plain.context > 1 else (None,)
    splits = (False, True) if "sp" in variants and plain.tensor > 1 else (None,)
    orders = _SCHEDULES if "schedules" in variants and plain.pipeline > 1 else (None,)
    for zero, sequence, schedule in itertools.product(stages, splits, orders):
        yield replace(plain, zero=zero, sequence=sequence, schedule=schedule)


# A model that every layout of so many processes can hold, for who names none.


def default_sizes(processes: int, on_gpu: bool) -> dict[str, Any]:
    """Heads and layers that divide by the processes, and a batch that fills the longest pipeline.

    Small on a CPU, where a sweep should take minutes; about a billion parameters on a GPU.
    """
    heads = _multiple(processes, 16 if on_gpu else 8)
    # Context parallelism cuts a sequence into twice as many parts as there are ranks.
    return {
        "num_layers": _multiple(processes, 16 if on_gpu else 4),
        "num_attention_heads": heads,
        "hidden_size": heads * (128 if on_gpu else 16),
        "seq_length": _multiple(2 * processes, 2048 if on_gpu else 32),
        "vocab_size": 32768 if on_gpu else 1024,
        "micro_batch_size": 1 if on_gpu else 2,
        "global_batch_size": 2 * processes,
        "bf16": on_gpu,
    }


def _multiple(of: int, at_least: int) -> int:
    return -(-at_least // of) * of


# The largest micro-batch that fits: which sizes are tried, and in what order.


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

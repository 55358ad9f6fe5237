"""Candidates of a benchmark: all layouts of a number of processes, and micro-batch sizes to try."""

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pentatron.errors import UserError
from pentatron.layout.schedules import SCHEDULES, StagesPerRank
from pentatron.settings.declaration import flag_of
from pentatron.text import divisors, in_gib

# The settings of the sizes of a layout.
AXES = {
    "tensor": "tensor_model_parallel_size",
    "context": "context_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "expert": "expert_model_parallel_size",
    "data": "data_parallel_size",
}
# Choices of --variants.
VARIANTS = ("zero", "sp", "schedules")
_ZERO_STAGES = (0, 1, 2, 3)
# Those that need no setting for the number of stages on a rank.
_SCHEDULES = tuple(kind for kind in SCHEDULES if SCHEDULES[kind].stages is not StagesPerRank.SEVERAL)
# Upper limit of the search for a micro-batch size.
MAX_MICRO_BATCH = 65536


@dataclass(frozen=True)
class Candidate:
    """A parallel layout. A value of None is taken from the settings that all layouts share."""

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
        # The size of data parallelism follows from the others.
        sizes = {name: getattr(self, axis) for axis, name in AXES.items() if axis != "data"}
        flags = [word for name, size in sizes.items() if size > 1 for word in (flag_of(name), str(size))]
        flags += ["--zero-stage", str(self.zero)] if self.zero is not None else []
        if self.sequence is not None:
            flags.append("--sequence-parallel" if self.sequence else "--no-sequence-parallel")
        return flags + (["--pipeline-schedule", self.schedule] if self.schedule is not None else [])


def all_layouts(
    processes: int, experts: int | None, fixed: Mapping[str, int], variants: Sequence[str]
) -> list[Candidate]:
    """Returns every layout of the processes, pure data parallelism first.

    `fixed`: sizes of axes that the user has given.
    """
    unknown = [name for name in variants if name not in VARIANTS]
    if unknown:
        raise UserError(f"--variants {unknown[0]} is unknown; use one of {', '.join(VARIANTS)}")
    layouts: list[Candidate] = []
    for pipeline, context, tensor in itertools.product(divisors(processes), repeat=3):
        data, rest = divmod(processes, pipeline * context * tensor)
        if rest or data == 0:
            continue
        # The expert groups divide the ranks of one pipeline stage.
        for expert in divisors(data * context * tensor) if experts else [1]:
            plain = Candidate(data, tensor, context, pipeline, expert)
            if all(getattr(plain, axis) == size for axis, size in fixed.items()):
                layouts += _with_variants(plain, variants)
    return layouts


def _with_variants(plain: Candidate, variants: Sequence[str]) -> Iterator[Candidate]:
    """Yields the variants of a layout.

    A variant without effect there is left out, such as ZeRO on one data-parallel rank.
    """
    stages = _ZERO_STAGES if "zero" in variants and plain.data * plain.context > 1 else (None,)
    splits = (False, True) if "sp" in variants and plain.tensor > 1 else (None,)
    orders = _SCHEDULES if "schedules" in variants and plain.pipeline > 1 else (None,)
    for zero, sequence, schedule in itertools.product(stages, splits, orders):
        yield replace(plain, zero=zero, sequence=sequence, schedule=schedule)


def default_sizes(processes: int, on_gpu: bool) -> dict[str, Any]:
    """Returns a model that every layout can split, and a batch that fills the longest pipeline.

    The model is small on a CPU, where a sweep should take minutes, and about a billion parameters on a GPU.
    """

    def multiple(of: int, at_least: int) -> int:
        return -(-at_least // of) * of

    heads = multiple(processes, 16 if on_gpu else 8)
    # The sequence length is a multiple of 2 * ranks, because context parallelism gives each rank two chunks.
    return {
        "num_layers": multiple(processes, 16 if on_gpu else 4),
        "num_attention_heads": heads,
        "hidden_size": heads * (128 if on_gpu else 16),
        "seq_length": multiple(2 * processes, 2048 if on_gpu else 32),
        "vocab_size": 32768 if on_gpu else 1024,
        "micro_batch_size": 1 if on_gpu else 2,
        "global_batch_size": 2 * processes,
        "bf16": on_gpu,
    }


@dataclass(frozen=True)
class MicroBatch(Candidate):
    """The given layout with one micro-batch size.

    `global_batch`: the global batch size if it follows from `size`.
    """

    size: int = 1
    global_batch: int | None = None

    @property
    def name(self) -> str:
        return f"micro-batch {self.size}"

    @property
    def words(self) -> list[str]:
        """The flags to add to the given command."""
        step = [] if self.global_batch is None else ["--global-batch-size", str(self.global_batch)]
        return ["--micro-batch-size", str(self.size), *step]


@dataclass(frozen=True)
class Trial:
    """The result of one micro-batch size.

    `memory`: peak bytes of the fullest rank, if known; also set if it did not fit.
    """

    size: int
    fits: bool
    memory: float | None = None
    rate: float | None = None
    reason: str = ""


def find_largest(
    sizes: Sequence[int], first: int, limit: float | None, attempt: Callable[[int], Trial]
) -> list[Trial]:
    """Searches for the largest size that fits, and returns all trials in their order.

    Starts next to the guess `first` and moves up or down in steps that double, until one size fits and
    another does not. Memory is linear in the size, so the line through two sizes that fit predicts where
    `limit` is reached, which is tried next. After a wrong prediction the interval is bisected.
    """
    # Indices: `low` fits and `high` does not; sizes between them are untested.
    low, high = -1, len(sizes)
    trials: list[Trial] = []
    at = max(0, min(len(sizes) - 1, bisect.bisect_right(sizes, first) - 1))
    predicted, stride = False, max(1, sizes[at] // 8)
    while low + 1 < high:
        trial = attempt(sizes[at])
        trials.append(trial)
        low, high = (at, high) if trial.fits else (low, at)
        if low + 1 >= high:
            break
        # A prediction is tried once: after a wrong one, the next size comes from the search.
        guess = None if predicted or limit is None else _predicted_size(trials, limit)
        predicted = False
        if guess is not None and (low < 0 or guess > sizes[low]):
            at = bisect.bisect_right(sizes, guess) - 1
            predicted = True
        elif high == len(sizes) or low < 0:
            at = bisect.bisect_left(sizes, sizes[low] + stride if low >= 0 else sizes[high] - stride)
            stride *= 2
        else:
            at = (low + high) // 2
        at = max(low + 1, min(high - 1, at))
    return trials


def _predicted_size(trials: Sequence[Trial], limit: float) -> int | None:
    """Returns the size at which memory reaches the limit, extrapolated from the two largest that fit."""
    known = {trial.size: trial.memory for trial in trials if trial.fits and trial.memory}
    if len(known) < 2:
        return None
    smaller, larger = sorted(known)[-2:]
    slope = (known[larger] - known[smaller]) / (larger - smaller)
    return int(smaller + (limit - known[smaller]) / slope) if slope > 0 else None


def largest_fitting(trials: Sequence[Trial]) -> Trial | None:
    """Returns the trial of the largest size that fits."""
    return max((trial for trial in trials if trial.fits), key=lambda trial: trial.size, default=None)


def trial_table(trials: Sequence[Trial]) -> list[str]:
    """Formats the trials as a table, by size."""
    rows = [f"{'micro-batch':>11}  {'memory':>9}  {'tokens/s':>9}"]
    for trial in sorted(trials, key=lambda trial: trial.size):
        memory = "-" if trial.memory is None else f"{in_gib(trial.memory, '.2f')} GiB"
        rate = "-" if trial.rate is None else f"{trial.rate:,.0f}"
        rows.append(f"{trial.size:>11}  {memory:>9}  {rate:>9}  {trial.reason}".rstrip())
    return rows

"""The layouts of a number of processes: every way to divide them among the axes."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pentatron.errors import UserError
from pentatron.layout.divisors import divisors

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

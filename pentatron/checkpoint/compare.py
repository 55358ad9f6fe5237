"""Compares the tensors of two checkpoints block by block.

The checkpoints may be of different layouts. At most one block of each side is in memory.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pentatron.checkpoint.tensor_file import ReadRectangle, TensorSpec, blocks
from pentatron.parallel.sharding import Shape

# Not part of the state: paths of data files (the fingerprint identifies the data) and the software
# environment.
NO_STATE = frozenset({"data_files", "environment"})
# Integer dtypes by element size, to compare the bits of values.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class ComparedTensors:
    """One side of a comparison: tensors that are read by rectangles, from a step or another source."""

    name: str
    outlines: Mapping[str, TensorSpec]
    read: ReadRectangle


@dataclass
class Difference:
    """Difference of one tensor. `ulps`: units in the last place, if both sides have the same dtype."""

    name: str
    elements: int = 0
    differing: int = 0
    largest: float = 0.0
    largest_relative: float = 0.0
    ulps: int | None = None
    first: list[int] | None = None
    types: tuple[str, str] | None = None
    shapes: tuple[Shape, Shape] | None = None
    _squares: float = 0.0
    _reference: float = 0.0

    @property
    def relative_norm(self) -> float:
        """Norm of the difference relative to the norm of the first side."""
        if self._squares == 0:
            return 0.0
        return math.sqrt(self._squares / self._reference) if self._reference else math.inf

    @property
    def is_equal(self) -> bool:
        return not self.differing and self.types is None and self.shapes is None

    def within(self, tolerance: float) -> bool:
        """Whether no element differs by more than this fraction of the larger absolute value."""
        return self.shapes is None and self.largest_relative <= tolerance

    def sentence(self) -> str:
        if self.shapes is not None:
            return f"{self.name}: {list(self.shapes[0])} and {list(self.shapes[1])}"
        stored = f", {self.types[0]} and {self.types[1]}" if self.types else ""
        if not self.differing:
            return f"{self.name}: equal values{stored}"
        ulps = f", {self.ulps:,} ulp" if self.ulps is not None else ""
        return (
            f"{self.name}: {self.differing:,} of {self.elements:,} elements from {self.first} on, at most {self.largest:.3g} "
            f"(relative {self.largest_relative:.3g}{ulps}), norm of the difference {self.relative_norm:.3g}{stored}"
        )

    def add(self, ours: Tensor, theirs: Tensor, start: Shape) -> None:
        """Adds the next block of both sides."""
        self.elements += ours.numel()
        different = _different(ours, theirs)
        differs = bool(different.any())
        if differs or ours.is_floating_point():
            self._reference += float(ours.double().nan_to_num(0, 0, 0).square().sum())
        if not differs:
            return
        if self.first is None:
            self.first = [i + j for i, j in zip(start, different.nonzero()[0].tolist(), strict=True)]
        self.differing += int(different.sum())
        if ours.dtype == theirs.dtype and ours.is_floating_point():
            self.ulps = max(self.ulps or 0, _ulps(ours[different], theirs[different]))
        a, b = ours.double(), theirs.double()
        # NaN or inf on one side only counts as an infinite distance.
        distance = (a - b).abs()[different].nan_to_num(math.inf, math.inf, math.inf)
        scale = torch.maximum(a.abs(), b.abs())[different].nan_to_num(1.0, 1.0, 1.0)
        self._squares += float(distance.square().sum())
        self.largest = max(self.largest, float(distance.max()))
        # +0 and -0 differ in their bits, but their distance is 0.
        relative = torch.where(distance == 0, distance, distance / scale)
        self.largest_relative = max(self.largest_relative, float(relative.max()))


def _different(ours: Tensor, theirs: Tensor) -> Tensor:
    """Mask of differing elements. Bitwise for equal dtypes: a NaN equals itself, and +0 differs from -0."""
    if ours.dtype != theirs.dtype:
        return ~((ours.double() == theirs.double()) | (ours.isnan() & theirs.isnan()))
    kind = _INTEGERS[ours.element_size()]
    return ours.contiguous().view(kind) != theirs.contiguous().view(kind)


def _ulps(ours: Tensor, theirs: Tensor) -> int:
    """Largest distance in units in the last place, computed on the bits as ordered integers."""
    kind = _INTEGERS[ours.element_size()]
    low = torch.iinfo(kind).min
    bits = (values.contiguous().view(kind).to(torch.int64) for values in (ours, theirs))
    a, b = (torch.where(number < 0, low - number, number) for number in bits)
    if kind == torch.int64:
        # The difference of two int64 may need 65 bits.
        return max(abs(i - j) for i, j in zip(a.tolist(), b.tolist(), strict=True))
    return int((a - b).abs().max())


@torch.no_grad()
def compare_tensor(
    name: str, ours: ComparedTensors, theirs: ComparedTensors, tell: Callable[[int], None]
) -> Difference:
    """Compares one tensor block by block. `tell` gets the number of bytes read."""
    difference = Difference(name)
    a, b = ours.outlines[name], theirs.outlines[name]
    if a.shape != b.shape:
        difference.shapes = a.shape, b.shape
        return difference
    if a.dtype != b.dtype:
        difference.types = str(a.dtype).removeprefix("torch."), str(b.dtype).removeprefix("torch.")
    for start, size in blocks(a.shape, max(a.dtype.itemsize, b.dtype.itemsize)):
        our_block, their_block = ours.read(name, start, size), theirs.read(name, start, size)
        difference.add(our_block, their_block, start)
        tell(our_block.nbytes + their_block.nbytes)
    return difference


def differing_values(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields (path, ours, theirs) of each differing value of two nested dictionaries, None if missing."""
    for key in sorted({*ours, *theirs}):
        a, b = ours.get(key), theirs.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from ((f"{key}.{path}", x, y) for path, x, y in differing_values(a, b))
        # NaN is the only value that differs from itself; two NaN count as equal.
        elif a != b and not (a != a and b != b):
            yield key, a, b

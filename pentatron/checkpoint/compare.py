"""Two steps, tensor by tensor, whatever layouts wrote them: never more than a block of each is in memory."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pentatron.checkpoint.format import Manifest
from pentatron.checkpoint.load import ROUTERS, WEIGHTS, StepReader
from pentatron.checkpoint.tensor_file import DTYPES, Outline, Read, blocks
from pentatron.parallel.shards import Shape

_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Side:
    """Tensors that are read by rectangles, from a step or from elsewhere."""

    name: str
    outlines: Mapping[str, Outline]
    read: Read


@dataclass
class Difference:
    """How one tensor differs. `ulps`: representable numbers between the two, where both sides have the same type."""

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
        """The norm of the difference over that of the first side."""
        if self._squares == 0:
            return 0.0
        return math.sqrt(self._squares / self._reference) if self._reference else math.inf

    @property
    def is_equal(self) -> bool:
        return not self.differing and self.types is None and self.shapes is None

    def within(self, tolerance: float) -> bool:
        """Whether nothing differs by more than that part of the larger of the two numbers."""
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
        """The next block of both."""
        self.elements += ours.numel()
        different = _different(ours, theirs)
        if not bool(different.any()):
            if ours.is_floating_point():
                self._reference += float(ours.double().nan_to_num(0, 0, 0).square().sum())
            return
        if self.first is None:
            self.first = [i + j for i, j in zip(start, different.nonzero()[0].tolist(), strict=True)]
        self.differing += int(different.sum())
        if ours.dtype == theirs.dtype and ours.is_floating_point():
            self.ulps = max(self.ulps or 0, _ulps(ours[different], theirs[different]))
        a, b = ours.double(), theirs.double()
        self._reference += float(a.nan_to_num(0, 0, 0).square().sum())
        apart = (a - b).abs()[different]
        # What is no number, or infinite, on one side alone is as far as can be.
        apart = apart.nan_to_num(math.inf, math.inf, math.inf)
        scale = torch.maximum(a.abs(), b.abs())[different].nan_to_num(1.0, 1.0, 1.0)
        self._squares += float(apart.square().sum())
        self.largest = max(self.largest, float(apart.max()))
        # Zeros of another sign differ in their bits and by nothing else.
        relative = torch.where(apart == 0, apart, apart / scale)
        self.largest_relative = max(self.largest_relative, float(relative.max()))


def _different(ours: Tensor, theirs: Tensor) -> Tensor:
    """Bit by bit where both have the same type: a NaN is then equal to itself, and zeros of another sign differ."""
    if ours.dtype != theirs.dtype:
        return ~((ours.double() == theirs.double()) | (ours.isnan() & theirs.isnan()))
    kind = _SAME_WIDTH[ours.element_size()]
    return ours.contiguous().view(kind) != theirs.contiguous().view(kind)


def _ulps(ours: Tensor, theirs: Tensor) -> int:
    """The largest distance of two numbers in steps of their type, by which the integers of their bits are ordered."""
    kind = _BITS[ours.element_size()]
    low = torch.iinfo(kind).min

    def ordered(values: Tensor) -> Tensor:
        bits = values.contiguous().view(kind).to(torch.int64)
        return torch.where(bits < 0, low - bits, bits)

    a, b = ordered(ours), ordered(theirs)
    if kind == torch.int64:
        # The difference may have one bit more than fits.
        return max(abs(i - j) for i, j in zip(a.tolist(), b.tolist(), strict=True))
    return int((a - b).abs().max())


@torch.no_grad()
def compare_tensor(name: str, ours: Side, theirs: Side, tell: Callable[[int], None]) -> Difference:
    found = Difference(name)
    a, b = ours.outlines[name], theirs.outlines[name]
    if a.shape != b.shape:
        found.shapes = a.shape, b.shape
        return found
    if a.dtype != b.dtype:
        found.types = _dtype(a), _dtype(b)
    for start, size in blocks(a.shape, max(a.dtype.itemsize, b.dtype.itemsize)):
        block, other = ours.read(name, start, size), theirs.read(name, start, size)
        found.add(block, other, start)
        tell(block.nbytes + other.nbytes)
    return found


def _dtype(outline: Outline) -> str:
    return str(outline.dtype).removeprefix("torch.")


def differing_values(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(path, ours, theirs) of every value of two nested tables that is not the same, None where one has none."""
    for key in sorted({*ours, *theirs}):
        a, b = ours.get(key), theirs.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from ((f"{key}.{path}", x, y) for path, x, y in differing_values(a, b))
        elif a != b and not (a != a and b != b):
            yield key, a, b


# Whether two checkpoints hold the same state, in one number for each part of it.
#
# Printed losses are no proof: with another number of threads they stay the same to the last digit while
# weights drift apart. Of tensors the digest is that of their elements, in the order of memory, whatever
# pieces they are stored in: a step has the same one in every layout.


# What the biases and counts of routers are called: they are the model's as much as its weights are.
# The states of random generators, one of each rank.
RANDOM = "rng/"
# Where data lies, and not what it is (the fingerprint says that); and what the numbers were computed with.
NO_STATE = frozenset({"data_files", "environment"})


@dataclass(frozen=True)
class StateDigest:
    """SHA-256 in hexadecimal. `weights` and `optimizer` say the same of a step in every layout; the states of random
    generators belong to ranks, and the cursor (where the run stands) has numbers that depend on the order of sums."""

    weights: str
    optimizer: str
    random: str
    cursor: str

    @property
    def whole(self) -> str:
        return _sum(f"{name} {value}" for name, value in vars(self).items())

    def parts(self) -> dict[str, str]:
        return {**vars(self), "whole": self.whole}

    def differences(self, other: "StateDigest") -> list[str]:
        """The parts that are not the same."""
        return [name for name, value in vars(self).items() if value != vars(other)[name]]


def state_digest(folder: Path, manifest: Manifest) -> StateDigest:
    """Of a saved step; every byte of it is read, a block at a time."""
    parts: dict[str, list[str]] = {"weights": [], "optimizer": [], "random": []}
    for name, digest in tensor_digests(folder, manifest):
        parts[_part(name)].append(f"{name} {digest}")
    return StateDigest(**{part: _sum(lines) for part, lines in parts.items()}, cursor=_cursor(manifest))


def tensor_digests(
    folder: Path, manifest: Manifest, names: Iterable[str] | None = None
) -> Iterator[tuple[str, str]]:
    """Of each tensor, by name in their order: its type, its shape and its elements."""
    with StepReader(folder, manifest) as reader:
        for name in sorted(manifest.tensors if names is None else names):
            record = manifest.tensors[name]
            digest = hashlib.sha256(f"{record.dtype} {list(record.shape)}\n".encode())
            for start, size in blocks(record.shape, DTYPES[record.dtype].itemsize):
                digest.update(_bytes(reader.read(name, start, size)))
            yield name, digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _part(name: str) -> str:
    if name.startswith((WEIGHTS, ROUTERS)):
        return "weights"
    return "random" if name.startswith(RANDOM) else "optimizer"


def _cursor(manifest: Manifest) -> str:
    state: Mapping[str, Any] = {k: v for k, v in manifest.run_state.items() if k not in NO_STATE}
    return _sum([json.dumps({"step": manifest.step, "state": state}, sort_keys=True)])


def _sum(lines: Iterable[str]) -> str:
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()

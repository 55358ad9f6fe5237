"""Numbers about the tensors of a step, found a block at a time: smallest, largest, mean, norm, and what is no number."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pentatron.checkpoint.load import StepReader
from pentatron.checkpoint.tensor_file import DTYPES, blocks
from pentatron.parallel.pieces import Shape


@dataclass
class Statistics:
    """`least`, `most`, `mean` and `norm` are those of the numbers that are finite."""

    elements: int = 0
    nans: int = 0
    infinities: int = 0
    least: float = math.inf
    most: float = -math.inf
    first_bad: list[int] | None = None
    _sum: float = field(default=0.0, repr=False)
    _squares: float = field(default=0.0, repr=False)

    @property
    def finite(self) -> int:
        return self.elements - self.nans - self.infinities

    @property
    def mean(self) -> float:
        return self._sum / self.finite if self.finite else math.nan

    @property
    def norm(self) -> float:
        return math.sqrt(self._squares)

    def add(self, values: Tensor, start: Shape) -> None:
        """The next block; `start` is where it lies in its tensor."""
        exact = values.detach().double()
        finite = exact.isfinite()
        self.elements += exact.numel()
        if not bool(finite.all()):
            if self.first_bad is None:
                inside = (~finite).nonzero()[0].tolist()
                self.first_bad = [i + j for i, j in zip(start, inside, strict=True)]
            nans = int(exact.isnan().sum())
            self.nans += nans
            self.infinities += int((~finite).sum()) - nans
            exact = exact[finite]
        if exact.numel():
            self.least = min(self.least, float(exact.min()))
            self.most = max(self.most, float(exact.max()))
            self._sum += float(exact.sum())
            self._squares += float(exact.square().sum())


def read_blocks(reader: StepReader, name: str) -> Iterator[tuple[Shape, Tensor]]:
    """A tensor in blocks of bounded size: where each begins, and its values, in the order of memory."""
    record = reader.manifest.tensors[name]
    for start, size in blocks(record.shape, DTYPES[record.dtype].itemsize):
        yield start, reader.read(name, start, size)


@torch.no_grad()
def statistics_of(reader: StepReader, name: str) -> Statistics:
    found = Statistics()
    for start, values in read_blocks(reader, name):
        found.add(values, start)
    return found

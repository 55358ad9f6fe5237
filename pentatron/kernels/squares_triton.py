"""The sum of squares over many tensors, each read once and as it is; and the sum of two tensors in fp32.

Importing this needs Triton. The reference of the first is torch's norm in fp32, of the second a sum of casts.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentatron.kernels.table_triton import TYPES, Addresses, Programs, pointer, programs_of


class Squares:
    """Sums over tensors of the same sizes in most steps; what depends on sizes alone is kept."""

    def __init__(self, block: int = 4096, warps: int = 8) -> None:
        self.block = block
        self.warps = warps
        self._known: tuple[int, ...] = ()
        self._programs: Programs | None = None
        self._sizes: Tensor | None = None
        self._addresses: Addresses | None = None

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """In fp64, of contiguous tensors of one dtype on one device."""
        device, sizes = tensors[0].device, tuple(t.numel() for t in tensors)
        if sizes != self._known or self._programs is None or self._addresses is None:
            self._known, self._programs = sizes, programs_of(sizes, self.block, device)
            self._addresses = Addresses(device)
            self._sizes = torch.tensor(sizes, dtype=torch.int64).to(device)
        programs = self._programs
        sums = torch.empty(len(programs.row_of), dtype=torch.float32, device=device)
        _sum_of_squares[(len(sums),)](
            programs.row_of,
            programs.first_of,
            self._sizes,
            self._addresses(tensors),
            sums,
            DTYPE=TYPES[tensors[0].dtype],
            BLOCK=self.block,
            num_warps=self.warps,
        )
        return sums.sum(dtype=torch.float64)


def exact_sum(first: Tensor, second: Tensor) -> Tensor:
    """Of two contiguous tensors of one dtype, in fp32, in one pass."""
    total = torch.empty_like(first, dtype=torch.float32)
    block = 2048
    _exact_sum[(triton.cdiv(total.numel(), block),)](
        first, second, total, total.numel(), BLOCK=block, num_warps=4
    )
    return total


@triton.jit
def _sum_of_squares(row_of, first_of, sizes, addresses, sums, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row = tl.load(row_of + program)
    begin = (program - tl.load(first_of + row)).to(tl.int64) * BLOCK
    address = tl.load(addresses + row)
    elements = tl.load(sizes + row)
    offsets = begin + tl.arange(0, BLOCK)
    if ((address & 15) == 0) & (begin + BLOCK <= elements):
        found = tl.load(pointer(address, DTYPE, True) + offsets).to(tl.float32)
        tl.store(sums + program, tl.sum(found * found))
    else:
        some = tl.load(pointer(address, DTYPE, False) + offsets, mask=offsets < elements, other=0.0).to(
            tl.float32
        )
        tl.store(sums + program, tl.sum(some * some))


@triton.jit
def _exact_sum(first, second, total, elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < elements
    left = tl.load(first + offsets, mask=inside).to(tl.float32)
    right = tl.load(second + offsets, mask=inside).to(tl.float32)
    tl.store(total + offsets, left + right, mask=inside)

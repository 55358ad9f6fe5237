"""Products of consecutive groups of rows with a matrix for each group."""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from pentatron.config.decisions import fit_grouped_matmul
from pentatron.kernels.products import through_fp32


class GroupedRows(Protocol):
    """Rows that are sorted into groups, some of which may have none."""

    def times(self, rows_NI: Tensor, matrices_GIO: Tensor) -> Tensor:
        """Row by row the product with the matrix of its group: [N, O]."""
        ...

    def outer(self, left_NO: Tensor, right_NI: Tensor) -> Tensor:
        """For each group the sum of the outer products of its rows: [G, O, I]."""
        ...


@dataclass(frozen=True)
class GroupsOnDevice:
    """Where each group ends is known to the device alone (int32), and every product is one kernel there; the last group
    has all rows that are left."""

    ends: Tensor

    def times(self, rows_NI: Tensor, matrices_GIO: Tensor) -> Tensor:
        return F.grouped_mm(rows_NI, matrices_GIO, offs=self.ends)

    def outer(self, left_NO: Tensor, right_NI: Tensor) -> Tensor:
        return F.grouped_mm(left_NO.t(), right_NI, offs=self.ends)


@dataclass(frozen=True)
class Groups:
    """How many rows each group has. `together`: one kernel for all, where the device has it; it reads there where groups
    end, so `on_device`, the same numbers in its memory, spares it a copy."""

    counts: tuple[int, ...]
    together: bool = False
    on_device: Tensor | None = field(default=None, compare=False)

    def times(self, rows_NI: Tensor, matrices_GIO: Tensor) -> Tensor:
        if self._in_one_kernel(rows_NI, matrices_GIO.shape[2]):
            return self._there(rows_NI.device).times(rows_NI, matrices_GIO)
        made = rows_NI.new_empty(len(rows_NI), matrices_GIO.shape[2])
        for rows, matrix, place in zip(self._split(rows_NI), matrices_GIO, self._split(made)):
            if through_fp32(rows):
                place.copy_(rows.float() @ matrix.float())
            else:
                torch.mm(rows, matrix, out=place)
        return made

    def outer(self, left_NO: Tensor, right_NI: Tensor) -> Tensor:
        if self._in_one_kernel(left_NO, right_NI.shape[1]):
            return self._there(left_NO.device).outer(left_NO, right_NI)
        made = left_NO.new_empty(len(self.counts), left_NO.shape[1], right_NI.shape[1])
        for left, right, place in zip(self._split(left_NO), self._split(right_NI), made):
            if through_fp32(left):
                place.copy_(left.float().t() @ right.float())
            else:
                torch.mm(left.t(), right, out=place)
        return made

    def _in_one_kernel(self, rows: Tensor, other_width: int) -> bool:
        return self.together and one_kernel_can(rows, rows.shape[1], other_width)

    def _there(self, device: torch.device) -> GroupsOnDevice:
        if self.on_device is not None:
            return GroupsOnDevice(self.on_device.cumsum(0, dtype=torch.int32))
        return GroupsOnDevice(torch.tensor(list(accumulate(self.counts)), dtype=torch.int32, device=device))

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split(list(self.counts))


def one_kernel_can(rows: Tensor, *widths: int) -> bool:
    """The kernel is for bf16 on a GPU, and rows begin at multiples of 16 bytes in all that it reads or writes."""
    return rows.is_cuda and rows.dtype == torch.bfloat16 and fit_grouped_matmul(*widths)

"""Products of consecutive groups of rows with a matrix for each group."""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Groups:
    """How many rows each group has; some may have none. `together`: one kernel for all, where the device has it."""

    counts: tuple[int, ...]
    together: bool = False

    def times(self, rows_NI: Tensor, matrices_GIO: Tensor) -> Tensor:
        """Row by row the product with the matrix of its group: [N, O]."""
        if self._in_one_kernel(rows_NI, matrices_GIO.shape[2]):
            return F.grouped_mm(rows_NI, matrices_GIO, offs=self._ends(rows_NI.device))
        made = rows_NI.new_empty(len(rows_NI), matrices_GIO.shape[2])
        for rows, matrix, place in zip(self._split(rows_NI), matrices_GIO, self._split(made)):
            torch.mm(rows, matrix, out=place)
        return made

    def outer(self, left_NO: Tensor, right_NI: Tensor) -> Tensor:
        """For each group the sum of the outer products of its rows: [G, O, I]."""
        if self._in_one_kernel(left_NO, right_NI.shape[1]):
            return F.grouped_mm(left_NO.t(), right_NI, offs=self._ends(left_NO.device))
        made = left_NO.new_empty(len(self.counts), left_NO.shape[1], right_NI.shape[1])
        for left, right, place in zip(self._split(left_NO), self._split(right_NI), made):
            torch.mm(left.t(), right, out=place)
        return made

    def _in_one_kernel(self, rows: Tensor, other_width: int) -> bool:
        """The kernel is for bf16 on a GPU, and rows begin at multiples of 16 bytes in all that it reads or writes."""
        aligned = rows.shape[1] % 8 == 0 and other_width % 8 == 0
        return self.together and rows.is_cuda and rows.dtype == torch.bfloat16 and aligned

    def _ends(self, device: torch.device) -> Tensor:
        return torch.tensor(list(accumulate(self.counts)), dtype=torch.int32, device=device)

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split(list(self.counts))

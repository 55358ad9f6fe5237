"""One launch over many tensors: a table of addresses, and which program does which block of which tensor."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Programs:
    """For every program its row of the table, and for every row its first program."""

    row_of: Tensor
    first_of: Tensor


def programs_of(sizes: Sequence[int], block: int, device: torch.device) -> Programs:
    counts = torch.tensor([triton.cdiv(size, block) for size in sizes])
    rows = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), counts)
    return Programs(rows.to(device), (counts.cumsum(0) - counts).to(device, torch.int32))


class Addresses:
    """Where tensors lie, on their device. Memory is given out in the same order in most steps, and then the table of the step before will do."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: list[int] = []
        self._table: Tensor | None = None

    def __call__(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """0 for none; nobody waits for it."""
        found = [0 if t is None else t.data_ptr() for t in tensors]
        if self._table is None or found != self._known:
            table = torch.tensor(found)
            # Only from page-locked memory does a copy run by itself.
            on_gpu = self._device.type == "cuda"
            self._known = found
            self._table = table.pin_memory().to(self._device, non_blocking=True) if on_gpu else table
        return self._table


@triton.jit
def pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """To what lies at an address; where that is a multiple of what a thread reads at once, the compiler is told."""
    found = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        found = tl.multiple_of(found, 16)
    return found

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


def addresses_of(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Where the tensors lie, 0 for none; nobody waits for it."""
    table = torch.tensor([0 if t is None else t.data_ptr() for t in tensors])
    # Only from page-locked memory does a copy run by itself.
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


@triton.jit
def pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """To what lies at an address; where that is a multiple of what a thread reads at once, the compiler is told."""
    found = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        found = tl.multiple_of(found, 16)
    return found

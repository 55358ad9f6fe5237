"""The kernel of `gate`: one program for a row. What a compiler makes of it, with the largest element, takes twice the time."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _gate_backward(gradient, inner, of_inner, largest, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    # Rows times columns of a long batch do not fit 32 bits.
    row = tl.program_id(0).to(tl.int64)
    # As patterns of bits: those of numbers without sign are in the same order, and what is no number comes after all of them.
    found = tl.zeros((BLOCK,), tl.int32)
    kind = of_inner.dtype.element_ty
    for first in range(0, WIDTH, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        place = row * 2 * WIDTH + columns
        gate = tl.load(inner + place, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(inner + place + WIDTH, mask=inside, other=0.0).to(tl.float32)
        given = tl.load(gradient + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        of_gate = (given * up * sigmoid * (1 + gate * (1 - sigmoid))).to(kind)
        of_up = (given * gate * sigmoid).to(kind)
        tl.store(of_inner + place, of_gate, mask=inside)
        tl.store(of_inner + place + WIDTH, of_up, mask=inside)
        found = tl.maximum(found, of_gate.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        found = tl.maximum(found, of_up.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(largest + row, tl.max(found, 0).to(tl.float32, bitcast=True))


def gate_backward(gradient: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    width = gradient.shape[-1]
    rows = inner.shape[:-1].numel()
    of_inner, largest = torch.empty_like(inner), inner.new_empty(rows, dtype=torch.float32)
    if inner.numel():
        _gate_backward[(rows,)](gradient, inner, of_inner, largest, width, _BLOCK)
    return of_inner, largest

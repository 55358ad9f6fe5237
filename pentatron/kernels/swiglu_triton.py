"""The kernel of `swiglu`. What a compiler makes of it writes both halves of the gradient as one, and reads its inputs almost twice."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _backward(gradient, inner, of_inner, made, width, BLOCK: tl.constexpr):
    # Rows times columns of a long batch do not fit 32 bits.
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    first = row * 2 * width + columns
    gate = tl.load(inner + first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(inner + first + width, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(gradient + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    activated = gate * sigmoid
    kind = of_inner.dtype.element_ty
    of_gate = given * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(of_inner + first, of_gate.to(kind), mask=inside)
    tl.store(of_inner + first + width, (given * activated).to(kind), mask=inside)
    tl.store(made + row * width + columns, (activated * up).to(kind), mask=inside)


def swiglu_backward(gradient: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    width = gradient.shape[-1]
    of_inner, made = torch.empty_like(inner), inner.new_empty(gradient.shape)
    rows = gradient.numel() // max(1, width)
    if rows:
        # Rows are the second dimension of the grid, which has 65,535 places; more go round by round.
        for begin in range(0, rows, 65535):
            end = min(rows, begin + 65535)
            flat = (gradient.view(rows, width), inner.view(rows, 2 * width), of_inner.view(rows, 2 * width))
            parts = [t[begin:end] for t in (*flat, made.view(rows, width))]
            _backward[(triton.cdiv(width, _BLOCK), end - begin)](*parts, width, _BLOCK)
    return of_inner, made

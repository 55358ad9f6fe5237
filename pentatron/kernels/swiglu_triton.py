"""The kernels of `swiglu`. What a compiler makes of its backward writes both halves of the gradient as one, and reads its inputs almost twice."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_MOST_ROWS = 65535


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


@triton.jit
def _forward(inner, made, width, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    first = row * 2 * width + columns
    gate = tl.load(inner + first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(inner + first + width, mask=inside, other=0.0).to(tl.float32)
    # As backward makes it again.
    activated = gate * tl.sigmoid(gate)
    tl.store(made + row * width + columns, (activated * up).to(made.dtype.element_ty), mask=inside)


def swiglu(inner: Tensor) -> Tensor:
    width = inner.shape[-1] // 2
    made = inner.new_empty((*inner.shape[:-1], width))
    for grid, parts in _rounds(width, inner, made):
        _forward[grid](*parts, width, _BLOCK)
    return made


def swiglu_backward(gradient: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    width = gradient.shape[-1]
    of_inner, made = torch.empty_like(inner), inner.new_empty(gradient.shape)
    for grid, parts in _rounds(width, gradient, inner, of_inner, made):
        _backward[grid](*parts, width, _BLOCK)
    return of_inner, made


def _rounds(width: int, *tensors: Tensor) -> Iterator[tuple[tuple[int, int], list[Tensor]]]:
    """Rows are the second dimension of the grid, which has 65,535 places; more go round by round."""
    flat = [t.view(-1, t.shape[-1]) for t in tensors if t.numel()]
    rows = len(flat[0]) if flat else 0
    for begin in range(0, rows, _MOST_ROWS):
        parts = [t[begin : begin + _MOST_ROWS] for t in flat]
        yield (triton.cdiv(width, _BLOCK), len(parts[0])), parts

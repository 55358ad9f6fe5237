"""The kernels of `activation`: one program for a row."""

import triton
import triton.language as tl
from torch import Tensor

_WIDEST = 2048


@triton.jit
def _parts(inner, row, columns, inside, WIDTH: tl.constexpr, GATED: tl.constexpr):
    """The activation of the first half, the second half (1 where there is none), and the slope of the first."""
    if GATED:
        z = tl.load(inner + row * 2 * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(inner + row * 2 * WIDTH + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(z)
        slope = sigmoid * (1 + z * (1 - sigmoid))
    else:
        z = tl.load(inner + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.full(z.shape, 1.0, tl.float32)
        # gelu by tanh is z · sigmoid(2u) with u = √(2/π) (z + 0.044715 z³).
        sigmoid = tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
        steepness = 1.5957691216057308 * (1 + 0.134145 * z * z)
        slope = sigmoid * (1 + z * (1 - sigmoid) * steepness)
    return z * sigmoid, up, slope


@triton.jit
def _forward(inner, weights, out, WIDTH: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    for first in range(0, WIDTH, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        activated, up, _ = _parts(inner, row, columns, inside, WIDTH, GATED)
        made = activated * up * weight
        tl.store(out + row * WIDTH + columns, made.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    gradient,
    inner,
    weights,
    of_inner,
    of_weights,
    made,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, WIDTH, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        activated, up, slope = _parts(inner, row, columns, inside, WIDTH, GATED)
        given = tl.load(gradient + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        plain = activated * up
        total += given * plain
        given = given * weight
        kind = of_inner.dtype.element_ty
        if GATED:
            tl.store(of_inner + row * 2 * WIDTH + columns, (given * up * slope).to(kind), mask=inside)
            tl.store(of_inner + row * 2 * WIDTH + WIDTH + columns, (given * activated).to(kind), mask=inside)
        else:
            tl.store(of_inner + row * WIDTH + columns, (given * slope).to(kind), mask=inside)
        tl.store(made + row * WIDTH + columns, (plain * weight).to(kind), mask=inside)
    tl.store(of_weights + row, tl.sum(total, 0).to(of_weights.dtype.element_ty))


def weighted_activation(inner_NI: Tensor, weights_N: Tensor, gated: bool) -> Tensor:
    rows, width = len(inner_NI), inner_NI.shape[1] // (2 if gated else 1)
    out = inner_NI.new_empty(rows, width)
    if out.numel():
        _forward[(rows,)](
            inner_NI.contiguous(), weights_N.contiguous(), out, WIDTH=width, GATED=gated, BLOCK=_block(width)
        )
    return out


def weighted_activation_backward(
    gradient_NI: Tensor, inner_NI: Tensor, weights_N: Tensor, gated: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = gradient_NI.shape
    of_inner, of_weights = inner_NI.new_empty(inner_NI.shape), weights_N.new_empty(rows)
    made = inner_NI.new_empty(rows, width)
    if made.numel():
        _backward[(rows,)](
            gradient_NI.contiguous(),
            inner_NI.contiguous(),
            weights_N.contiguous(),
            of_inner,
            of_weights,
            made,
            WIDTH=width,
            GATED=gated,
            BLOCK=_block(width),
        )
    return of_inner, of_weights, made


def _block(width: int) -> int:
    block: int = min(triton.next_power_of_2(width), _WIDEST)
    return block

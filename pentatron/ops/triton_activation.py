"""Triton kernels of `activation`: activations, gates, and the dispatch of rows.

One program computes one row.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDEST_ACTIVATION = 2048


@triton.jit
def _parts(inner, row, columns, inside, WIDTH: tl.constexpr, GATED: tl.constexpr):
    """Returns the activation of the first half, the second half (1 without a gate), and the slope."""
    if GATED:
        z = tl.load(inner + row * 2 * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(inner + row * 2 * WIDTH + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(z)
        slope = sigmoid * (1 + z * (1 - sigmoid))
    else:
        z = tl.load(inner + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.full(z.shape, 1.0, tl.float32)
        # GELU (tanh) equals z · sigmoid(2u) with u = √(2/π) (z + 0.044715 z³).
        sigmoid = tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
        steepness = 1.5957691216057308 * (1 + 0.134145 * z * z)
        slope = sigmoid * (1 + z * (1 - sigmoid) * steepness)
    return z * sigmoid, up, slope


@triton.jit
def _activation_forward(inner, weights, out, WIDTH: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    for first in range(0, WIDTH, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        activated, up, _ = _parts(inner, row, columns, inside, WIDTH, GATED)
        weighted = activated * up * weight
        tl.store(out + row * WIDTH + columns, weighted.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _activation_backward(
    gradient,
    inner,
    weights,
    grad_inner,
    grad_weights,
    output,
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
        kind = grad_inner.dtype.element_ty
        if GATED:
            tl.store(grad_inner + row * 2 * WIDTH + columns, (given * up * slope).to(kind), mask=inside)
            tl.store(grad_inner + (2 * row + 1) * WIDTH + columns, (given * activated).to(kind), mask=inside)
        else:
            tl.store(grad_inner + row * WIDTH + columns, (given * slope).to(kind), mask=inside)
        tl.store(output + row * WIDTH + columns, (plain * weight).to(kind), mask=inside)
    tl.store(grad_weights + row, tl.sum(total, 0).to(grad_weights.dtype.element_ty))


def weighted_activation(inner_NI: Tensor, weights_N: Tensor, gated: bool) -> Tensor:
    rows, width = len(inner_NI), inner_NI.shape[1] // (2 if gated else 1)
    out = inner_NI.new_empty(rows, width)
    if out.numel():
        given = (inner_NI.contiguous(), weights_N.contiguous())
        _activation_forward[(rows,)](*given, out, WIDTH=width, GATED=gated, BLOCK=_block(width))
    return out


def weighted_activation_backward(
    gradient_NI: Tensor, inner_NI: Tensor, weights_N: Tensor, gated: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = gradient_NI.shape
    grad_inner, grad_weights = inner_NI.new_empty(inner_NI.shape), weights_N.new_empty(rows)
    output = inner_NI.new_empty(rows, width)
    if output.numel():
        given = [t.contiguous() for t in (gradient_NI, inner_NI, weights_N)]
        outputs = (grad_inner, grad_weights, output)
        _activation_backward[(rows,)](*given, *outputs, WIDTH=width, GATED=gated, BLOCK=_block(width))
    return grad_inner, grad_weights, output


def _block(width: int) -> int:
    return min(int(triton.next_power_of_2(width)), _WIDEST_ACTIVATION)


# Backward of the gate, with row maxima. The kernel that a compiler generates for both takes twice as long.


_GATE_BLOCK = 1024


@triton.jit
def _gate_backward(gradient, inner, grad_inner, largest, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    # Row × column offsets of a long batch overflow 32 bits.
    row = tl.program_id(0).to(tl.int64)
    # Maxima of bit patterns: non-negative floats keep their order, and NaN is the largest.
    found = tl.zeros((BLOCK,), tl.int32)
    kind = grad_inner.dtype.element_ty
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
        tl.store(grad_inner + place, of_gate, mask=inside)
        tl.store(grad_inner + place + WIDTH, of_up, mask=inside)
        found = tl.maximum(found, of_gate.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        found = tl.maximum(found, of_up.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(largest + row, tl.max(found, 0).to(tl.float32, bitcast=True))


def gate_backward(gradient: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    width = gradient.shape[-1]
    rows = inner.shape[:-1].numel()
    grad_inner, largest = torch.empty_like(inner), inner.new_empty(rows, dtype=torch.float32)
    if inner.numel():
        _gate_backward[(rows,)](gradient, inner, grad_inner, largest, width, _GATE_BLOCK)
    return grad_inner, largest


# SwiGLU. The kernel that a compiler generates for its backward concatenates the gradient of both halves, and
# reads its inputs almost twice.


_SWIGLU_BLOCK = 1024
_MOST_ROWS = 65535


@triton.jit
def _swiglu_backward(gradient, inner, grad_inner, output, width, BLOCK: tl.constexpr):
    # Row × column offsets of a long batch overflow 32 bits.
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    first = row * 2 * width + columns
    gate = tl.load(inner + first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(inner + first + width, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(gradient + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    activated = gate * sigmoid
    kind = grad_inner.dtype.element_ty
    of_gate = given * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(grad_inner + first, of_gate.to(kind), mask=inside)
    tl.store(grad_inner + first + width, (given * activated).to(kind), mask=inside)
    tl.store(output + row * width + columns, (activated * up).to(kind), mask=inside)


@triton.jit
def _swiglu_forward(inner, output, width, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    first = row * 2 * width + columns
    gate = tl.load(inner + first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(inner + first + width, mask=inside, other=0.0).to(tl.float32)
    # Must match the recomputation in backward bit by bit.
    activated = gate * tl.sigmoid(gate)
    tl.store(output + row * width + columns, (activated * up).to(output.dtype.element_ty), mask=inside)


def swiglu(inner: Tensor) -> Tensor:
    width = inner.shape[-1] // 2
    output = inner.new_empty((*inner.shape[:-1], width))
    for grid, parts in _rounds(width, inner, output):
        _swiglu_forward[grid](*parts, width, _SWIGLU_BLOCK)
    return output


def swiglu_backward(gradient: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    width = gradient.shape[-1]
    grad_inner, output = torch.empty_like(inner), inner.new_empty(gradient.shape)
    for grid, parts in _rounds(width, gradient, inner, grad_inner, output):
        _swiglu_backward[grid](*parts, width, _SWIGLU_BLOCK)
    return grad_inner, output


def _rounds(width: int, *tensors: Tensor) -> Iterator[tuple[tuple[int, int], list[Tensor]]]:
    """Yields launches over at most 65,535 rows each, the limit of the grid's second dimension."""
    flat = [t.view(-1, t.shape[-1]) for t in tensors if t.numel()]
    rows = len(flat[0]) if flat else 0
    for begin in range(0, rows, _MOST_ROWS):
        parts = [t[begin : begin + _MOST_ROWS] for t in flat]
        yield (triton.cdiv(width, _SWIGLU_BLOCK), len(parts[0])), parts


# Dispatch and combination of rows.


_WIDEST_ROW = 4096


@triton.jit
def _deal(x, places, out, width, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    # Read once, written once per place.
    row = tl.load(x + token * width + columns, mask=inside)
    for k in tl.static_range(COUNT):
        place = tl.load(places + token * COUNT + k).to(tl.int64)
        tl.store(out + place * width + columns, row, mask=inside)


@triton.jit
def _sum(rows, places, out, width, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(COUNT):
        place = tl.load(places + token * COUNT + k).to(tl.int64)
        total += tl.load(rows + place * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)


def dispatch_rows(x_TD: Tensor, places_TK: Tensor) -> Tensor:
    return _token_by_token(_deal, x_TD, places_TK, x_TD.new_empty(places_TK.numel(), x_TD.shape[1]))


def combine_rows(rows_ND: Tensor, places_TK: Tensor) -> Tensor:
    return _token_by_token(_sum, rows_ND, places_TK, rows_ND.new_empty(len(places_TK), rows_ND.shape[1]))


def _token_by_token(kernel: Any, rows: Tensor, places_TK: Tensor, out: Tensor) -> Tensor:
    (tokens, count), width = places_TK.shape, rows.shape[1]
    block = min(triton.next_power_of_2(width), _WIDEST_ROW)
    if out.numel():
        grid = (tokens, triton.cdiv(width, block))
        kernel[grid](rows, places_TK.contiguous(), out, width, COUNT=count, BLOCK=block)
    return out


# A minimal kernel, to test whether Triton works.


@triton.jit
def _store(place):
    tl.store(place, 1.0)


def stored() -> bool:
    place = torch.zeros(1, device="cuda")
    _store[(1,)](place)
    return bool(place.item() == 1)

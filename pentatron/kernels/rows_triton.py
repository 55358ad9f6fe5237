"""The kernels of `rows`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDEST = 4096


@triton.jit
def _deal(x, places, out, width, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    # Read once and written as often as the token has places.
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


def deal_rows(x_TD: Tensor, places_TK: Tensor) -> Tensor:
    tokens, count = places_TK.shape
    width = x_TD.shape[1]
    out = x_TD.new_empty(tokens * count, width)
    block = min(triton.next_power_of_2(width), _WIDEST)
    if out.numel():
        grid = (tokens, triton.cdiv(width, block))
        _deal[grid](x_TD, places_TK.contiguous(), out, width, COUNT=count, BLOCK=block)
    return out


def sum_rows(rows_ND: Tensor, places_TK: Tensor) -> Tensor:
    tokens, count = places_TK.shape
    width = rows_ND.shape[1]
    out = torch.empty(tokens, width, dtype=rows_ND.dtype, device=rows_ND.device)
    block = min(triton.next_power_of_2(width), _WIDEST)
    if out.numel():
        grid = (tokens, triton.cdiv(width, block))
        _sum[grid](rows_ND, places_TK.contiguous(), out, width, COUNT=count, BLOCK=block)
    return out

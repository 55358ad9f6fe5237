"""Dropout by counter in one pass: the bits of `nn/dropout.py`, and whatever they are used for."""

import triton
import triton.language as tl
from torch import Tensor

_PAIRS = 1024


@triton.jit
def _scrambled(z):
    z = z ^ (z >> 32)
    z = z * 0xD6E8FEB86659FD93
    z = z ^ (z >> 32)
    z = z * 0xD6E8FEB86659FD93
    return z ^ (z >> 32)


@triton.jit(do_not_specialize=["site", "limit"])
def _drop(
    x,
    stream,
    rows,
    out,
    width,
    site,
    limit,
    scale,
    HAS_STREAM: tl.constexpr,
    SITE_IN_MEMORY: tl.constexpr,
    PAIRS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # The key of this site below that of the row.
    number = tl.load(site) if SITE_IN_MEMORY else site
    place = (number.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    key = _scrambled(tl.load(rows + row).to(tl.uint64, bitcast=True) + place)
    pairs = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    bits = _scrambled(key + (pairs.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
    lower = (bits & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    upper = (bits >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    numbers = tl.interleave(lower, upper)
    columns = tl.program_id(1) * 2 * PAIRS + tl.arange(0, 2 * PAIRS)
    inside = columns < width
    kind = out.dtype.element_ty
    value = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    # Rounded where torch rounds, so that the two agree in every bit.
    kept = tl.where(numbers < limit, 0.0, (value * scale).to(kind).to(tl.float32))
    if HAS_STREAM:
        kept += tl.load(stream + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, kept.to(kind), mask=inside)


def dropped(
    x_BSD: Tensor, stream_BSD: Tensor | None, rows_BS: Tensor, site: int | Tensor, limit: int, scale: float
) -> Tensor:
    """`x` with some elements dropped, beside the stream if there is one. `limit` is the smallest number
    that is kept."""
    x, width = x_BSD.contiguous(), x_BSD.shape[-1]
    out = x.new_empty(x.shape)
    pairs = min(triton.next_power_of_2((width + 1) // 2), _PAIRS)
    if out.numel():
        grid = (x.numel() // width, triton.cdiv(width, 2 * pairs))
        stream = x if stream_BSD is None else stream_BSD.contiguous()
        _drop[grid](
            x,
            stream,
            rows_BS.contiguous(),
            out,
            width,
            site,
            limit,
            scale,
            HAS_STREAM=stream_BSD is not None,
            SITE_IN_MEMORY=isinstance(site, Tensor),
            PAIRS=pairs,
        )
    return out

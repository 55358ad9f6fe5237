"""Triton kernels of counter-based dropout in one pass; bit-identical to `nn/dropout.py`.

One random number serves a pair of channels. For 16-bit types a pair is one 32-bit word of memory, which one
thread loads and stores; for other types the numbers are interleaved into channel order.
"""

import torch
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


@triton.jit
def _halves(rows, row, first, site, SITE_IN_MEMORY: tl.constexpr, PAIRS: tl.constexpr):
    """Returns the 32 random bits of each of the two channels, for some pairs of a row."""
    number = tl.load(site) if SITE_IN_MEMORY else site
    # The key of this dropout site, derived from the key of the row.
    place = (number.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    key = _scrambled(tl.load(rows + row).to(tl.uint64, bitcast=True) + place)
    pairs = first + tl.arange(0, PAIRS)
    bits = _scrambled(key + (pairs.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
    lower = (bits & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    upper = (bits >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    return lower, upper


@triton.jit
def _kept(value, numbers, limit, scale, KIND: tl.constexpr):
    # Round where torch rounds, so that both agree bit by bit.
    return tl.where(numbers < limit, 0.0, (value * scale).to(KIND).to(tl.float32))


@triton.jit
def _of_word(word, KIND: tl.constexpr):
    return (word & 0xFFFF).to(tl.uint16).to(KIND, bitcast=True).to(tl.float32)


@triton.jit
def _to_word(value, KIND: tl.constexpr):
    return value.to(KIND).to(tl.uint16, bitcast=True).to(tl.uint32)


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
    KIND: tl.constexpr,
    IN_WORDS: tl.constexpr,
):
    """IN_WORDS: the tensors are words of two channels, and `width` counts words."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * PAIRS
    lower, upper = _halves(rows, row, first, site, SITE_IN_MEMORY, PAIRS)
    if IN_WORDS:
        columns = first + tl.arange(0, PAIRS)
        inside = columns < width
        word = tl.load(x + row * width + columns, mask=inside, other=0).to(tl.uint32, bitcast=True)
        even = _kept(_of_word(word, KIND), lower, limit, scale, KIND)
        odd = _kept(_of_word(word >> 16, KIND), upper, limit, scale, KIND)
        if HAS_STREAM:
            beside = tl.load(stream + row * width + columns, mask=inside, other=0).to(tl.uint32, bitcast=True)
            even += _of_word(beside, KIND)
            odd += _of_word(beside >> 16, KIND)
        made = _to_word(even, KIND) | (_to_word(odd, KIND) << 16)
        tl.store(out + row * width + columns, made.to(tl.int32, bitcast=True), mask=inside)
    else:
        numbers = tl.interleave(lower, upper)
        columns = 2 * first + tl.arange(0, 2 * PAIRS)
        inside = columns < width
        value = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        kept = _kept(value, numbers, limit, scale, KIND)
        if HAS_STREAM:
            kept += tl.load(stream + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * width + columns, kept.to(KIND), mask=inside)


_KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def dropout(
    x_BSD: Tensor, stream_BSD: Tensor | None, rows_BS: Tensor, site: int | Tensor, limit: int, scale: float
) -> Tensor:
    """Returns `x` with dropout applied, plus the residual `stream_BSD` if given.

    Numbers below `limit` are dropped.
    """
    x, width = x_BSD.contiguous(), x_BSD.shape[-1]
    output = x.new_empty(x.shape)
    if not output.numel():
        return output
    stream = x if stream_BSD is None else stream_BSD.contiguous()
    tensors = [x, stream, output]
    # A view that does not begin at a word boundary cannot be read word by word.
    in_words = x.element_size() == 2 and width % 2 == 0 and all(t.storage_offset() % 2 == 0 for t in tensors)
    if in_words:
        tensors = [t.view(torch.int32) for t in tensors]
    pairs = min(triton.next_power_of_2((width + 1) // 2), _PAIRS)
    flags = (stream_BSD is not None, isinstance(site, Tensor))
    numbers = (width // 2 if in_words else width, site, limit, scale)
    places, constants = (*tensors[:2], rows_BS.contiguous(), tensors[2]), (pairs, _KINDS[x.dtype], in_words)
    _drop[(x.numel() // width, triton.cdiv(width, 2 * pairs))](*places, *numbers, *flags, *constants)
    return output

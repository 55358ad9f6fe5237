"""Triton kernels of `cross_entropy`: one for each of the two passes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns that a program processes at a time, and its number of warps.
_READ, _READ_WARPS = 4096, 4
_WRITE, _WRITE_WARPS = 2048, 4


def row_sums(
    logits: Tensor, labels: Tensor, vocab: int, first: int, block: int = _READ, warps: int = _READ_WARPS
) -> tuple[Tensor, Tensor, Tensor]:
    """As `cross_entropy.row_sums`."""
    rows = logits.shape[0]
    results = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    sizes = (rows, first, logits.stride(0), vocab, block)
    _cross_entropy_sums[(rows,)](logits, labels, results, *sizes, num_warps=warps)
    return results[0], results[1], results[2]


def write_gradient(
    gradient: Tensor,
    logits: Tensor,
    labels: Tensor,
    log_sums: Tensor,
    weights: Tensor,
    vocab: int,
    first: int,
    block: int = _WRITE,
    warps: int = _WRITE_WARPS,
) -> None:
    """As `cross_entropy.write_gradient`."""
    rows, width = logits.shape
    tensors = (gradient, logits, labels, log_sums, weights)
    sizes = (vocab, width, first, gradient.stride(0), logits.stride(0))
    _cross_entropy_gradient[(rows, triton.cdiv(width, block))](*tensors, *sizes, block, num_warps=warps)


@triton.jit
def _cross_entropy_sums(logits, labels, found, rows, first, stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    # Offsets of a large vocabulary times a long batch overflow 32 bits.
    row = tl.program_id(0).to(tl.int64)
    begin = logits + row * stride
    columns = tl.arange(0, BLOCK)
    # Finite, so that logits of -inf result in 0 rather than inf - inf = NaN.
    largest = -3.0e38
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCAB, BLOCK):
        logit = tl.load(begin + start + columns, mask=start + columns < VOCAB, other=-float("inf"))
        logit = logit.to(tl.float32)
        larger = tl.maximum(largest, tl.max(logit, 0))
        sums = sums * tl.exp(largest - larger) + tl.exp(logit - larger)
        largest = larger
    local = tl.load(labels + row) - first
    of_label = tl.load(begin + local, mask=(local >= 0) & (local < VOCAB), other=0.0)
    tl.store(found + row, largest)
    tl.store(found + rows + row, tl.sum(sums, 0))
    tl.store(found + 2 * rows + row, of_label.to(tl.float32))


@triton.jit
def _cross_entropy_gradient(
    gradient, logits, labels, log_sums, weights, vocab, width, first, out_stride, stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(weights + row)
    # The logits of a masked token are not read.
    counts = columns < tl.where(weight != 0.0, vocab, 0)
    logit = tl.load(logits + row * stride + columns, mask=counts, other=-float("inf")).to(tl.float32)
    local = tl.load(labels + row) - first
    share = tl.exp(logit - tl.load(log_sums + row)) - tl.where(columns == local, 1.0, 0.0)
    made = tl.where(counts, share * weight, 0.0)
    tl.store(gradient + row * out_stride + columns, made.to(gradient.dtype.element_ty), mask=columns < width)

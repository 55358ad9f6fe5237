"""Dropout whose masks do not depend on the layout.

Whether an element is dropped is a pure function of the seed, the step, the dropout site, the sample's index
in the global batch, the position and the channel. Every rank that computes an element, in forward or when it
is recomputed in backward, therefore derives the same mask without a stateful generator.

Keys form a tree: the seed has a child key for every step, a step for every sample, and so on down to a row
(one position of one sample) at a site. Within a row, the index of each pair of channels is hashed with the
row's key to 64 bits, 32 for each channel.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pentatron.ops.dispatch import operator, uses_triton

_WORD = 1 << 64

# Elements whose bits are computed at a time: on a CPU the temporaries stay in its cache, on a GPU they take a
# bounded part of its memory and few kernel launches.
_BLOCK_CPU = 1 << 17
_BLOCK_GPU = 1 << 23
# Dtypes of the kernel, which computes in fp32.
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _signed(number: int) -> int:
    """Converts to the signed 64-bit integer with the same bits: torch computes with signed integers."""
    return (number + _WORD // 2) % _WORD - _WORD // 2


# 2⁶⁴ divided by the golden ratio: keys of consecutive numbers are far apart.
_INCREMENT = _signed(0x9E3779B97F4A7C15)
# The multiplier of degski's 64-bit finalizer.
_FACTOR = _signed(0xD6E8FEB86659FD93)


@dataclass(frozen=True)
class DropoutKeys:
    """The key of each row of a micro-batch, equal on every rank that computes the row: int64 [B, S]."""

    rows: Tensor


def dropout_keys(
    seed: int, step: int, first_sample: int, batch: int, positions: Tensor, device: torch.device
) -> DropoutKeys:
    """Keys of the samples `first_sample` ... `first_sample + batch - 1` of the step's global batch.

    `positions` are the positions in the whole sequence that this rank computes.
    """
    samples = torch.arange(first_sample, first_sample + batch, dtype=torch.int64, device=device)
    of_step = _child(_child(samples.new_zeros(1), seed), step)
    return DropoutKeys(_child(_child(of_step, samples)[:, None], positions.to(samples)))


def hidden_dropout(
    x_BSD: Tensor, keys: DropoutKeys, site: int | Tensor, probability: float, stream_BSD: Tensor | None = None
) -> Tensor:
    """Applies dropout with inverse scaling, and adds `stream_BSD`; on a GPU in one pass over memory.

    `site` is the index of the dropout site in the model: the embedding is 0, the attention output of layer i
    is 2i + 1, its MLP output 2i + 2.
    """
    assert 0 <= probability < 1, f"a dropout probability of {probability}"
    if stream_BSD is not None and (probability == 0 or x_BSD.dtype != stream_BSD.dtype):
        return stream_BSD + hidden_dropout(x_BSD, keys, site, probability)
    if probability == 0:
        return x_BSD
    assert keys.rows.shape == x_BSD.shape[:2], f"keys of {keys.rows.shape} for {x_BSD.shape}"
    if torch.compiler.is_compiling():
        number = torch.as_tensor(site, device=x_BSD.device)
        return _DropoutBySite.apply(x_BSD, stream_BSD, keys.rows, number, probability)
    if _in_one_pass(x_BSD):
        return _DropoutBySite.apply(x_BSD, stream_BSD, keys.rows, site, probability)
    kept: Tensor = _Dropout.apply(x_BSD, _child(keys.rows, site), probability)
    return kept if stream_BSD is None else stream_BSD + kept


def _in_one_pass(x_BSD: Tensor) -> bool:
    return uses_triton(x_BSD) and x_BSD.dtype in _KERNEL_DTYPES


def _child(parent: Tensor, number: int | Tensor) -> Tensor:
    """The child key with this number."""
    if isinstance(number, int):
        return _scramble_((parent + _signed((number + 1) * _INCREMENT)).contiguous())
    return _scramble_((parent + (number + 1) * _INCREMENT).contiguous())


def _scramble_(z: Tensor) -> Tensor:
    """Hashes 64-bit integers in place: every bit of the result depends on all bits.

    `z ^= z >> 32` XORs the upper half into the lower one. Done on 32-bit halves, it needs neither a copy nor
    a shift, which would be arithmetic in torch. CPUs and GPUs both store the lower half first.
    """
    halves = z.view(torch.int32)
    lower, upper = halves[..., 0::2], halves[..., 1::2]
    for _ in range(2):
        lower.bitwise_xor_(upper)
        z.mul_(_FACTOR)
    lower.bitwise_xor_(upper)
    return z


def _limit(probability: float) -> int:
    """Threshold below which a hashed number is dropped, in the range of signed 32-bit integers."""
    return min(round(probability * 2**32), 2**32 - 1) - 2**31


def _by_kernel(
    x_BSD: Tensor, stream_BSD: Tensor | None, rows_BS: Tensor, site: int | Tensor, probability: float
) -> Tensor:
    from pentatron.ops.triton_dropout import dropout

    return dropout(x_BSD, stream_BSD, rows_BS, site, _limit(probability), 1 / (1 - probability))


@operator("hidden_dropout", lambda x_BSD, *others: x_BSD.new_empty(x_BSD.shape))
def _dropped_by_site(
    x_BSD: Tensor, stream_BSD: Tensor | None, rows_BS: Tensor, site: Tensor, probability: float
) -> Tensor:
    """Dropout as one custom operator of a compiled graph.

    A graph shared by all layers must not depend on the value of the site, and the compiler does not support
    the 64-bit hash arithmetic.
    """
    if _in_one_pass(x_BSD):
        return _by_kernel(x_BSD, stream_BSD, rows_BS, site, probability)
    kept = _kept(x_BSD, _child(rows_BS, site), probability)
    return kept if stream_BSD is None else stream_BSD + kept


class _DropoutBySite(torch.autograd.Function):
    """`_Dropout` in one operation that derives the site's keys, so that all sites save the same row keys.

    The site is a tensor in compiled graphs, and the operation an operator of the graph.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_BSD: Tensor,
        stream_BSD: Tensor | None,
        rows_BS: Tensor,
        site: int | Tensor,
        probability: float,
    ) -> Tensor:
        in_graph = isinstance(site, Tensor)
        ctx.save_for_backward(rows_BS, site if in_graph else None)
        ctx.site = None if in_graph else site
        ctx.probability, ctx.has_stream = probability, stream_BSD is not None
        operation = _dropped_by_site if in_graph else _by_kernel
        return operation(x_BSD, stream_BSD, rows_BS, site, probability)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        rows_BS, site = ctx.saved_tensors
        site = ctx.site if site is None else site
        gradient = _DropoutBySite.apply(gradients[0], None, rows_BS, site, ctx.probability)
        return gradient, gradients[0] if ctx.has_stream else None, None, None, None


class _Dropout(torch.autograd.Function):
    """Saves only the row keys for backward, which derives the mask from them."""

    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, rows_BS: Tensor, probability: float) -> Tensor:
        ctx.save_for_backward(rows_BS)
        ctx.probability = probability
        return _kept(x_BSD, rows_BS, probability)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (rows_BS,) = ctx.saved_tensors
        return _Dropout.apply(gradients[0], rows_BS, ctx.probability), None, None


def _kept(x_BSD: Tensor, rows_BS: Tensor, probability: float) -> Tensor:
    """Returns the elements that are kept, scaled; `rows_BS` are the keys of the site."""
    result = torch.empty(x_BSD.shape, dtype=x_BSD.dtype, device=x_BSD.device)
    torch.mul(x_BSD, 1 / (1 - probability), out=result)
    channels, limit = x_BSD.shape[-1], _limit(probability)
    pairs = torch.arange(1, (channels + 1) // 2 + 1, dtype=torch.int64, device=x_BSD.device) * _INCREMENT
    size = max(1, (_BLOCK_GPU if x_BSD.is_cuda else _BLOCK_CPU) // max(1, channels))
    for block, keys in zip(result.flatten(0, 1).split(size), rows_BS.flatten().split(size), strict=True):
        numbers = _scramble_(keys[:, None] + pairs).view(torch.int32)
        block.masked_fill_(numbers[:, :channels] < limit, 0)
    return result

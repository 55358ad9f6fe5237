"""Causal attention over sequences that may be split across the context axis (context parallelism).

Each rank has the queries, keys and values of the tokens that `pentatron.parallel.axes` assigns to it. Three
ways to attend to the tokens of other ranks:

    p2p         ring attention: keys and values are sent around a ring, followed by their gradients
    all_gather  every rank gathers all keys and values, in forward and again in backward
    a2a         ranks exchange heads for tokens (Ulysses): each then has all tokens of some heads
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pentatron.layout.documents import DocumentStarts
from pentatron.nn.attention_blocks import Block, MergedAttention, attend_whole, chunk_blocks
from pentatron.parallel import collectives
from pentatron.parallel.axes import ContextAxis, all_to_all, chunk_order, gather_order
from pentatron.parallel.collectives import Group, Pending, start_ring_exchange

# Message kinds that are in flight at the same time.
_KEYS, _GRADIENTS = 1, 2


def attend(
    q_BNSH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    context: ContextAxis,
    dropout: float = 0.0,
    window: int | None = None,
    documents: DocumentStarts | None = None,
) -> Tensor:
    """Attention of this rank's queries to all tokens up to their own; there may be fewer key/value heads than
    query heads.

    With `window`, a token attends to itself and at most so many tokens before it; with `documents`, only
    within its own document. Documents describe whole sequences and are known on every rank, so they need no
    communication.
    """
    if window is not None and window >= context.size * q_BNSH.shape[2] - 1:
        window = None
    if documents is not None and all(len(starts) == 1 for starts in documents):
        documents = None
    if context.size == 1:
        return attend_whole(q_BNSH, k_BKSH, v_BKSH, dropout, window, documents)
    assert dropout == 0, "the rules refuse attention dropout over split sequences"
    if context.exchange == "a2a":
        return _by_heads(q_BNSH, k_BKSH, v_BKSH, context.group, window, documents)
    length = q_BNSH.shape[2]
    blocks = (
        [ring_blocks(step, context, length, window, documents) for step in range(context.size)]
        if context.exchange == "p2p"
        else [gathered_blocks(context, length, window, documents)]
    )
    # The kernels assume without a check that the channels of a head are contiguous, which rotation may
    # change.
    rows = [t if t.stride(-1) == 1 else t.contiguous() for t in (q_BNSH, k_BKSH, v_BKSH)]
    return _SplitAttention.apply(*rows, context, blocks)


def ring_block(source: int, rank: int, length: int) -> Block:
    """The keys of rank `source` that queries of `rank` attend to; both have `length` tokens in two chunks."""
    whole, early, late = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    if source == rank:
        return Block(whole, whole, causal=True)
    # A rank has an early chunk, in rank order, and a late one, in reverse order, after all early chunks.
    return Block(whole, early, causal=False) if source < rank else Block(late, whole, causal=False)


def gathered_blocks(
    context: ContextAxis, length: int, window: int | None = None, documents: DocumentStarts | None = None
) -> list[Block]:
    """Blocks of this rank's queries over all keys in order: for each chunk the keys before it, and itself."""
    size = length // 2
    if documents is not None or window is not None:
        return list(chunk_blocks(documents, context.chunks, range(2 * context.size), size, window))
    blocks = []
    for place, number in enumerate(context.chunks):
        queries, first = slice(place * size, (place + 1) * size), number * size
        if first:
            blocks.append(Block(queries, slice(0, first), causal=False))
        blocks.append(Block(queries, slice(first, first + size), causal=True))
    return blocks


def ring_blocks(
    step: int, context: ContextAxis, length: int, window: int | None, documents: DocumentStarts | None
) -> list[Block]:
    """Blocks at a step of the ring, where this rank has the keys of the rank `step` places before it."""
    source = (context.rank - step) % context.size
    if documents is None and window is None:
        return [ring_block(source, context.rank, length)]
    return list(chunk_blocks(documents, context.chunks, context.chunks_of(source), length // 2, window))


class _SplitAttention(torch.autograd.Function):
    """Attention to the keys and values of all ranks, in the blocks of each part of them that arrives."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BNSH: Tensor,
        k_BKSH: Tensor,
        v_BKSH: Tensor,
        context: ContextAxis,
        blocks: Sequence[Sequence[Block]],
    ) -> Tensor:
        merged = MergedAttention.empty(q_BNSH)
        for keys_values, visible in zip(_arriving(k_BKSH, v_BKSH, context), blocks):
            merged.add(keys_values, visible)
        out_BNSH = merged.out_BNSH.to(q_BNSH.dtype)
        # This rank's own tensors only, not those received from other ranks.
        ctx.save_for_backward(q_BNSH, k_BKSH, v_BKSH, out_BNSH, merged.lse_BNS)
        ctx.context, ctx.blocks, ctx.flash, ctx.generator = context, blocks, merged.flash, merged.generator
        return out_BNSH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_BNSH, k_BKSH, v_BKSH, out_BNSH, lse_BNS = ctx.saved_tensors
        gradient, context = gradients[0].contiguous(), ctx.context
        merged = MergedAttention(q_BNSH, out_BNSH, lse_BNS, ctx.flash, ctx.generator)
        dq_BNSH = torch.zeros_like(q_BNSH, dtype=torch.float32)
        collected: Pending | None = None
        for keys_values, visible in zip(_arriving(k_BKSH, v_BKSH, context), ctx.blocks):
            # In a buffer of its own, so that the gradients of the previous ranks can arrive meanwhile.
            d_keys_values = torch.zeros_like(keys_values, dtype=torch.float32)
            merged.add_gradients_(gradient, dq_BNSH, d_keys_values, keys_values, visible)
            if context.exchange == "p2p":
                if collected is not None:
                    d_keys_values += collected.wait()
                collected = start_ring_exchange(d_keys_values, context.group, _GRADIENTS)
        if collected is not None:
            summed = collected.wait()
        else:
            parts = chunk_order(d_keys_values, context.size)
            summed = torch.empty_like(parts[0])
            collectives.reduce_scatter_into(summed, parts.flatten(0, 1), context.group)
        dk_BKSH, dv_BKSH = summed.to(k_BKSH.dtype)
        return dq_BNSH.to(k_BKSH.dtype), dk_BKSH, dv_BKSH, None, None


def _arriving(k_BKSH: Tensor, v_BKSH: Tensor, context: ContextAxis) -> Iterator[Tensor]:
    """Yields keys and values, [2, B, K, S, H]: those of one rank after the other, while the next ones are
    sent around the ring, or those of all ranks in sequence order.
    """
    keys_values = torch.stack((k_BKSH, v_BKSH))
    if context.exchange == "all_gather":
        parts = keys_values.new_empty(context.size, *keys_values.shape)
        collectives.all_gather_into(parts.flatten(0, 1), keys_values, context.group)
        yield gather_order(parts)
        return
    for _ in range(context.size - 1):
        incoming = start_ring_exchange(keys_values, context.group, _KEYS)
        yield keys_values
        keys_values = incoming.wait()
    yield keys_values


def _by_heads(
    q_BNSH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    group: Group,
    window: int | None,
    documents: DocumentStarts | None,
) -> Tensor:
    """Ulysses attention: all-to-all from heads to tokens and back."""
    ranks = group.size
    if k_BKSH.shape[1] % ranks:
        # With fewer key/value heads than ranks, heads are replicated.
        copies = ranks // k_BKSH.shape[1]
        k_BKSH, v_BKSH = (t.repeat_interleave(copies, dim=1) for t in (k_BKSH, v_BKSH))
    for_each = [t.unflatten(1, (ranks, -1)) for t in (q_BNSH, k_BKSH, v_BKSH)]
    # From all heads of this rank's tokens to its share of the heads of all tokens, in sequence order.
    exchanged = gather_order(_exchange(torch.cat(for_each, dim=2).movedim(1, 0), group))
    q_BNSH, k_BKSH, v_BKSH = exchanged.split([t.shape[2] for t in for_each], dim=1)
    attended = attend_whole(q_BNSH, k_BKSH, v_BKSH, window=window, documents=documents)
    return _exchange(chunk_order(attended, ranks), group).movedim(0, 1).flatten(1, 2)


def _exchange(parts: Tensor, group: Group) -> Tensor:
    """All-to-all of equal parts, one for each rank."""
    each = (1,) * group.size
    return all_to_all(parts, group, each, each)

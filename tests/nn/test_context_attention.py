"""Compares context-parallel attention with attention over whole sequences: output and gradients."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import pentatron.nn.attention_blocks as blocks_module
import pentatron.nn.context_attention as attention_module
from pentatron.nn.attention_blocks import Block
from pentatron.nn.context_attention import attend, gathered_blocks, ring_block
from pentatron.parallel.axes import ContextAxis, chunk_order
from pentatron.parallel.collectives import Group
from tests.harness import distributed

BATCH, LENGTH, WIDTH = 2, 32, 8
NAMES = ("output", "dq", "dk", "dv")
EXCHANGES = ("p2p", "all_gather", "a2a")


def axis(exchange: str) -> ContextAxis:
    return ContextAxis(Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD), exchange)


def drawn(heads: int, seed: int, dtype: torch.dtype) -> Tensor:
    # Large enough that some attention weights are near one, so that a wrong scale of a block shows.
    values = 2 * torch.randn(BATCH, heads, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype)


def own(x_BNSH: Tensor, context: ContextAxis) -> Tensor:
    return chunk_order(x_BNSH.detach(), context.size)[context.rank].clone()


def channels_apart(x_BNSH: Tensor) -> Tensor:
    """Returns the same values in another memory layout, as rotating heads of two channels does."""
    return x_BNSH.transpose(-1, 1).contiguous().transpose(-1, 1)


def distances(
    exchange: str, heads: int, groups: int, dtype: torch.dtype = torch.float32, apart: bool = False
) -> dict[str, float]:
    """Returns differences from attention over whole sequences in fp32, relative to the largest element."""
    context = axis(exchange)
    inputs = [drawn(heads, 1, dtype), drawn(groups, 2, dtype), drawn(groups, 3, dtype)]
    gradient = drawn(heads, 4, dtype)
    whole = [t.float().requires_grad_() for t in inputs]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    expected.backward(gradient.float())
    parts = [own(t, context).requires_grad_() for t in inputs]
    found = attend(*(channels_apart(t) if apart else t for t in parts), context)
    found.backward(own(gradient, context))
    assert found.dtype == dtype
    pairs = zip((found.detach(), *(t.grad for t in parts)), (expected, *(t.grad for t in whole)))
    return {
        name: float((ours.float() - own(theirs, context)).abs().max() / theirs.detach().abs().max())
        for name, (ours, theirs) in zip(NAMES, pairs)
    }


@distributed(world=2)
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (8, 2), (4, 1)])
def test_two_ranks_attend_as_one(exchange: str, heads: int, groups: int) -> None:
    found = distances(exchange, heads, groups)
    assert max(found.values()) < 1e-5, found


@distributed(world=4)
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(("heads", "groups"), [(8, 4), (8, 2)])
def test_four_ranks_attend_as_one(exchange: str, heads: int, groups: int) -> None:
    found = distances(exchange, heads, groups)
    assert max(found.values()) < 1e-5, found


@distributed(world=2)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_channels_need_not_lie_side_by_side(exchange: str) -> None:
    found = distances(exchange, 4, 2, apart=True)
    assert max(found.values()) < 1e-5, found


@distributed(world=4)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_in_bf16(exchange: str) -> None:
    found = distances(exchange, 8, 2, torch.bfloat16)
    assert max(found.values()) < 2e-2, found


@distributed(world=2)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_without_the_flash_kernel(exchange: str) -> None:
    """Kernels chosen in forward by a context manager must also run in backward, outside of it."""
    with sdpa_kernel([SDPBackend.MATH]):
        found = distances(exchange, 8, 2)
    assert max(found.values()) < 1e-5, found


def all_visible(source: int, rank: int, length: int) -> Block:
    block = ring_block(source, rank, length)
    return block if block.causal else Block(slice(0, length), block.keys, causal=False)


def unscaled(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    seen = lse > -math.inf
    out.copy_(torch.where(seen[..., None], (out + more) / 2, more))
    lse.copy_(torch.logaddexp(lse, more_lse))


def not_summed(part: Tensor, whole: Tensor, group: Group) -> None:
    part.copy_(whole.unflatten(0, (group.size, -1))[group.rank])


def unchanged(parts: Tensor) -> Tensor:
    return parts.movedim(0, -3).flatten(-3, -2)


# Planted bugs: the exchange, the module and function that is replaced, and the results that must differ.
MISTAKES: dict[str, tuple[str, Any, str, Callable[..., Any], tuple[str, ...]]] = {
    "a hidden block is visible": ("p2p", attention_module, "ring_block", all_visible, NAMES),
    "parts merged without their scale": ("p2p", blocks_module, "merge_", unscaled, ("output", "dq", "dk")),
    "gradients of keys not summed": (
        "all_gather",
        attention_module.collectives,
        "reduce_scatter_into",
        not_summed,
        ("dk", "dv"),
    ),
    "chunks left in the order of ranks": ("a2a", attention_module, "gather_order", unchanged, NAMES),
}


@distributed(world=2)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_seen(mistake: str) -> None:
    exchange, module, name, wrong, seen = MISTAKES[mistake]
    assert hasattr(module, name)
    setattr(module, name, wrong)
    found = distances(exchange, 8, 2)
    # One rank is enough: blocks of the last rank always have all of its queries, so it cannot show the first
    # bug.
    worst = torch.tensor([found[n] for n in seen])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    assert worst.min() > 1e-2, dict(zip(seen, worst.tolist()))


def pairs(block: Block) -> int:
    queries, keys = (s.stop - s.start for s in (block.queries, block.keys))
    return queries * (queries + 1) // 2 if block.causal else queries * keys


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_every_rank_has_the_same_work_and_none_is_left_out(ranks: int) -> None:
    """All ranks have equally many query-key pairs, at every step of the ring and in sum."""
    length = 8
    everything = (ranks * length) * (ranks * length + 1) // 2
    work = {
        rank: [pairs(ring_block((rank - step) % ranks, rank, length)) for step in range(ranks)]
        for rank in range(ranks)
    }
    assert len({tuple(steps) for steps in work.values()}) == 1
    assert sum(map(sum, work.values())) == everything
    gathered = [
        sum(map(pairs, gathered_blocks(ContextAxis(Group(rank, ranks)), length))) for rank in range(ranks)
    ]
    assert sum(gathered) == everything and len(set(gathered)) == 1


def test_only_own_tensors_are_kept_for_backward() -> None:
    """Saved memory does not grow with the keys of other ranks; the group has one rank here."""
    alone = ContextAxis(exchange="all_gather")
    q, k = drawn(4, 1, torch.float32).requires_grad_(), drawn(2, 2, torch.float32)
    out = attention_module._SplitAttention.apply(q, k, k, alone, [gathered_blocks(alone, q.shape[2])])
    kept = sum(t.numel() for t in out.grad_fn.saved_tensors)
    assert kept == 2 * q.numel() + 2 * k.numel() + q.numel() // WIDTH

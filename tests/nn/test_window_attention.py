"""Compares sliding-window attention with an explicit masked softmax, on one and several ranks.

Compares the output and all gradients.
"""

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import pentatron.nn.context_attention as attention_module
from pentatron.nn.attention_blocks import Block, block_mask
from pentatron.nn.context_attention import attend, chunk_blocks, gathered_blocks
from pentatron.parallel.axes import NO_CONTEXT_PARALLELISM, ContextAxis, chunk_order
from pentatron.parallel.collectives import Group
from tests.harness import distributed

BATCH, LENGTH, WIDTH, HEADS, GROUPS = 2, 32, 8, 8, 4
EXCHANGES = ("p2p", "all_gather", "a2a")
# The token itself; inside a chunk; a chunk and more; beyond two chunks; all but one token.
WINDOWS = (0, 2, 5, 8, 13, LENGTH - 2)


def drawn(heads: int, seed: int, length: int = LENGTH) -> Tensor:
    return 2 * torch.randn(BATCH, heads, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def written_out(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, window: int) -> Tensor:
    copies = q_BNSH.shape[1] // k_BKSH.shape[1]
    keys, values = (t.repeat_interleave(copies, dim=1) for t in (k_BKSH, v_BKSH))
    position = torch.arange(q_BNSH.shape[2])
    back = position[:, None] - position
    seen = (back >= 0) & (back <= window)
    scores = (q_BNSH @ keys.mT / WIDTH**0.5).masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ values


def own(x_BNSH: Tensor, context: ContextAxis) -> Tensor:
    return chunk_order(x_BNSH, context.size)[context.rank] if context.size > 1 else x_BNSH


def distance(context: ContextAxis, window: int, length: int = LENGTH) -> float:
    """Returns the largest difference from the explicit formula, relative to the largest element.

    Compares output and gradients. The largest element counts as 8 at least, because a token that sees only
    itself gives queries and keys no gradient.
    """
    inputs = [drawn(heads, seed, length) for seed, heads in enumerate((HEADS, GROUPS, GROUPS))]
    gradient = drawn(HEADS, 4, length)
    whole = [t.clone().requires_grad_() for t in inputs]
    expected = written_out(*whole, window)
    parts = [own(t, context).clone().requires_grad_() for t in inputs]
    found = attend(*parts, context, window=window)
    theirs = (expected.detach(), *torch.autograd.grad(expected, whole, gradient))
    ours = (found.detach(), *torch.autograd.grad(found, parts, own(gradient, context).clone()))
    pairs = zip(ours, theirs)
    return max(float((a - own(b, context)).abs().max() / b.abs().max().clamp(min=8)) for a, b in pairs)


def shared(exchange: str) -> ContextAxis:
    return ContextAxis(Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD), exchange)


@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_one_rank(kernel: SDPBackend) -> None:
    with sdpa_kernel([kernel]):
        for window in (0, 1, 31, 32, 5000):
            assert distance(NO_CONTEXT_PARALLELISM, window, 33) < 1e-5, window
        # The kernel reads keys in tiles, some of which are wholly outside the window.
        assert distance(NO_CONTEXT_PARALLELISM, 31, 600) < 1e-5


def test_a_window_that_covers_the_sequence_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []
    whole = attention_module.attend_whole

    def watched(
        q: Tensor, k: Tensor, v: Tensor, dropout: float, window: int | None, documents: None
    ) -> Tensor:
        asked.append(window)
        return whole(q, k, v, dropout, window)

    monkeypatch.setattr(attention_module, "attend_whole", watched)
    for window in (LENGTH - 1, LENGTH - 2):
        assert distance(NO_CONTEXT_PARALLELISM, window) < 1e-5
    assert asked == [None, LENGTH - 2]


@distributed(world=2)
def test_two_ranks() -> None:
    for exchange in EXCHANGES:
        for window in WINDOWS:
            assert distance(shared(exchange), window) < 1e-5, (exchange, window)


@distributed(world=4)
def test_four_ranks() -> None:
    for exchange in EXCHANGES:
        for window in WINDOWS:
            assert distance(shared(exchange), window) < 1e-5, (exchange, window)


@distributed(world=2)
def test_blocks_in_plain_operations() -> None:
    with sdpa_kernel([SDPBackend.MATH]):
        for window in WINDOWS:
            assert distance(shared("p2p"), window) < 1e-5, window


def one_key_more(_: None, queries: list[int], keys: list[int], size: int, window: int) -> list[Block]:
    return list(chunk_blocks(None, queries, keys, size, window + 1))


def partial_blocks_left_out(
    _: None, queries: list[int], keys: list[int], size: int, window: int
) -> list[Block]:
    blocks = chunk_blocks(None, queries, keys, size, window)
    return [b for b in blocks if b.causal or b.left is None]


def partial_blocks_seen_whole(
    _: None, queries: list[int], keys: list[int], size: int, window: int
) -> list[Block]:
    return [Block(b.queries, b.keys, b.causal) for b in chunk_blocks(None, queries, keys, size, window)]


@distributed(world=2)
@pytest.mark.parametrize(
    "mistake", [one_key_more, partial_blocks_left_out, partial_blocks_seen_whole], ids=lambda f: f.__name__
)
def test_mistakes_are_seen(mistake: Callable[..., list[Block]]) -> None:
    attention_module.chunk_blocks = mistake  # type: ignore[assignment]
    for exchange in ("p2p", "all_gather"):
        worst = torch.tensor(distance(shared(exchange), 5))
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        assert worst > 1e-2, exchange


@pytest.mark.parametrize("window", [0, 3, 4, 9, 14, 40])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_blocks_hold_every_visible_pair_once_and_are_no_larger_than_they_must_be(
    ranks: int, window: int
) -> None:
    size = 5
    total = 2 * ranks * size
    for rank in range(ranks):
        context = ContextAxis(Group(rank, ranks))
        positions = [n * size + i for n in context.chunks for i in range(size)]
        found = []
        for block in gathered_blocks(context, 2 * size, window):
            unseen = block_mask(block, torch.device("cpu"))
            rows = range(block.queries.start, block.queries.stop)
            columns = range(block.keys.start, block.keys.stop)
            seen = torch.ones(len(rows), len(columns), dtype=torch.bool) if unseen is None else ~unseen
            assert seen.any(0).all() and seen.any(1).all(), "a query or a key without a visible pair"
            found += [(positions[rows[i]], columns[j]) for i, j in seen.nonzero().tolist()]
        expected = [(p, t) for p in positions for t in range(total) if 0 <= p - t <= window]
        assert sorted(found) == sorted(expected)

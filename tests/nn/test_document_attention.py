"""Compares attention inside documents with an explicit masked softmax, on one and several ranks.

Compares the output and all gradients.
"""

import dataclasses
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import pentatron.nn.attention_blocks as blocks_module
import pentatron.nn.context_attention as attention_module
from pentatron.layout.documents import DocumentRange, DocumentStarts, document_ranges, group_equal_starts
from pentatron.nn.attention_blocks import Block, block_mask, chunk_blocks
from pentatron.nn.context_attention import attend
from pentatron.parallel.axes import NO_CONTEXT_PARALLELISM, ContextAxis, chunk_order
from pentatron.parallel.collectives import Group
from tests.harness import distributed

LENGTH, WIDTH, HEADS, GROUPS = 32, 8, 8, 4
EXCHANGES = ("p2p", "all_gather", "a2a")
# One document; boundaries at, before and after chunk ends of 4 and 8; one-token documents; two equal samples.
DOCUMENTS: DocumentStarts = (
    (0,),
    (0, 8, 24),
    (0, 1, 2, 15, 16, 17, 31),
    (0, 5, 27),
    (0, 5, 27),
)
WINDOWS = (None, 0, 2, 5, 13)


def drawn(heads: int, seed: int) -> Tensor:
    shape = (len(DOCUMENTS), heads, LENGTH, WIDTH)
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def numbers(documents: DocumentStarts) -> Tensor:
    """Returns the document number of each token, [B, S]."""
    begins = torch.tensor([[float(place in starts) for place in range(LENGTH)] for starts in documents])
    return begins.cumsum(1)


def visible(documents: DocumentStarts, window: int | None) -> Tensor:
    """Returns the mask of visible keys, [B, 1, S, S]."""
    place, number = torch.arange(LENGTH), numbers(documents)
    back = place[:, None] - place
    near = (back >= 0) & (back <= (LENGTH if window is None else window))
    return (near & (number[:, :, None] == number[:, None]))[:, None]


def written_out(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, seen: Tensor) -> Tensor:
    copies = q_BNSH.shape[1] // k_BKSH.shape[1]
    keys, values = (t.repeat_interleave(copies, dim=1) for t in (k_BKSH, v_BKSH))
    scores = (q_BNSH @ keys.mT / WIDTH**0.5).masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ values


def own(x_BNSH: Tensor, context: ContextAxis) -> Tensor:
    return chunk_order(x_BNSH, context.size)[context.rank] if context.size > 1 else x_BNSH


def distance(context: ContextAxis, window: int | None, documents: DocumentStarts = DOCUMENTS) -> float:
    """Returns the difference from the explicit formula, relative to the largest element (or 8)."""
    inputs = [drawn(heads, seed) for seed, heads in enumerate((HEADS, GROUPS, GROUPS))]
    gradient = drawn(HEADS, 4)
    whole = [t.clone().requires_grad_() for t in inputs]
    expected = written_out(*whole, visible(DOCUMENTS, window))
    parts = [own(t, context).clone().requires_grad_() for t in inputs]
    found = attend(*parts, context, window=window, documents=documents)
    theirs = (expected.detach(), *torch.autograd.grad(expected, whole, gradient))
    ours = (found.detach(), *torch.autograd.grad(found, parts, own(gradient, context).clone()))
    return max(
        float((a - own(b, context)).abs().max() / b.abs().max().clamp(min=8)) for a, b in zip(ours, theirs)
    )


def shared(exchange: str) -> ContextAxis:
    return ContextAxis(Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD), exchange)


@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize("together", [0, 4, 12, LENGTH])
def test_one_rank(kernel: SDPBackend, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes documents one by one, short documents jointly, and a whole sequence jointly."""
    monkeypatch.setattr(blocks_module, "MAX_JOINT_TOKENS", together)
    with sdpa_kernel([kernel]):
        for window in WINDOWS:
            assert distance(NO_CONTEXT_PARALLELISM, window) < 1e-5, window


@distributed(world=2)
@pytest.mark.parametrize("together", [0, 5, LENGTH])
def test_two_ranks(together: int) -> None:
    join_up_to(together)
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


def join_up_to(together: int) -> None:
    blocks_module.document_ranges = lambda starts, begin, end, *_: document_ranges(
        starts, begin, end, together
    )
    blocks_module.MAX_JOINT_TOKENS = together


def documents_ignored() -> None:
    attention_module.chunk_blocks = lambda documents, *given: chunk_blocks(((0,),) * len(documents), *given)
    blocks_module.document_ranges = lambda starts, begin, end, *_: [DocumentRange(begin, end)]


def cuts_ignored() -> None:
    """Planted bug: short documents that are computed jointly attend to earlier documents."""

    def without(*given: object) -> list[Block]:
        return [dataclasses.replace(block, cuts=()) for block in chunk_blocks(*given)]  # type: ignore[arg-type]

    def uncut(*given: object) -> list[DocumentRange]:
        return [DocumentRange(piece.begin, piece.end) for piece in document_ranges(*given)]  # type: ignore[arg-type]

    attention_module.chunk_blocks, blocks_module.document_ranges = without, uncut


def documents_of_the_first_sample() -> None:
    attention_module.chunk_blocks = lambda documents, *given: chunk_blocks(documents[1:2], *given)
    blocks_module.group_equal_starts = lambda documents: group_equal_starts(documents[1:2] * len(documents))


def documents_end_with_chunks() -> None:
    """Planted bug: a document is not continued into the chunk of another rank."""

    def apart(*given: object) -> list[Block]:
        return [block for block in chunk_blocks(*given) if block.causal]  # type: ignore[arg-type]

    attention_module.chunk_blocks = apart


MISTAKES = {
    "documents ignored": (documents_ignored, EXCHANGES),
    "cuts ignored": (cuts_ignored, EXCHANGES),
    "documents of another sample": (documents_of_the_first_sample, EXCHANGES),
    "documents end with chunks": (documents_end_with_chunks, ("p2p", "all_gather")),
}


@distributed(world=2)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_seen(mistake: str) -> None:
    plant, exchanges = MISTAKES[mistake]
    plant()
    for exchange in exchanges:
        worst = torch.tensor(distance(shared(exchange), None))
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        assert worst > 1e-2, exchange


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_blocks_hold_every_visible_pair_once_and_no_row_or_column_in_vain(
    ranks: int, window: int | None
) -> None:
    size = LENGTH // (2 * ranks)
    expected = visible(DOCUMENTS, window)[:, 0]
    found = torch.zeros_like(expected, dtype=torch.int64)
    for rank in range(ranks):
        context = ContextAxis(Group(rank, ranks))
        places = torch.tensor([n * size + i for n in context.chunks for i in range(size)])
        for block in chunk_blocks(DOCUMENTS, context.chunks, range(2 * ranks), size, window):
            rows, columns = places[block.queries], torch.arange(LENGTH)[block.keys]
            unseen = block_mask(block, torch.device("cpu"))
            seen = torch.ones(len(rows), len(columns), dtype=torch.bool) if unseen is None else ~unseen
            assert seen.any(0).all() and seen.any(1).all()
            for sample in range(len(DOCUMENTS))[block.samples]:
                found[sample, rows[:, None], columns] += seen
    assert torch.equal(found, expected.long())


def test_one_document_takes_the_causal_path(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    whole = attention_module.attend_whole

    def watched(*given: object) -> Tensor:
        asked.append(given[-1])
        return whole(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(attention_module, "attend_whole", watched)
    q = drawn(HEADS, 0)
    for documents in (((0,),) * len(DOCUMENTS), DOCUMENTS):
        attend(q, q, q, NO_CONTEXT_PARALLELISM, documents=documents)
    assert asked == [None, DOCUMENTS]


def test_short_neighbours_are_joined_and_long_documents_are_not() -> None:
    starts = (0, 3, 5, 25, 29, 30)
    assert document_ranges(starts, 0, 32, 8) == [
        DocumentRange(0, 5, (3,)),
        DocumentRange(5, 25),
        DocumentRange(25, 32, (4, 5)),
    ]
    assert document_ranges(starts, 4, 29, 0) == [
        DocumentRange(4, 5),
        DocumentRange(5, 25),
        DocumentRange(25, 29),
    ]


def test_attention_dropout_drops_inside_documents() -> None:
    """With values of one, outputs are the sums of the kept weights, whose mean is one."""
    torch.manual_seed(3)
    q, ones = drawn(HEADS, 0) / 4, torch.ones(len(DOCUMENTS), HEADS, LENGTH, WIDTH)
    found = attend(q, q, ones, NO_CONTEXT_PARALLELISM, dropout=0.5, documents=DOCUMENTS)
    assert abs(float(found.mean()) - 1) < 0.1 and float(found.std()) > 0.3

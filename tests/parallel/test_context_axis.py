"""The tokens of a context rank, and the exchanges between context ranks."""

import pytest
import torch
import torch.distributed as dist

from pentatron.layout.ranks import Grid
from pentatron.parallel.axes import ContextAxis, chunk_order, context_axis, gather_order
from pentatron.parallel.collectives import Group, all_to_all_into, start_ring_exchange
from pentatron.parallel.world import create_groups
from tests.harness import distributed


def parts(whole: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    return [ContextAxis(Group(rank, ranks)).own_sequence(whole) for rank in range(ranks)]


def test_rank_r_has_chunks_r_from_both_ends() -> None:
    tokens = torch.arange(8)[None]
    assert [p.tolist() for p in parts(tokens, 2)] == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    assert [p.tolist() for p in parts(tokens, 4)] == [[[0, 7]], [[1, 6]], [[2, 5]], [[3, 4]]]
    assert parts(tokens, 1)[0] is tokens


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_positions_are_those_of_the_tokens(ranks: int) -> None:
    length = 24
    for rank, tokens in enumerate(parts(torch.arange(length)[None], ranks)):
        axis = ContextAxis(Group(rank, ranks))
        assert axis.positions(length // ranks, torch.device("cpu")).tolist() == tokens[0].tolist()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_and_order_undo_each_other(ranks: int) -> None:
    whole = torch.arange(2 * 3 * 16 * 5).view(2, 3, 16, 5)
    cut = chunk_order(whole, ranks)
    assert torch.equal(gather_order(cut), whole)
    assert not torch.equal(gather_order(cut.roll(1, 0)), whole) or ranks == 1
    first_channel = [p.tolist() for p in parts(whole[0, :, :, 0], ranks)]
    assert cut[:, 0, :, :, 0].tolist() == first_channel


@distributed(world=2)
@pytest.mark.parametrize("through_host", [False, True])
def test_ring_exchange_of_non_contiguous_tensors(through_host: bool) -> None:
    group = Group(dist.get_rank(), 2, dist.group.WORLD, through_host)
    mine = torch.arange(6).view(2, 3) + 10 * group.rank
    arrived = start_ring_exchange(mine.mT, group, 1).wait()
    assert torch.equal(arrived, (torch.arange(6).view(2, 3) + 10 * (1 - group.rank)).mT)


@distributed(world=4)
def test_the_ring_passes_on_within_its_own_group() -> None:
    world = create_groups(Grid(context=2, data=2), dist.get_rank(), dist.get_rank(), torch.device("cpu"))
    axis = context_axis(world, "allgather")
    assert axis.exchange == "all_gather" and (axis.rank, axis.size) == (world.at.context, 2)
    mine = torch.full((3,), float(dist.get_rank()))
    other = dist.get_rank() ^ 1
    # Two exchanges at a time, matched by tag and waited for in the opposite order.
    first, second = start_ring_exchange(mine, axis.group, 1), start_ring_exchange(mine + 10, axis.group, 2)
    assert second.wait().tolist() == [other + 10.0] * 3
    assert first.wait().tolist() == [float(other)] * 3


@distributed(world=3)
@pytest.mark.parametrize("through_host", [False, True])
def test_all_to_all_deals_out_parts(through_host: bool) -> None:
    group = Group(dist.get_rank(), 3, dist.group.WORLD, through_host)
    sent = torch.tensor([[10 * group.rank + i] for i in range(3)])
    received = torch.empty_like(sent)
    all_to_all_into(received, sent, group)
    assert received.flatten().tolist() == [10 * i + group.rank for i in range(3)]

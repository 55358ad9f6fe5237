import dataclasses
import itertools

import pytest
import torch

from pentatron.parallel.buckets import ALIGNMENT, Bucket, Plan, Span, merge_views, plan_buckets, storage_bytes
from pentatron.parallel.collectives import Group
from pentatron.parallel.sharding import ShardedParameter, sharded_parameters
from tests.optim.tiny import Prescribed, fill, network, rows


def packed(shapes: dict[str, tuple[int, ...]], tied: tuple[str, ...] = ()) -> list[ShardedParameter]:
    return sharded_parameters(
        Prescribed(
            {
                n: (s, rows(s, (0, 0, s[0], (), ("embedding",) if n in tied else ())))
                for n, s in shapes.items()
            }
        )
    )


def plans(params: list[ShardedParameter], limit: int, rank: int = 0, replicas: int = 1) -> list[Plan]:
    """Plans buckets; dense parameters have this many `replicas`, experts a third as many."""
    groups = {"replicas": Group(rank, replicas), "expert_data": Group(rank // 3, max(1, replicas // 3))}
    return plan_buckets(params, limit, lambda axis: groups[axis])


def names(params: list[ShardedParameter], limit: int) -> list[list[str]]:
    return [[slot.param.name for slot in plan.slots] for plan in plans(params, limit)]


def test_buckets_are_filled_from_the_end_with_decayed_parameters_first() -> None:
    params = packed({"a": (8,), "b": (2, 8), "c": (8,), "d": (1, 8)})
    assert names(params, limit=32) == [["d", "b", "c"], ["a"]]
    assert names(params, limit=1000) == [["d", "b", "c", "a"]]
    assert [plan.decayed for plan in plans(params, 32)] == [24, 0]


def test_a_parameter_above_the_limit_is_alone() -> None:
    params = packed({"a": (8,), "huge": (10, 10), "b": (8,)})
    assert names(params, limit=32) == [["b"], ["huge"], ["a"]]


def test_alignment_counts_towards_the_limit() -> None:
    params = packed({"a": (1,), "b": (1,), "c": (1,)})
    assert names(params, limit=16) == [["c", "b"], ["a"]]


def test_each_tied_parameter_has_a_bucket_of_its_own() -> None:
    first = packed({"table": (4, 4), "positions": (4, 2), "norm": (8,), "x": (8,)}, ("table", "positions"))
    last = packed({"y": (8,), "table": (4, 4), "z": (8,), "positions": (4, 2)}, ("table", "positions"))
    assert names(first, limit=1000) == [["x", "norm"], ["positions"], ["table"]]
    assert names(last, limit=1000) == [["positions"], ["z"], ["table"], ["y"]]


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_slots_are_aligned_and_shares_tile_the_bucket(replicas: int) -> None:
    params = packed({"a": (3, 5), "b": (7,), "c": (4, 4), "d": (1,)})
    of_ranks = [plans(params, 40, rank, replicas) for rank in range(replicas)]
    for number, plan in enumerate(of_ranks[0]):
        assert plan.size % (ALIGNMENT * replicas) == 0
        assert all(slot.span.first % ALIGNMENT == 0 for slot in plan.slots)
        spans = sorted((slot.span.first, slot.span.last) for slot in plan.slots)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)) and spans[-1][1] <= plan.size
        shares = [found[number].own_share() for found in of_ranks]
        assert [s.first for s in shares] == [0, *(s.last for s in shares[:-1])]
        assert shares[-1].last == plan.size


def test_experts_have_buckets_and_shares_of_their_own() -> None:
    params = packed({"a": (8,), "experts": (2, 8, 4), "b": (8,), "more": (2, 8, 4), "c": (8,)})
    sparse = [
        dataclasses.replace(p, declared=dataclasses.replace(p.declared, replica_axis="expert_data"))
        if len(p.declared.shape) == 3
        else p
        for p in params
    ]
    found = plans(sparse, 1000, rank=4, replicas=6)
    assert [[slot.param.name for slot in plan.slots] for plan in found] == [
        ["c", "b", "a"],
        ["more", "experts"],
    ]
    assert [(plan.replica_group.rank, plan.replica_group.size) for plan in found] == [(4, 6), (1, 2)]
    assert found[1].own_share() == Span(64, 128)


def test_spans_meet() -> None:
    assert Span(2, 9).within(Span(5, 20)) == Span(5, 9)
    assert len(Span(2, 4).within(Span(6, 8))) == 0
    assert len(Span(6, 8).within(Span(2, 4))) == 0
    assert Span(5, 9).relative_to(Span(2, 4)) == Span(3, 7)


@pytest.mark.parametrize("sharded", [False, True])
def test_parameters_become_views_without_changing(sharded: bool) -> None:
    model, twin = network(), network()
    buckets = [Bucket(p, torch.float32, sharded) for p in plans(sharded_parameters(model), 100, 1, 2)]
    for p, q in zip(model.parameters(), twin.parameters()):
        assert torch.equal(p, q)
    for bucket in buckets:
        assert len(bucket.kept) == bucket.size // (2 if sharded else 1)
        assert bucket.own == Span(bucket.size // 2, bucket.size)
        bucket.weights.zero_()
        assert bucket.master.abs().sum() == 0, "in fp32 the weights are the master"
    assert all(p.abs().sum() == 0 for p in model.parameters())


@pytest.mark.parametrize("sharded", [False, True])
def test_bf16_weights_have_an_exact_master_and_nothing_more(sharded: bool) -> None:
    model, twin = network(), network()
    plan = plans(sharded_parameters(model), 1000, 0, 2)[0]
    bucket = Bucket(plan, torch.bfloat16, sharded)
    exact = torch.zeros(plan.size)
    values = dict(twin.named_parameters())
    for slot in plan.slots:
        slot.span.of(exact).copy_(values[slot.param.name].detach().flatten())
        assert torch.equal(slot.param.parameter, values[slot.param.name].bfloat16())
    assert torch.equal(bucket.master, bucket.kept.of(exact))
    assert storage_bytes([bucket.master]) == 4 * len(bucket.kept)
    assert storage_bytes([bucket.weights, *model.parameters()]) == 2 * bucket.size


def test_views_are_joined_across_alignment_and_nothing_else() -> None:
    flat = torch.arange(64.0)
    matrix = flat[32:].view(4, 8)
    views = [flat[8:13], flat[0:8].view(2, 4), flat[16:20], flat[28:30], matrix[:2], matrix[2:, :3]]
    runs = merge_views(flat, views)
    assert [(r.storage_offset(), r.numel(), r.is_contiguous()) for r in runs] == [
        (0, 20, True),
        (28, 20, True),
        (50 - 2, 6, False),
    ]
    # A slice with an offset in its storage is aligned relative to its own start.
    shard = flat[24:]
    assert [r.tolist() for r in merge_views(shard, [shard[0:2], shard[3:5], shard[16:17]])] == [
        [24.0, 25.0, 26.0, 27.0, 28.0],
        [40.0],
    ]


def test_views_that_are_whole_together_are_one_run() -> None:
    """In memory the gates of the experts alternate with the other halves of their matrices."""
    flat = torch.arange(100.0)
    experts = flat[8:80].view(4, 6, 3)
    gates, others = experts[:, :2], experts[:, 2:]
    assert not gates.is_contiguous() and not others.is_contiguous()
    runs = merge_views(flat, [others, flat[0:7], gates, flat[80:81]])
    assert [(r.storage_offset(), r.numel()) for r in runs] == [(0, 7), (8, 73)], "and what follows at once"
    for kept, count in (
        ([gates, others[:3]], 1),
        ([gates, others[1:]], 2),
        # Rows with other elements between them are not merged, even if those are fewer than the alignment.
        ([experts[:, :, :2]], 1),
        ([gates], 1),
        ([gates, experts[:, 3:]], 2),
        # As many runs as views, with fewer elements between them than the alignment.
        ([flat[:80].view(4, 20)[:, at : at + 4] for at in (0, 4, 8, 12)], 4),
        ([flat[:96].view(8, 12).t()[:, 2:4]], 1),
    ):
        found = merge_views(flat, kept)
        assert len(found) == count
        elements, expected = (torch.cat([t.flatten() for t in some]).sort()[0] for some in (found, kept))
        assert torch.equal(elements, expected)


def test_fragments_of_a_span_are_the_parameters_elements() -> None:
    model = fill(Prescribed({"w": ((4, 6), rows((9, 6), (5, 0, 2, (), ()), (1, 3, 1, (), ())))}))
    plan = plans(sharded_parameters(model), 100)[0]
    bucket = Bucket(plan, torch.float32, sharded=False)
    found = torch.zeros(9, 6)
    for first, last in ((0, 3), (3, 13), (13, 24)):
        span = Span(first, last)
        for _, fragment in plan.fragments(span, span.of(bucket.weights), first):
            index = tuple(slice(i, i + n) for i, n in zip(fragment.start, fragment.values.shape))
            found[index] += fragment.values
    expected = torch.zeros(9, 6)
    expected[5:7], expected[1] = model.w[:2].detach(), model.w[3].detach()
    assert torch.equal(found, expected) and expected.abs().sum() > 0

"""Messages between pipeline ranks: matching, lifetime of sent tensors, and agreement on sizes."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pentatron.layout.actions import Action, Kind, Schedule
from pentatron.layout.ranks import Grid
from pentatron.layout.schedules import (
    KINDS,
    forward_schedule,
    looped_placement,
    placement_for,
    training_schedule,
)
from pentatron.parallel.messages import (
    MOST_MICRO_BATCHES,
    MOST_STAGES,
    SENDS,
    MessageKey,
    Messages,
    acknowledged_sends,
    message_key,
    message_paths,
    message_tag,
    open_channels,
    open_messages,
    summarize_sends,
)
from pentatron.parallel.world import create_groups
from tests.harness import distributed, run_distributed
from tests.parallel.stage_network import CPU, Found, in_pipeline, one_process, pipeline_world
from tests.parallel.test_executor import assert_same

SENT = (
    Action(Kind.SEND_ACTIVATION, 0, 0, 1),
    Action(Kind.SEND_ACTIVATION, 0, 1, 1),
    Action(Kind.SEND_GRADIENT, 2, 0, 1),
)


def values_of(action: Action) -> torch.Tensor:
    return (
        torch.arange(4.0) + 100 * action.stage + 10 * action.micro_batch + (action.kind is Kind.SEND_GRADIENT)
    )


def received_backwards(tagged: bool = True, own_channels: bool = False) -> bool:
    """Rank 0 sends three messages, and rank 1 receives them in another order.

    Returns whether each receive got its own message.
    """
    world = pipeline_world()
    placement = looped_placement(2, 2)
    messages = (
        Messages(world.pipeline, open_channels(world, placement))
        if own_channels
        else open_messages(world, placement)
    )
    if not tagged:
        forget_tags()
    if world.pipeline.rank == 0:
        for action in SENT:
            messages.post_send(values_of(action), 1, action)
        messages.finish()
        return not messages.under_way
    order = (SENT[2], SENT[0], SENT[1]) if own_channels else SENT[::-1]
    kinds = {Kind.SEND_ACTIVATION: Kind.RECEIVE_ACTIVATION, Kind.SEND_GRADIENT: Kind.RECEIVE_GRADIENT}
    arrivals = [
        messages.post_receive((4,), torch.float32, CPU, 0, Action(kinds[a.kind], a.stage, a.micro_batch, 0))
        for a in order
    ]
    return all(torch.equal(arrival.wait(), values_of(a)) for arrival, a in zip(arrivals, order))


def forget_tags() -> None:
    """Removes tags, so that messages arrive in the order of their sends, as with NCCL."""
    for name in ("isend", "irecv"):
        original = getattr(dist, name)

        def untagged(*arguments: Any, original: Any = original, tag: int = 0, **options: Any) -> Any:
            return original(*arguments, **options)

        setattr(dist, name, untagged)


def test_tags_tell_messages_apart() -> None:
    assert run_distributed(received_backwards, 2) == [True, True]
    assert run_distributed(received_backwards, 2, tagged=False) == [True, False]


def test_without_tags_channels_keep_the_kinds_apart() -> None:
    assert run_distributed(received_backwards, 2, tagged=False, own_channels=True) == [True, True]


def test_every_tag_is_there_once_and_small_enough() -> None:
    parcels = list(itertools.product((False, True), range(40), range(200)))
    tags = {message_tag(parcel) for parcel in parcels}
    assert len(tags) == len(parcels) and 0 not in tags
    assert message_tag((True, MOST_STAGES - 1, MOST_MICRO_BATCHES - 1)) < 2**31
    with pytest.raises(AssertionError):
        message_tag((False, MOST_STAGES, 0))


LENGTHS = ((3, 1, 2, 5, 4, 2),)


def in_order_only(kind: str, virtual: int) -> Found:
    """Runs steps in which only the order on each one-way channel identifies messages."""
    world = pipeline_world()
    ranks = world.pipeline.size
    placement = placement_for(kind, ranks, virtual)
    messages = Messages(world.pipeline, open_channels(world, placement))
    forget_tags()
    training = [training_schedule(kind, ranks, virtual, len(now)) for now in LENGTHS]
    evaluation = forward_schedule(placement, len(LENGTHS[0]))
    return in_pipeline(world, training, evaluation, LENGTHS, messages=messages)


@pytest.mark.parametrize(
    ("kind", "ranks", "virtual"),
    [("1f1b", 2, 1), ("interleaved", 2, 2), ("interleaved", 4, 2), ("zbv", 3, 2), ("dualpipev", 3, 2)],
)
def test_the_order_on_each_channel_is_enough(kind: str, ranks: int, virtual: int) -> None:
    assert_same(
        run_distributed(in_order_only, ranks, kind=kind, virtual=virtual),
        one_process(ranks * virtual - 1, LENGTHS),
    )


@distributed(world=2)
def test_channels_wait_no_longer_than_collectives() -> None:
    """Tested by an all-reduce: messages of gloo keep the timeout that their group was created with."""
    world = pipeline_world()
    channels = open_channels(world, looped_placement(2, 1))
    world.set_timeout(0.5, channels.values())
    store = dist.distributed_c10d._get_default_store()
    if world.all_ranks.rank == 0:
        with pytest.raises(RuntimeError, match="Timed out"):
            dist.all_reduce(torch.zeros(1), group=channels[False, False])
        store.set("seen", "yes")
    else:
        store.wait(["seen"])


@distributed(world=4)
def test_channels_join_the_ranks_of_one_pipeline() -> None:
    rank = dist.get_rank()
    world = create_groups(Grid(tensor=2, pipeline=2), rank, rank, CPU)
    channels = open_channels(world, looped_placement(2, 1))
    assert set(channels) == set(itertools.product((False, True), repeat=2))
    assert len(set(map(id, channels.values()))) == 4
    for process_group in channels.values():
        assert dist.get_process_group_ranks(process_group) == [rank % 2, rank % 2 + 2]
    assert open_messages(world, looped_placement(2, 1)).channels == {}, "gloo has tags and needs no channels"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", range(2, 7))
def test_every_message_finds_its_ranks_connected(kind: str, ranks: int) -> None:
    """NCCL would otherwise connect two ranks at their first message, for which both block."""
    virtual = 1 if kind in ("gpipe", "1f1b") else 2
    training = training_schedule(kind, ranks, virtual, 2 * ranks)
    placement = training.placement
    taken = {
        (parcel[0], sender, receiver)
        for schedule in (training, forward_schedule(placement, 2 * ranks))
        for rank, actions in enumerate(schedule.actions)
        for action in actions
        if action.peer is not None
        for parcel in [message_key(action)]
        for sender, receiver in [(rank, action.peer) if action.kind in SENDS else (action.peer, rank)]
    }
    connected = message_paths(placement)
    assert set(connected) == taken and len(connected) == len(taken), "each once, and no more"


def test_ranks_connect_in_few_rounds() -> None:
    """A pair of ranks waits only for earlier pairs that share a rank with it.

    The number of rounds therefore does not grow with the pipeline.
    """
    for ranks in (4, 8, 16, 64):
        for placement in (looped_placement(ranks, 2), placement_for("zbv", ranks, 2)):
            free = dict.fromkeys(range(ranks), 0)
            for _, sender, receiver in message_paths(placement):
                free[sender] = free[receiver] = 1 + max(free[sender], free[receiver])
            assert max(free.values()) <= 8


def test_a_reply_proves_that_a_message_arrived() -> None:
    schedule = training_schedule("1f1b", 2, 1, 3)
    activation, gradient = (lambda m: (False, 0, m)), (lambda m: (True, 1, m))
    assert acknowledged_sends(schedule, 0) == {gradient(m): [activation(m)] for m in range(3)}
    # Rank 0 runs two forwards before it waits for a gradient, so the third activation acknowledges the first
    # gradient.
    assert acknowledged_sends(schedule, 1) == {
        activation(0): [],
        activation(1): [],
        activation(2): [gradient(0)],
    }


ALL_SCHEDULES = [
    *(training_schedule(k, r, 1, m) for k in ("gpipe", "1f1b") for r in (2, 3, 4) for m in (1, 4, 9)),
    *(training_schedule("interleaved", r, v, m) for r in (2, 3, 4) for v in (2, 3) for m in (4, 9)),
    *(training_schedule("zero-bubble", r, v, m) for r in (2, 4) for v in (1, 2) for m in (4, 9)),
    *(training_schedule("zbv", r, 2, m) for r in (2, 4) for m in (4, 9)),
    *(training_schedule("dualpipev", r, 2, 9) for r in (2, 4)),
]


@pytest.mark.parametrize(
    "schedule", ALL_SCHEDULES, ids=lambda s: f"{s.placement.ranks}x{s.placement.stages}x{s.micro_batches}"
)
def test_nothing_is_let_go_before_it_arrived(schedule: Schedule) -> None:
    """Compares with the messages that each sender has used before each of its sends."""
    used_when_sent = simulate(schedule)
    for rank in range(schedule.placement.ranks):
        proven = acknowledged_sends(schedule, rank)
        sends = {p for p, sender in senders(schedule).items() if sender == rank}
        named = [parcel for parcels in proven.values() for parcel in parcels]
        assert set(named) <= sends
        for gradients in (False, True):
            once = [p for reply, parcels in proven.items() if reply[0] == gradients for p in parcels]
            assert len(once) == len(set(once)), "two replies of one kind prove the same"
        for reply, parcels in proven.items():
            assert set(parcels) <= used_when_sent[reply]
        activations = {p for p in sends if not p[0]}
        assert activations <= set(named), "the gradient of an activation proves that it arrived"


def senders(schedule: Schedule) -> dict[MessageKey, int]:
    return {
        (action.kind is Kind.SEND_GRADIENT, action.stage, action.micro_batch): rank
        for rank, actions in enumerate(schedule.actions)
        for action in actions
        if action.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
    }


def simulate(schedule: Schedule) -> dict[MessageKey, set[MessageKey]]:
    """Returns for each message those that its sender had used before sending it."""
    found: dict[MessageKey, set[MessageKey]] = {}
    for actions in schedule.actions:
        used: set[MessageKey] = set()
        for action in actions:
            if action.kind is Kind.FORWARD:
                used.add((False, action.stage - 1, action.micro_batch))
            elif action.kind in (Kind.BACKWARD, Kind.INPUT):
                used.add((True, action.stage + 1, action.micro_batch))
            elif action.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT):
                found[action.kind is Kind.SEND_GRADIENT, action.stage, action.micro_batch] = set(used)
    return found


@distributed(world=2)
def test_sizes_are_agreed_on() -> None:
    messages = open_messages(pipeline_world(), looped_placement(2, 1))
    peer = 1 - dist.get_rank()
    shapes = [(3, 2, 5), (1, 2, 5)]
    same = summarize_sends(shapes, torch.float32)
    messages.agree({peer: same}, {peer: same})
    for other, dtype in (
        (shapes[:1], torch.float32),
        (shapes[::-1], torch.float32),
        (shapes, torch.bfloat16),
    ):
        expected = summarize_sends(other, dtype)
        assert expected != same
        with pytest.raises(RuntimeError, match="must see the same micro-batches"):
            messages.agree({peer: same}, {peer: expected})
    messages.finish()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gloo_carries_the_tensors_of_a_gpu_through_host_memory() -> None:
    assert run_distributed(through_host, 2) == [True, True]


def through_host() -> bool:
    device = torch.device("cuda", 0)
    rank = dist.get_rank()
    world = create_groups(Grid(pipeline=2), rank, 0, device)
    assert world.pipeline.through_host
    messages = open_messages(world, looped_placement(2, 1))
    sent = torch.arange(6.0, device=device).view(2, 3).t().bfloat16()
    messages.post_send(sent, 1 - rank, Action(Kind.SEND_ACTIVATION, rank, 3, 1 - rank))
    arrival = messages.post_receive(
        (3, 2), torch.bfloat16, device, 1 - rank, Action(Kind.RECEIVE_ACTIVATION, 1 - rank, 3, 1 - rank)
    )
    found = arrival.wait()
    messages.finish()
    return found.device == device and torch.equal(found, sent)

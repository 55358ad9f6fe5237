"""Tensors that travel from one pipeline rank to another.

A send never waits: its tensor is kept alive until it is known to have arrived. Gloo matches messages by a tag made of
their content (kind, stage, micro-batch), so that none can be taken for another. NCCL has no tags and runs all messages
of two ranks in one group in the order they were posted, both directions together: a rank that posts a receive before
a send while its peer does the same would wait for ever. There every kind and direction has a process group of its own,
which makes each channel one-way and ordered; that the schedule's order suits such channels is what
`pentatron.layout.check` proves.
"""

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pentatron.layout.actions import Action, Kind, Placement, Schedule
from pentatron.parallel.collectives import Group
from pentatron.parallel.rank_status import Call
from pentatron.parallel.shards import Shape
from pentatron.parallel.world import World
from pentatron.text import plural

# What a message carries, whichever end speaks of it: whether it is a gradient, the stage it comes from, the micro-batch.
Parcel = tuple[bool, int, int]
# A one-way channel: whether it carries gradients, and whether it leads to the higher rank.
Channel = tuple[bool, bool]
# Whether it is gradients that take it, the pipeline rank they come from, and the one they go to.
Route = tuple[bool, int, int]

SENDS = (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
RECEIVES = (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT)
GRADIENTS = (Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT)
MOST_STAGES = 1 << 12
MOST_MICRO_BATCHES = 1 << 17
# The announcement of a step; parcels are numbered from 1.
ANNOUNCEMENT_TAG = 0


def parcel_of(action: Action) -> Parcel:
    return action.kind in GRADIENTS, action.stage, action.micro_batch


def tag_of(parcel: Parcel) -> int:
    """A number no other parcel of a step has, below 2³¹."""
    gradient, stage, micro_batch = parcel
    assert stage < MOST_STAGES and micro_batch < MOST_MICRO_BATCHES, "the tag has no room for more"
    return 1 + gradient + 2 * (stage + MOST_STAGES * micro_batch)


@dataclass(frozen=True)
class Arrival:
    """A tensor that is on its way to this rank."""

    buffer: Tensor
    work: dist.Work
    device: torch.device
    group: Group
    call: Call | None = None

    def wait(self) -> Tensor:
        with self.group.standing(self.buffer, "message", self.call):
            self.work.wait()
        return self.buffer.to(self.device)


@dataclass(frozen=True)
class Announced:
    """The activations one rank sends another in a step: how many, how many elements in all, and a checksum of their
    dtype and every shape."""

    messages: int
    elements: int
    checksum: int

    def __str__(self) -> str:
        return f"{self.messages} {plural(self.messages, 'activation')} of {self.elements} elements in all"


def announced(shapes: Sequence[Shape], dtype: torch.dtype) -> Announced:
    text = f"{dtype} {[tuple(shape) for shape in shapes]}"
    return Announced(len(shapes), sum(map(math.prod, shapes)), zlib.crc32(text.encode()))


class Messages:
    """This rank's messages to and from the other ranks of its pipeline.

    `channels` holds the process groups of one-way channels where the backend needs them; without them everything
    travels in the pipeline's own group, told apart by tags.
    """

    def __init__(self, group: Group, channels: Mapping[Channel, Any] | None = None) -> None:
        self._group = group
        self.channels = channels or {}
        # Sent tensors that are still kept alive.
        self.under_way: dict[Parcel, tuple[Tensor, dist.Work]] = {}
        self._announcements: list[tuple[Tensor, dist.Work]] = []

    def post_send(self, tensor: Tensor, peer: int, action: Action) -> None:
        """Sends while the caller goes on."""
        self._drop_finished()
        parcel = parcel_of(action)
        assert parcel not in self.under_way, f"{action} is sent twice"
        tensor = tensor.contiguous()
        if self._group.through_host:
            tensor = tensor.cpu()
        channel = self._process_group(action, peer > self._group.rank)
        self.under_way[parcel] = (tensor, _start_send(tensor, channel, peer, tag_of(parcel)))

    def post_receive(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, peer: int, action: Action
    ) -> Arrival:
        """Makes room for a tensor and lets it come while the caller goes on."""
        place = torch.device("cpu") if self._group.through_host else device
        buffer = torch.empty(shape, dtype=dtype, device=place)
        channel = self._process_group(action, peer < self._group.rank)
        work = _start_receive(buffer, channel, peer, tag_of(parcel_of(action)))
        what = "gradients" if action.kind in GRADIENTS else "activations"
        call = Call(
            f"{what} of micro-batch {action.micro_batch} from pipeline rank {peer}",
            self._group.name,
            0,
            buffer.numel(),
        )
        return Arrival(buffer, work, device, self._group, call)

    def delivered(self, parcel: Parcel) -> None:
        """Lets go of a sent tensor that is known to have arrived."""
        if parcel in self.under_way:
            self._wait_for(*self.under_way.pop(parcel))

    def finish(self) -> None:
        """Waits for all that is still under way."""
        for parcel in list(self.under_way):
            self.delivered(parcel)
        while self._announcements:
            self._wait_for(*self._announcements.pop())

    def _wait_for(self, tensor: Tensor, work: dist.Work) -> None:
        with self._group.standing(tensor, "message", Call("a message", self._group.name, 0, tensor.numel())):
            work.wait()

    def agree(self, sends: Mapping[int, Announced], receives: Mapping[int, Announced]) -> None:
        """Compares what this rank is going to send to each peer, and expects of each, with what they expect and send.

        Gloo leaves the rest of a buffer that is too large as it was and ends the process when one is too small. A size
        sent along with each message would cost as much as the message, so the sizes of a step are compared once. Only
        a receiver waits here, for a message its peer sends before anything else.
        """
        # In host memory always: every process group can send that, and reading it stops no GPU.
        everyone = self._group.process_group
        for peer, what in sends.items():
            numbers = torch.tensor(astuple(what))
            self._announcements.append((numbers, _start_send(numbers, everyone, peer, ANNOUNCEMENT_TAG)))
        incoming = {peer: torch.empty(3, dtype=torch.int64) for peer in receives}
        works = [
            _start_receive(numbers, everyone, peer, ANNOUNCEMENT_TAG) for peer, numbers in incoming.items()
        ]
        for numbers, work in zip(incoming.values(), works):
            self._wait_for(numbers, work)
        for peer, numbers in incoming.items():
            found, expected = Announced(*numbers.tolist()), receives[peer]
            if found != expected:
                raise RuntimeError(
                    f"pipeline rank {peer} sends {found} in this step, but rank {self._group.rank} expects {expected}"
                    f"{'' if str(found) != str(expected) else ' in other shapes or another dtype'}: the ranks of a "
                    f"pipeline must see the same micro-batches"
                )

    def _process_group(self, action: Action, upward: bool) -> Any:
        return self.channels.get((action.kind in GRADIENTS, upward), self._group.process_group)

    def _drop_finished(self) -> None:
        """NCCL says when a send is done; gloo does only when asked to wait, so there `delivered` has to tell."""
        for parcel, (_, work) in list(self.under_way.items()):
            if work.is_completed():
                del self.under_way[parcel]


def _start_send(tensor: Tensor, process_group: Any, peer: int, tag: int) -> dist.Work:
    work = dist.isend(tensor, group=process_group, group_dst=peer, tag=tag)
    assert work is not None, "this rank is no member of the group"
    return work


def _start_receive(buffer: Tensor, process_group: Any, peer: int, tag: int) -> dist.Work:
    work = dist.irecv(buffer, group=process_group, group_src=peer, tag=tag)
    assert work is not None, "this rank is no member of the group"
    return work


def open_messages(world: World, placement: Placement) -> Messages:
    """`placement`: of all schedules that are to run. Every rank of the world must call this: it may make process groups."""
    if world.pipeline.size > 1 and world.device.type == "cuda" and not world.pipeline.through_host:
        return Messages(world.pipeline, open_channels(world, placement))
    return Messages(world.pipeline)


def open_channels(world: World, placement: Placement) -> dict[Channel, Any]:
    """One process group for each one-way channel, with all connections made that messages will need.

    NCCL connects two ranks at their first message and both wait for it. Left to the schedule, where receives are posted
    ahead, ranks would wait in a circle; so all connect here, in one order.
    """
    channels: dict[Channel, Any] = {}
    for channel in itertools.product((False, True), (False, True)):
        for members in world.grid.groups("pipeline"):
            process_group = dist.new_group(list(members), timeout=world.timeout)
            if world.everyone.rank in members:
                channels[channel] = process_group
    for route in routes(placement):
        _connect(channels, route, world.pipeline, world.device)
    return channels


def routes(placement: Placement) -> list[Route]:
    """The ways that messages take, in an order in which pairs that share no rank follow each other: they connect at the same time."""
    found: set[Route] = set()
    for one, next_one in itertools.pairwise(placement.rank_of):
        if one != next_one:
            found |= {(False, one, next_one), (True, next_one, one)}
    return sorted(found, key=lambda route: (route[0], route[1] > route[2], min(route[1:]) % 2, route))


def _connect(channels: Mapping[Channel, Any], route: Route, group: Group, device: torch.device) -> None:
    """Sends one element."""
    gradient, sender, receiver = route
    channel = channels[gradient, receiver > sender]
    element = torch.zeros(1, device=device)
    if group.rank == sender:
        dist.send(element, group=channel, group_dst=receiver)
    elif group.rank == receiver:
        dist.recv(element, group=channel, group_src=sender)


def deliveries(schedule: Schedule, rank: int) -> dict[Parcel, list[Parcel]]:
    """For every message a rank receives, those of its own that must have arrived before that one was sent.

    The sender of the message had by then finished computations that needed them.
    """
    proven: dict[Parcel, list[Parcel]] = {}
    for peer in {action.peer for action in schedule.actions[rank] if action.peer is not None}:
        proven.update(_replies(schedule.actions[peer], rank))
    return proven


def _replies(actions: Sequence[Action], rank: int) -> Iterator[tuple[Parcel, list[Parcel]]]:
    """What each message of a peer to `rank` proves to have arrived there since the one before of its kind.

    Activations and gradients each prove it: which of the two is taken first is up to this rank's schedule.
    """
    needed_by: dict[tuple[Kind, int, int], Parcel] = {}
    arrived: dict[Kind, list[Parcel]] = {kind: [] for kind in SENDS}
    for action in actions:
        if action.peer == rank and action.kind in RECEIVES:
            needed_by[_consumer(action)] = parcel_of(action)
        elif action.peer == rank and action.kind in SENDS:
            yield parcel_of(action), arrived[action.kind]
            arrived[action.kind] = []
        else:
            # The input half of a backward is what needs the message.
            kind = Kind.BACKWARD if action.kind is Kind.INPUT else action.kind
            computation = (kind, action.stage, action.micro_batch)
            if computation in needed_by:
                parcel = needed_by.pop(computation)
                for proven in arrived.values():
                    proven.append(parcel)


def _consumer(receive: Action) -> tuple[Kind, int, int]:
    """The computation that waits for a received message."""
    if receive.kind is Kind.RECEIVE_ACTIVATION:
        return Kind.FORWARD, receive.stage + 1, receive.micro_batch
    return Kind.BACKWARD, receive.stage - 1, receive.micro_batch

"""Point-to-point messages between pipeline ranks: activations and gradients.

A send is asynchronous; its tensor is kept alive until it is known to have arrived. Gloo matches messages by
tag, which encodes kind, stage and micro-batch. NCCL ignores tags and runs all messages of two ranks in one
process group in the order they were posted, both directions together: two ranks that both post a receive
before a send would deadlock. With NCCL every kind and direction therefore has its own process group, which
makes each channel one-way and ordered. `pentatron.layout.check` proves that a schedule does not deadlock on
such channels.
"""

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pentatron.layout.actions import RECEIVES, SENDS, Action, Kind, Placement, Schedule
from pentatron.parallel.collectives import Group, Pending
from pentatron.parallel.rank_status import PendingCall
from pentatron.parallel.sharding import Shape
from pentatron.parallel.world import World
from pentatron.text import plural

# Identifies a message on both ends: whether it is a gradient, the stage that computed it, the micro-batch.
MessageKey = tuple[bool, int, int]
# A one-way channel: whether it carries gradients, and whether it leads to the higher rank.
Channel = tuple[bool, bool]
# A message path: whether it carries gradients, the pipeline rank of the sender, that of the receiver.
Route = tuple[bool, int, int]

GRADIENTS = (Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT)
MOST_STAGES = 1 << 12
MOST_MICRO_BATCHES = 1 << 17
# The tag of the announcement of a step; parcels are numbered from 1.
ANNOUNCEMENT_TAG = 0


def message_key(action: Action) -> MessageKey:
    return action.kind in GRADIENTS, action.stage, action.micro_batch


def message_tag(parcel: MessageKey) -> int:
    """Returns a tag below 2³¹ that is unique within a step."""
    gradient, stage, micro_batch = parcel
    assert stage < MOST_STAGES and micro_batch < MOST_MICRO_BATCHES, "the tag has too few bits"
    return 1 + gradient + 2 * (stage + MOST_STAGES * micro_batch)


@dataclass(frozen=True)
class SendSummary:
    """Summary of the activations one rank sends another in a step: their number, the total number of
    elements, and a checksum of their dtype and shapes."""

    messages: int
    elements: int
    checksum: int

    def __str__(self) -> str:
        return f"{self.messages} {plural(self.messages, 'activation')} of {self.elements} elements in all"


def summarize_sends(shapes: Sequence[Shape], dtype: torch.dtype) -> SendSummary:
    text = f"{dtype} {[tuple(shape) for shape in shapes]}"
    return SendSummary(len(shapes), sum(map(math.prod, shapes)), zlib.crc32(text.encode()))


class Messages:
    """This rank's messages to and from the other ranks of its pipeline.

    `channels` holds the process groups of one-way channels if the backend needs them; otherwise all messages
    use the group of the pipeline and are matched by tags.
    """

    def __init__(self, group: Group, channels: Mapping[Channel, Any] | None = None) -> None:
        self._group = group
        self.channels = channels or {}
        # Tensors being sent, kept alive until the send has completed.
        self.under_way: dict[MessageKey, Pending] = {}
        self._announcements: list[Pending] = []

    def post_send(self, tensor: Tensor, peer: int, action: Action) -> None:
        """Starts an asynchronous send."""
        # NCCL reports completed sends. Gloo does so only in `wait`, so there `delivered` drops the tensor.
        for sent, pending in list(self.under_way.items()):
            if pending.works[0].is_completed():
                del self.under_way[sent]
        parcel = message_key(action)
        assert parcel not in self.under_way, f"{action} is sent twice"
        tensor = (tensor.cpu() if self._group.through_host else tensor).contiguous()
        process_group = self._process_group(action, peer > self._group.rank)
        sending = dist.isend(tensor, group=process_group, group_dst=peer, tag=message_tag(parcel))
        self.under_way[parcel] = self._pending(tensor, sending)

    def post_receive(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, peer: int, action: Action
    ) -> Pending:
        """Allocates a buffer and starts an asynchronous receive into it."""
        memory = torch.device("cpu") if self._group.through_host else device
        buffer = torch.empty(shape, dtype=dtype, device=memory)
        process_group = self._process_group(action, peer < self._group.rank)
        tag = message_tag(message_key(action))
        pending = self._pending(buffer, dist.irecv(buffer, group=process_group, group_src=peer, tag=tag))
        content = "gradients" if action.kind in GRADIENTS else "activations"
        what = f"{content} of micro-batch {action.micro_batch} from pipeline rank {peer}"
        call = PendingCall(what, self._group.name, 0, buffer.numel())
        return replace(pending, call=call, device=device)

    def delivered(self, parcel: MessageKey) -> None:
        """Releases a sent tensor that is known to have arrived."""
        if parcel in self.under_way:
            self.under_way.pop(parcel).wait()

    def finish(self) -> None:
        """Waits for all sends that have not completed."""
        for parcel in list(self.under_way):
            self.delivered(parcel)
        while self._announcements:
            self._announcements.pop().wait()

    def _pending(self, tensor: Tensor, work: dist.Work | None) -> Pending:
        assert work is not None, "this rank is not a member of the group"
        call = PendingCall("a message", self._group.name, 0, tensor.numel())
        return Pending(tensor, self._group, [work], call, "message")

    def agree(self, sends: Mapping[int, SendSummary], receives: Mapping[int, SendSummary]) -> None:
        """Compares the announced sends and receives of this rank with those of its peers.

        With a wrong size, gloo would leave the rest of a larger buffer unchanged and abort the process on a
        smaller one. A size sent with each message would cost as much as the message, so the sizes of a step
        are compared once. Only the receiver waits, for the first message of its peer.
        """
        # In host memory: every process group can send that, and reading it does not synchronize a GPU.
        process_group = self._group.process_group
        for peer, announcement in sends.items():
            numbers = torch.tensor(astuple(announcement))
            sent = dist.isend(numbers, group=process_group, group_dst=peer, tag=ANNOUNCEMENT_TAG)
            self._announcements.append(self._pending(numbers, sent))
        incoming = {}
        for peer in receives:
            numbers = torch.empty(3, dtype=torch.int64)
            work = dist.irecv(numbers, group=process_group, group_src=peer, tag=ANNOUNCEMENT_TAG)
            incoming[peer] = self._pending(numbers, work)
        for peer, numbers in {peer: pending.wait() for peer, pending in incoming.items()}.items():
            announced, expected = SendSummary(*numbers.tolist()), receives[peer]
            if announced != expected:
                raise RuntimeError(
                    f"pipeline rank {peer} sends {announced} in this step, but rank {self._group.rank} expects {expected}"
                    f"{'' if str(announced) != str(expected) else ' in other shapes or another dtype'}: the ranks of a "
                    f"pipeline must see the same micro-batches"
                )

    def _process_group(self, action: Action, upward: bool) -> Any:
        return self.channels.get((action.kind in GRADIENTS, upward), self._group.process_group)


def open_messages(world: World, placement: Placement) -> Messages:
    """Returns the messages of a pipeline; collective, as it may create process groups.

    `placement` is that of all schedules that will run.
    """
    own_channels = world.pipeline.size > 1 and world.uses_nccl
    return Messages(world.pipeline, open_channels(world, placement) if own_channels else None)


def open_channels(world: World, placement: Placement) -> dict[Channel, Any]:
    """Creates one process group for each one-way channel and connects all pairs of ranks that will use it.

    NCCL connects two ranks at their first message, for which both wait. Schedules post receives early, so
    connecting on demand would deadlock; here all ranks connect in one global order.
    """
    channels: dict[Channel, Any] = {}
    for channel in itertools.product((False, True), (False, True)):
        for members in world.grid.groups("pipeline"):
            process_group = dist.new_group(list(members), timeout=world.timeout)
            if world.all_ranks.rank in members:
                channels[channel] = process_group
    # One element between two ranks makes NCCL connect them.
    element = torch.zeros(1, device=world.device)
    for gradient, sender, receiver in message_paths(placement):
        process_group = channels[gradient, receiver > sender]
        if world.pipeline.rank == sender:
            dist.send(element, group=process_group, group_dst=receiver)
        elif world.pipeline.rank == receiver:
            dist.recv(element, group=process_group, group_src=sender)
    return channels


def message_paths(placement: Placement) -> list[Route]:
    """Returns the message paths in an order in which consecutive pairs of ranks can connect concurrently."""
    paths: set[Route] = set()
    for source, target in itertools.pairwise(placement.rank_of):
        if source != target:
            paths |= {(False, source, target), (True, target, source)}
    return sorted(paths, key=lambda route: (route[0], route[1] > route[2], min(route[1:]) % 2, route))


def acknowledged_sends(schedule: Schedule, rank: int) -> dict[MessageKey, list[MessageKey]]:
    """Maps every message a rank receives to those of its sends which that message acknowledges.

    The sender of the message had by then finished computations that needed them.
    """
    received: dict[MessageKey, list[MessageKey]] = {}
    for peer in {action.peer for action in schedule.actions[rank] if action.peer is not None}:
        received.update(_acknowledgements(schedule.actions[peer], rank))
    return received


def _acknowledgements(actions: Sequence[Action], rank: int) -> Iterator[tuple[MessageKey, list[MessageKey]]]:
    """Yields each message of a peer to `rank` with the messages it acknowledges since the previous one of its
    kind.

    Activations and gradients acknowledge separately: this rank's schedule decides which of the two it takes
    first.
    """
    needed_by: dict[tuple[Kind, int, int], MessageKey] = {}
    arrived: dict[Kind, list[MessageKey]] = {kind: [] for kind in SENDS}
    for action in actions:
        if action.peer == rank and action.kind in RECEIVES:
            is_forward = action.kind is Kind.RECEIVE_ACTIVATION
            consumer = (Kind.FORWARD, action.stage + 1) if is_forward else (Kind.BACKWARD, action.stage - 1)
            needed_by[*consumer, action.micro_batch] = message_key(action)
        elif action.peer == rank and action.kind in SENDS:
            yield message_key(action), arrived[action.kind]
            arrived[action.kind] = []
        else:
            # Of a backward in two halves, the input half consumes the message.
            kind = Kind.BACKWARD if action.kind is Kind.INPUT else action.kind
            delivered = needed_by.pop((kind, action.stage, action.micro_batch), None)
            if delivered is not None:
                for unacknowledged in arrived.values():
                    unacknowledged.append(delivered)

"""Every collective the package uses, in one place.

A group of one returns at once, so that the callers have one code path. Torch's names differ between versions; that
is settled here.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pentatron.errors import AgreedError, UserError, file_sentence
from pentatron.parallel.encoding import ForgedMessage, encode, length_of_rest, opened, sealed
from pentatron.parallel.rank_status import Call, Whereabouts

# How long this rank stands still for others, measured where it does: in collectives and for messages.
#
# A rank that is slow makes all others wait in the next collective, so the time of a step is nearly the same
# on all of them; without the waiting it shows who is slow. On a CPU the caller itself stands still and its
# clock is read. On a GPU the caller only queues work; there an event before and one after, on the stream that
# computes, tell how long that stream stood still. Communication that runs beside computation costs nothing
# and is not counted.


# Messages are those between the stages of a pipeline; waiting for one includes the bubble.
Cause = Literal["collective", "message"]


@dataclass(frozen=True)
class Waited:
    """Seconds."""

    collectives: float
    messages: float

    @property
    def seconds(self) -> float:
        return self.collectives + self.messages


class Waits:
    """Counts between `begin` and `end`; at other times nothing is measured and nothing is kept.

    `whereabouts` is told of every wait, at all times: somebody may want to know for whom this rank waits.
    """

    def __init__(self, whereabouts: Whereabouts | None = None) -> None:
        self.whereabouts = whereabouts or Whereabouts()
        self._counting = False
        # Inside a wait that is counted already.
        self._inside = False
        self._seconds: dict[Cause, float] = {"collective": 0.0, "message": 0.0}
        self._events: list[tuple[Cause, Any, Any]] = []

    def begin(self) -> None:
        self._counting = True
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._events.clear()

    def end(self) -> Waited:
        """On a GPU, waits until what was counted has happened."""
        self._counting = False
        for cause, before, after in self._events:
            after.synchronize()
            self._seconds[cause] += before.elapsed_time(after) / 1000
        self._events.clear()
        return Waited(self._seconds["collective"], self._seconds["message"])

    @contextmanager
    def standing(
        self, device: torch.device, cause: Cause = "collective", call: Call | None = None
    ) -> Iterator[None]:
        """Around whatever may have to wait; `device` is where the tensor lies that travels."""
        with self.whereabouts.inside(call):
            if self._counting and not self._inside:
                with self._counted(device, cause):
                    yield
            else:
                yield

    @contextmanager
    def _counted(self, device: torch.device, cause: Cause) -> Iterator[None]:
        self._inside = True
        try:
            if device.type == "cuda":
                before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                before.record()
                yield
                after.record()
                self._events.append((cause, before, after))
            else:
                started = time.perf_counter()
                yield
                self._seconds[cause] += time.perf_counter() - started
        finally:
            self._inside = False


T = TypeVar("T")


# Torch 2.13 renamed them and warns about the old names; 2.11 knows only those.
_GATHER_NAME = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_SCATTER_NAME = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
# Torch compares the operations of a batch with these by identity.
_SEND, _RECEIVE = dist.isend, dist.irecv
# Values are exchanged in blocks of this many bytes; only longer ones need a second collective.
_BLOCK = 1024


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> Any: ...


@dataclass(frozen=True)
class Group:
    """Some ranks that talk to each other, and this rank's place among them.

    `through_host`: messages between two ranks must lie in host memory (gloo cannot send a GPU's).
    `waits`: where the time is counted that this rank stands still for the others. `name`: for whoever looks where a rank
    hangs. `key`: of the HMACs that exchanged values carry; None where the job has no secret.
    """

    rank: int
    size: int
    process_group: Any = None
    through_host: bool = False
    waits: Waits | None = field(default=None, compare=False, repr=False)
    name: str = field(default="a group", compare=False)
    key: bytes | None = field(default=None, compare=False, repr=False)

    def begins(self, what: str, tensor: Tensor | None = None) -> Call | None:
        """Counts a collective: its number is the same on all ranks, unless one of them leaves one out."""
        if self.waits is None:
            return None
        return self.waits.whereabouts.enter(what, self.name, 0 if tensor is None else tensor.numel())

    def standing(
        self, tensor: Tensor, cause: Cause = "collective", call: Call | None = None
    ) -> AbstractContextManager[None]:
        """Around whatever may have to wait for the other ranks."""
        return nullcontext() if self.waits is None else self.waits.standing(tensor.device, cause, call)

    def exchanging(self, what: str) -> AbstractContextManager[None]:
        """Around an exchange of Python values, whose time is not counted."""
        return nullcontext() if self.waits is None else self.waits.whereabouts.inside(self.begins(what))


@dataclass(frozen=True)
class Counted:
    """A collective under way whose waiting is counted."""

    work: Pending
    group: Group
    tensor: Tensor
    call: Call | None = None

    def wait(self) -> None:
        with self.group.standing(self.tensor, call=self.call):
            self.work.wait()


def _counted(work: Pending | None, group: Group, tensor: Tensor, call: Call | None) -> Pending | None:
    return None if work is None else Counted(work, group, tensor, call)


def all_reduce_(tensor: Tensor, group: Group) -> Tensor:
    """Sums in place over the group."""
    if group.size > 1:
        with group.standing(tensor, call=group.begins("all-reduce", tensor)):
            dist.all_reduce(tensor, group=group.process_group)
    return tensor


def start_all_reduce_(tensor: Tensor, group: Group) -> Pending | None:
    """Sums in place over the group while the caller goes on; None when there is nothing to wait for."""
    if group.size == 1:
        return None
    call = group.begins("all-reduce", tensor)
    return _counted(dist.all_reduce(tensor, group=group.process_group, async_op=True), group, tensor, call)


def all_gather_into(whole: Tensor, part: Tensor, group: Group) -> None:
    """Fills `whole` with every rank's `part`, one after the other along the first dimension."""
    pending = start_all_gather_into(whole, part, group)
    if pending is not None:
        pending.wait()


def start_all_gather_into(whole: Tensor, part: Tensor, group: Group) -> Pending | None:
    """`part` may be this rank's place in `whole`."""
    if group.size == 1:
        if part.data_ptr() != whole.data_ptr():
            whole.copy_(part.view_as(whole))
        return None
    gather, call = getattr(dist, _GATHER_NAME), group.begins("all-gather", whole)
    return _counted(gather(whole, part, group=group.process_group, async_op=True), group, whole, call)


def reduce_scatter_into(part: Tensor, whole: Tensor, group: Group) -> None:
    """Sums `whole` over the group; each rank gets its share, cut along the first dimension, in `part`."""
    pending = start_reduce_scatter_into(part, whole, group)
    if pending is not None:
        pending.wait()


def start_reduce_scatter_into(part: Tensor, whole: Tensor, group: Group) -> Pending | None:
    """`part` may be this rank's place in `whole`, the rest of which is then undefined."""
    if group.size == 1:
        if part.data_ptr() != whole.data_ptr():
            part.copy_(whole.view_as(part))
        return None
    scatter, call = getattr(dist, _SCATTER_NAME), group.begins("reduce-scatter", whole)
    return _counted(scatter(part, whole, group=group.process_group, async_op=True), group, part, call)


def all_to_all_into(
    received: Tensor,
    sent: Tensor,
    group: Group,
    received_sizes: Sequence[int] | None = None,
    sent_sizes: Sequence[int] | None = None,
) -> None:
    """Cut along the first dimension, part i of `sent` goes to rank i; what comes from rank i is part i of `received`.

    Without sizes all parts are equal.
    """
    if group.size == 1:
        received.copy_(sent)
        return
    # Host memory where messages need it: gloo exchanges parts as messages between two ranks.
    place = torch.empty_like(received, device="cpu") if group.through_host else received
    with group.standing(received, call=group.begins("all-to-all", sent)):
        dist.all_to_all_single(
            place,
            sent.cpu() if group.through_host else sent,
            None if received_sizes is None else list(received_sizes),
            None if sent_sizes is None else list(sent_sizes),
            group=group.process_group,
        )
        if group.through_host:
            received.copy_(place)


@dataclass(frozen=True)
class Passing:
    """A tensor on its way from the rank before, and this rank's own on its way to the rank after."""

    arriving: Tensor
    leaving: Tensor
    works: Sequence[Pending]
    device: torch.device
    group: Group
    call: Call | None = None

    def wait(self) -> Tensor:
        """What arrived. Only then may the tensor that was passed on be changed."""
        with self.group.standing(self.arriving, call=self.call):
            for work in self.works:
                work.wait()
        return self.arriving.to(self.device)


def start_passing_on(tensor: Tensor, group: Group, tag: int) -> Passing:
    """Passes a tensor on to the next rank of a ring while the caller goes on; the previous one's, alike, arrives.

    `tag` tells apart what travels at the same time.
    """
    call = group.begins("exchange of neighbours", tensor)
    leaving = (tensor.cpu() if group.through_host else tensor).contiguous()
    arriving = torch.empty_like(leaving)
    following, preceding = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    # Both in one batch: NCCL would wait for ever if every rank of the ring sent first.
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(_SEND, leaving, group=group.process_group, tag=tag, group_peer=following),
            dist.P2POp(_RECEIVE, arriving, group=group.process_group, tag=tag, group_peer=preceding),
        ]
    )
    return Passing(arriving, leaving, works, tensor.device, group, call)


def all_reduce_max_(tensor: Tensor, group: Group) -> Tensor:
    """Takes the maximum in place over the group."""
    if group.size > 1:
        with group.standing(tensor, call=group.begins("all-reduce (largest)", tensor)):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group.process_group)
    return tensor


def largest(number: int, group: Group) -> int:
    """The largest of the ranks' numbers. Every rank must ask."""
    # In host memory: every process group can compare that, and no GPU is waited for.
    return int(all_reduce_max_(torch.tensor(number), group).item())


def earliest(moment: float, group: Group) -> float:
    """The smallest of the ranks' times, in seconds since the epoch, to the millisecond. Every rank must ask."""
    return -largest(-int(moment * 1000), group) / 1000


def broadcast_(tensor: Tensor, group: Group, source: int) -> Tensor:
    """Overwrites the tensor with what rank `source` of the group has in its own."""
    if group.size > 1:
        with group.standing(tensor, call=group.begins("broadcast", tensor)):
            dist.broadcast(tensor, group=group.process_group, group_src=source)
    return tensor


def broadcast_object(value: Any, group: Group) -> Any:
    """Rank 0's small Python value on every rank; of the kinds that `values.encode` knows."""
    if group.size == 1:
        return value
    first, rest = sealed(encode(value), group.key, 0, _BLOCK) if group.rank == 0 else (bytes(_BLOCK), b"")
    with group.exchanging("broadcast of a value"), _one_job(group):
        block = _as_tensor(first)
        dist.broadcast(block, group=group.process_group, group_src=0)
        more = length_of_rest(_as_bytes(block), group.key, 0)
        remainder = _as_tensor(rest or bytes(more))
        if more:
            dist.broadcast(remainder, group=group.process_group, group_src=0)
        return value if group.rank == 0 else opened(_as_bytes(block), _as_bytes(remainder), group.key, 0)


def gather_objects(value: Any, group: Group) -> Sequence[Any]:
    """Every rank's small Python value, in rank order, on every rank; of the kinds that `values.encode` knows."""
    if group.size == 1:
        return [value]
    first, rest = sealed(encode(value), group.key, group.rank, _BLOCK)
    with group.exchanging("gathering of values"), _one_job(group):
        blocks = _gathered(first, group)
        lengths = [length_of_rest(block, group.key, rank) for rank, block in enumerate(blocks)]
        longest = max(lengths)
        rests = _gathered(rest.ljust(longest, b"\0"), group) if longest else blocks
        return [
            opened(block, more[:length], group.key, rank)
            for rank, (block, more, length) in enumerate(zip(blocks, rests, lengths))
        ]


def _gathered(own: bytes, group: Group) -> list[memoryview]:
    """As many bytes of every rank; in host memory, which every process group can exchange."""
    whole = torch.empty(group.size * len(own), dtype=torch.uint8)
    getattr(dist, _GATHER_NAME)(whole, _as_tensor(own), group=group.process_group)
    data = _as_bytes(whole)
    return [data[start : start + len(own)] for start in range(0, len(data), len(own))]


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _as_bytes(tensor: Tensor) -> memoryview:
    return tensor.numpy().data


@contextmanager
def _one_job(group: Group) -> Iterator[None]:
    try:
        yield
    except ForgedMessage as error:
        raise UserError(
            f"rank {group.rank} was sent a message within {group.name} that is not one of this job's: {error}; another job uses the same "
            f"port, or another process has joined: choose another --master-port (MASTER_PORT)"
        ) from None


def on_some_ranks(chosen: bool, action: Callable[[], T], group: Group) -> T | None:
    """Runs `action` where chosen. An error the user can mend is raised on every rank, so that none is left waiting."""
    value, problem = None, None
    if chosen:
        try:
            value = action()
        except UserError as error:
            problem = str(error)
        except OSError as error:
            problem = file_sentence(error)
    raise_together(problem, group)
    return value


def raise_together(problem: str | None, group: Group) -> None:
    """Raises the first rank's problem on all ranks, if any rank has one."""
    problems = [p for p in gather_objects(problem, group) if p is not None]
    if problems:
        raise AgreedError(problems[0])

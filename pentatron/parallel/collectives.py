"""Collectives on a `Group`, with their wait times measured.

Every collective of the package is called here. On a group of one rank they return immediately, so callers
need no special case.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from pentatron.errors import AgreedError, UserError, describe_os_error
from pentatron.parallel.rank_status import PendingCall, RankStatus
from pentatron.parallel.serialization import ForgedMessage, encode, length_of_rest, sign, verify_and_decode

# The step time is nearly the same on all ranks, as each waits for the slowest in the next collective;
# subtracting the wait time reveals the straggler.


# Messages are pipeline sends and receives; waiting for them includes the bubble.
Cause = Literal["collective", "message"]


@dataclass(frozen=True)
class WaitTimes:
    """Wait times in seconds."""

    collectives: float
    messages: float


class WaitTimer:
    """Measures how long this rank waits in collectives and for messages, between `begin` and `end`.

    On a CPU the collective blocks the caller, whose clock is read. On a GPU the caller only launches kernels,
    so CUDA events measure how long the compute stream waits; communication that overlaps computation counts
    as zero. `status` records every wait, also outside `begin` and `end`: the hang detection reads it.
    """

    def __init__(self, status: RankStatus | None = None) -> None:
        self.status = status or RankStatus()
        self._measuring = False
        # True within a wait that is being measured, so that nested waits are not counted twice.
        self._inside_wait = False
        self._seconds: dict[Cause, float] = {"collective": 0.0, "message": 0.0}
        self._events: list[tuple[Cause, Any, Any]] = []

    def begin(self) -> None:
        self._measuring = True
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._events.clear()

    def end(self) -> WaitTimes:
        """Returns the wait times; on a GPU, blocks until the measured events have completed."""
        self._measuring = False
        for cause, before, after in self._events:
            after.synchronize()
            self._seconds[cause] += before.elapsed_time(after) / 1000
        self._events.clear()
        return WaitTimes(self._seconds["collective"], self._seconds["message"])

    @contextmanager
    def measure_wait(
        self, device: torch.device, cause: Cause = "collective", call: PendingCall | None = None
    ) -> Iterator[None]:
        """Context manager around an operation that may wait; `device` is that of the communicated tensor."""
        with self.status.inside(call):
            if not self._measuring or self._inside_wait:
                yield
                return
            self._inside_wait = True
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
                self._inside_wait = False


T = TypeVar("T")


# Torch 2.13 renamed these functions and deprecates the old names; 2.11 has only the old ones.
_GATHER_NAME = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_SCATTER_NAME = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
# `batch_isend_irecv` compares the operations with these functions by identity.
_SEND, _RECEIVE = dist.isend, dist.irecv
# Python objects are exchanged in blocks of this many bytes; only longer ones need a second collective.
_BLOCK = 1024


@dataclass(frozen=True)
class Group:
    """A process group, and this rank's index in it.

    `through_host`: point-to-point messages are copied to host memory, as gloo cannot send GPU tensors.
    `waits` measures wait times, `name` is for messages about hangs. `key` is the HMAC key of exchanged Python
    objects, None if the job has no secret.
    """

    rank: int
    size: int
    process_group: Any = None
    through_host: bool = False
    waits: WaitTimer = field(default_factory=WaitTimer, compare=False, repr=False)
    name: str = field(default="a group", compare=False)
    key: bytes | None = field(default=None, compare=False, repr=False)

    def begins(self, what: str, tensor: Tensor | None = None) -> PendingCall:
        """Counts a collective.

        Its number is the same on all ranks unless the ranks call different collectives.
        """
        return self.waits.status.enter(what, self.name, 0 if tensor is None else tensor.numel())


@dataclass(frozen=True)
class Pending:
    """Handle of operations that run on `tensor`; without `works` there is nothing to wait for.

    `device` is where the tensor is wanted. `sent` is a tensor that is kept alive.
    """

    tensor: Tensor
    group: Group
    works: Sequence[Any] = ()
    call: PendingCall | None = None
    cause: Cause = "collective"
    device: torch.device | None = None
    sent: Tensor | None = None

    def wait(self) -> Tensor:
        """Returns the tensor when it is complete. A tensor that is sent must not be changed before."""
        if self.works:
            with self.group.waits.measure_wait(self.tensor.device, self.cause, self.call):
                for work in self.works:
                    work.wait()
        return self.tensor if self.device is None else self.tensor.to(self.device)


def _run_in_place(
    tensor: Tensor, group: Group, what: str, collective: Callable[..., Any], **options: Any
) -> Tensor:
    if group.size > 1:
        with group.waits.measure_wait(tensor.device, call=group.begins(what, tensor)):
            collective(tensor, group=group.process_group, **options)
    return tensor


def all_reduce_(tensor: Tensor, group: Group) -> Tensor:
    """Sums over the group, in place."""
    return _run_in_place(tensor, group, "all-reduce", dist.all_reduce)


def start_all_reduce_(tensor: Tensor, group: Group) -> Pending:
    """Starts an in-place sum over the group."""
    if group.size == 1:
        return Pending(tensor, group)
    call = group.begins("all-reduce", tensor)
    work = dist.all_reduce(tensor, group=group.process_group, async_op=True)
    return Pending(tensor, group, [work], call)


def all_gather_into(whole: Tensor, part: Tensor, group: Group) -> None:
    """Concatenates the `part` of every rank along the first dimension into `whole`."""
    start_all_gather_into(whole, part, group).wait()


def start_all_gather_into(whole: Tensor, part: Tensor, group: Group) -> Pending:
    """Starts `all_gather_into`. `part` may be a view of this rank's place in `whole`."""
    return _start("all-gather", _GATHER_NAME, whole, part, group, whole)


def reduce_scatter_into(part: Tensor, whole: Tensor, group: Group) -> None:
    """Sums `whole` over the group; each rank receives its share, cut along the first dimension, in `part`."""
    start_reduce_scatter_into(part, whole, group).wait()


def start_reduce_scatter_into(part: Tensor, whole: Tensor, group: Group) -> Pending:
    """Starts `reduce_scatter_into`.

    `part` may be a view of this rank's place in `whole`, the rest of which becomes undefined.
    """
    return _start("reduce-scatter", _SCATTER_NAME, part, whole, group, whole)


def _start(what: str, name: str, output: Tensor, given: Tensor, group: Group, whole: Tensor) -> Pending:
    if group.size == 1:
        if given.data_ptr() != output.data_ptr():
            output.copy_(given.view_as(output))
        return Pending(output, group)
    collective, call = getattr(dist, name), group.begins(what, whole)
    return Pending(output, group, [collective(output, given, group=group.process_group, async_op=True)], call)


def all_to_all_into(
    received: Tensor,
    sent: Tensor,
    group: Group,
    received_sizes: Sequence[int] | None = None,
    sent_sizes: Sequence[int] | None = None,
) -> None:
    """Sends part i of `sent`, cut along the first dimension, to rank i; part i of `received` comes from rank
    i.

    Without sizes all parts are equal.
    """
    if group.size == 1:
        received.copy_(sent)
        return
    # Gloo implements all-to-all as point-to-point messages, which need host memory.
    buffer = torch.empty_like(received, device="cpu") if group.through_host else received
    output_sizes, input_sizes = (sizes and list(sizes) for sizes in (received_sizes, sent_sizes))
    with group.waits.measure_wait(received.device, call=group.begins("all-to-all", sent)):
        leaving = sent.cpu() if group.through_host else sent
        dist.all_to_all_single(buffer, leaving, output_sizes, input_sizes, group=group.process_group)
        if group.through_host:
            received.copy_(buffer)


def start_ring_exchange(tensor: Tensor, group: Group, tag: int) -> Pending:
    """Starts sending a tensor to the next rank of a ring and receiving one of the same shape from the
    previous rank.

    `tag` distinguishes exchanges that run at the same time.
    """
    call = group.begins("ring send/receive", tensor)
    leaving = (tensor.cpu() if group.through_host else tensor).contiguous()
    arriving = torch.empty_like(leaving)
    following, preceding = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    # One batch: with NCCL, a ring in which every rank sends first would deadlock.
    operations = [
        dist.P2POp(_SEND, leaving, group=group.process_group, tag=tag, group_peer=following),
        dist.P2POp(_RECEIVE, arriving, group=group.process_group, tag=tag, group_peer=preceding),
    ]
    works = dist.batch_isend_irecv(operations)
    return Pending(arriving, group, works, call, device=tensor.device, sent=leaving)


def all_reduce_max_(tensor: Tensor, group: Group) -> Tensor:
    """Takes the maximum over the group, in place."""
    return _run_in_place(tensor, group, "all-reduce (max)", dist.all_reduce, op=dist.ReduceOp.MAX)


def largest(number: int, group: Group) -> int:
    """Returns the maximum of the ranks' numbers; collective."""
    # In host memory, which every process group can reduce without synchronizing a GPU.
    return int(all_reduce_max_(torch.tensor(number), group).item())


def earliest_over_ranks(moment: float, group: Group) -> float:
    """Returns the minimum of the ranks' times in seconds since the epoch, to the millisecond; collective."""
    return -largest(-int(moment * 1000), group) / 1000


def broadcast_(tensor: Tensor, group: Group, source: int) -> Tensor:
    """Overwrites the tensor with that of rank `source` of the group."""
    return _run_in_place(tensor, group, "broadcast", dist.broadcast, group_src=source)


def broadcast_object(value: Any, group: Group) -> Any:
    """Returns rank 0's Python object on every rank; types as in `serialization.encode`."""
    if group.size == 1:
        return value
    first, own_rest = sign(encode(value), group.key, 0, _BLOCK) if group.rank == 0 else (bytes(_BLOCK), b"")
    with _object_exchange("broadcast of an object", group):
        block = _as_tensor(first)
        dist.broadcast(block, group=group.process_group, group_src=0)
        rest_bytes = length_of_rest(_as_bytes(block), group.key, 0)
        rest_tensor = _as_tensor(own_rest or bytes(rest_bytes))
        if rest_bytes:
            dist.broadcast(rest_tensor, group=group.process_group, group_src=0)
        if group.rank == 0:
            return value
        return verify_and_decode(_as_bytes(block), _as_bytes(rest_tensor), group.key, 0)


def gather_objects(value: Any, group: Group) -> Sequence[Any]:
    """Returns every rank's Python object in rank order; types as in `serialization.encode`."""
    if group.size == 1:
        return [value]
    first, rest = sign(encode(value), group.key, group.rank, _BLOCK)
    with _object_exchange("all-gather of objects", group):
        blocks = _gathered(first, group)
        lengths = [length_of_rest(block, group.key, rank) for rank, block in enumerate(blocks)]
        longest = max(lengths)
        rests = _gathered(rest.ljust(longest, b"\0"), group) if longest else blocks
        return [
            verify_and_decode(block, padded[:length], group.key, rank)
            for rank, (block, padded, length) in enumerate(zip(blocks, rests, lengths))
        ]


def _gathered(local: bytes, group: Group) -> list[memoryview]:
    """Gathers equally many bytes of every rank, in host memory, which every process group supports."""
    whole = torch.empty(group.size * len(local), dtype=torch.uint8)
    getattr(dist, _GATHER_NAME)(whole, _as_tensor(local), group=group.process_group)
    data = _as_bytes(whole)
    return [data[start : start + len(local)] for start in range(0, len(data), len(local))]


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _as_bytes(tensor: Tensor) -> memoryview:
    return tensor.numpy().data


@contextmanager
def _object_exchange(what: str, group: Group) -> Iterator[None]:
    """Context manager around an exchange of Python objects, whose wait time is not measured."""
    try:
        with group.waits.status.inside(group.begins(what)):
            yield
    except ForgedMessage as error:
        raise UserError(
            f"rank {group.rank} received a message in {group.name} that is not from this job: {error}; another job uses the same "
            f"port, or another process has joined: choose another --master-port (MASTER_PORT)"
        ) from None


def run_on_all_ranks(action: Callable[[], T], group: Group) -> T:
    """Runs `action`. Raises a user or file error of one rank on every rank, so that no rank hangs."""
    return cast(T, run_on_some_ranks(True, action, group))


def run_on_some_ranks(chosen: bool, action: Callable[[], T], group: Group) -> T | None:
    """Runs `action` on the ranks with `chosen`; errors as in `run_on_all_ranks`."""
    value, problem = None, None
    if chosen:
        try:
            value = action()
        except (UserError, OSError) as error:
            problem = describe_os_error(error) if isinstance(error, OSError) else str(error)
    raise_on_all_ranks(problem, group)
    return value


def raise_on_all_ranks(problem: str | None, group: Group) -> None:
    """Raises the problem of the first rank that has one, on all ranks; collective."""
    problems = [p for p in gather_objects(problem, group) if p is not None]
    if problems:
        raise AgreedError(problems[0])

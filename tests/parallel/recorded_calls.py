"""Records the communication calls of a run and replays them under NCCL's ordering rules.

Gloo buffers messages and runs every call independently. Under NCCL the calls of a communicator run in the
order in which they were started, each only when all its ranks have started it. At the first call of a
communicator the hosts connect, which blocks each host until all are there. The replay is stricter in two
ways, each of which occurs on some GPU at some time:

- One queue: all calls of a rank share one queue, as on a GPU whose streams share one, so that a call whose
  communicator is busy blocks all later calls.
- Synchronisation: before each computation and each collective the host waits for the whole device, as it does
  when CUDA loads a kernel at its first launch, or when memory is freed. All calls that the rank has started
  must end without its next one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pentatron.layout.check import COMPUTATIONS
from pentatron.parallel import executor
from pentatron.parallel.messages import ANNOUNCEMENT_TAG

COLLECTIVES = (
    *("all_reduce", "broadcast", "all_to_all_single", "all_gather_single", "all_gather_into_tensor"),
    *("reduce_scatter_single", "reduce_scatter_tensor"),
)


@dataclass(frozen=True)
class Call:
    """One call of a rank.

    `number`: index among the calls of the rank. `what`: must be equal on all ranks of the communicator.
    `connected`: the ranks have connected before. `waits`: number of an earlier call that is waited for.
    """

    number: int
    communicator: tuple[str, ...] = ()
    members: tuple[int, ...] = ()
    what: str = ""
    connected: bool = False
    waits: int | None = None
    # A computation or one of its collectives starts; the host may synchronise the device here.
    synchronises: bool = False


@dataclass
class Recorder:
    """Replaces functions of torch.distributed by ones that record their calls.

    Announcements of a step are not recorded: they are in host memory and use gloo even if GPUs use NCCL.
    """

    calls: list[Call] = field(default_factory=list)
    on: bool = False

    def install(self) -> None:
        for name in COLLECTIVES:
            if hasattr(dist, name):
                setattr(dist, name, self._collective(name, getattr(dist, name)))
        for name in ("isend", "irecv"):
            setattr(dist, name, self._message(name, getattr(dist, name)))
        dist.batch_isend_irecv = self._batch(dist.batch_isend_irecv)
        for kind in COMPUTATIONS:
            timer, perform = executor._ACTIONS[kind]
            executor._ACTIONS[kind] = timer, self._computation(perform)

    def _computation(self, honest: Any) -> Any:
        def call(step: Any, action: Any) -> None:
            self._synchronises()
            honest(step, action)

        return call

    def _synchronises(self) -> None:
        if self.on:
            self.calls.append(Call(len(self.calls), synchronises=True))

    def _begun(
        self, communicator: tuple[str, ...], members: Sequence[int], what: str, connected: bool = False
    ) -> int:
        self.calls.append(Call(len(self.calls), communicator, tuple(members), what, connected))
        return self.calls[-1].number

    def _collective(self, name: str, honest: Any) -> Any:
        def call(tensor: Tensor, *words: Any, group: Any = None, async_op: bool = False, **named: Any) -> Any:
            work = honest(tensor, *words, group=group, async_op=async_op, **named)
            if not self.on:
                return work
            # In an all-to-all every rank may have a different size.
            size = "" if name == "all_to_all_single" else f" {tensor.numel()}"
            members = dist.get_process_group_ranks(group)
            self._synchronises()
            number = self._begun((group.group_name,), members, f"{name}{size} {tensor.dtype}")
            if not async_op:
                self.waited(number)
                return work
            return Work(work, self, number)

        return call

    def _message(self, name: str, honest: Any) -> Any:
        def call(tensor: Tensor, *words: Any, group: Any = None, **named: Any) -> Any:
            work = honest(tensor, *words, group=group, **named)
            if not self.on or named["tag"] == ANNOUNCEMENT_TAG:
                return work
            sends = name == "isend"
            peer = dist.get_process_group_ranks(group)[named["group_dst" if sends else "group_src"]]
            ends = sorted((dist.get_rank(), peer))
            sender = dist.get_rank() if sends else peer
            # Messages outside of a batch have a communicator of their two ranks.
            communicator = (group.group_name, *map(str, ends))
            what = f"message of {sender}, {tensor.numel()} {tensor.dtype}"
            number = self._begun(communicator, ends, what, connected=True)
            return Work(work, self, number)

        return call

    def _batch(self, honest: Any) -> Any:
        def call(operations: list[dist.P2POp]) -> Any:
            recording, self.on = self.on, False
            works = honest(operations)
            self.on = recording
            if not recording:
                return works
            group, tensor = operations[0].group, operations[0].tensor
            members = dist.get_process_group_ranks(group)
            number = self._begun((group.group_name,), members, f"batch {tensor.numel()} {tensor.dtype}")
            return [Work(work, self, number) for work in works]

        return call

    def waited(self, number: int) -> None:
        if self.on:
            self.calls.append(Call(len(self.calls), waits=number))


@dataclass
class Work:
    honest: Any
    recorder: Recorder
    number: int

    def wait(self) -> Any:
        self.recorder.waited(self.number)
        return self.honest.wait()

    def is_completed(self) -> bool:
        return bool(self.honest.is_completed())


def problem_of(records: Sequence[Sequence[Call]], synchronising: bool = False) -> str | None:
    """Returns why the calls of these ranks would deadlock or mismatch, or None.

    With `synchronising`, the host waits for the whole device wherever it may have to.
    """
    at = [0 for _ in records]
    # For each communicator the calls that every rank has started on it, and for each call its index there.
    begun: dict[tuple[str, ...], dict[int, list[str]]] = {}
    place: dict[tuple[int, int], tuple[tuple[str, ...], int]] = {}
    # Ranks whose host is connecting to the others of a communicator.
    connecting: dict[int, tuple[str, ...]] = {}

    def done(communicator: tuple[str, ...], number: int) -> bool:
        return all(len(calls) > number for calls in begun[communicator].values())

    def goes_on(rank: int, call: Call) -> bool:
        if rank in connecting and not done(connecting[rank], 0):
            return False
        connecting.pop(rank, None)
        if call.synchronises:
            return not synchronising or all(
                done(communicator, len(ranks[rank]) - 1)
                for communicator, ranks in begun.items()
                if ranks.get(rank)
            )
        if call.waits is not None:
            return done(*place[rank, call.waits])
        ranks = begun.setdefault(call.communicator, {member: [] for member in call.members})
        if not all(len(calls) >= len(ranks[rank]) for calls in ranks.values()):
            return False
        place[rank, call.number] = (call.communicator, len(ranks[rank]))
        ranks[rank].append(call.what)
        if len(ranks[rank]) == 1 and not call.connected:
            connecting[rank] = call.communicator
        return True

    moved = True
    while moved:
        moved = False
        for rank, record in enumerate(records):
            while at[rank] < len(record) and goes_on(rank, record[at[rank]]):
                at[rank] += 1
                moved = True
    for communicator, ranks in begun.items():
        for number, found in enumerate(zip(*ranks.values())):
            if len(set(found)) > 1:
                return f"call {number} of {communicator} is {' and '.join(sorted(set(found)))}"
    stuck = [
        f"rank {rank}: {record[at[rank]]}" for rank, record in enumerate(records) if at[rank] < len(record)
    ]
    return "; ".join(stuck) or None

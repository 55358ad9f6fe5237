"""Checks that a pipeline schedule is complete, ordered and free of deadlocks, and simulates its timing.

The check reads the finished action lists and shares no code with the generators, so it applies to any
schedule.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pentatron.layout.actions import RECEIVES, SENDS, Action, Cell, Kind, Placement, Schedule

# The halves of a split backward.
_HALVES = (Kind.INPUT, Kind.WEIGHT)
COMPUTATIONS = (Kind.FORWARD, Kind.BACKWARD, *_HALVES)
# In units of a forward: a backward has two matrix products for each one of the forward.
DURATION = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.INPUT: 1, Kind.WEIGHT: 1}
NAMES = {Kind.INPUT: "input gradient", Kind.WEIGHT: "weight gradient"}

# Stage and micro-batch.
Cells = frozenset[Cell]
# Identifies a message on both ends: the kind of its receive, the stage that computed it, the micro-batch.
Message = tuple[Kind, int, int]
# Sender, receiver and kind of message. Messages of a channel arrive in the order of their sends.
Channel = tuple[int, int, Kind]


# For every rank and each of its actions: the actions that must precede it in the same list.
Dependencies = list[list[tuple[Action, ...]]]


class ScheduleError(ValueError):
    """Raised for a schedule that would compute a wrong result or deadlock."""


@dataclass(frozen=True)
class TimeSlot:
    """The time span of one computation, in units of a forward."""

    start: int
    end: int
    action: Action


@dataclass(frozen=True)
class ScheduleProperties:
    """Properties of a valid schedule.

    `in_flight`: the most micro-batches each rank holds at once between their forward and the end of their
    backward, summed over its stages. `deferred`: the most between the two halves of a backward, of which only
    the inputs of the weight gradients are kept. `timeline`: the computations of each rank, if a backward
    takes twice as long as a forward, each half as long as one, and messages take no time. `bubble`: the
    fraction of the ranks' time spent waiting.
    """

    in_flight: tuple[int, ...]
    deferred: tuple[int, ...]
    timeline: tuple[tuple[TimeSlot, ...], ...]
    time: int
    bubble: float


def check(schedule: Schedule) -> ScheduleProperties:
    """Raises `ScheduleError`, with the rank and the action, unless every property holds."""
    lists, ranks = len(schedule.actions), schedule.placement.ranks
    if lists != ranks:
        raise ScheduleError(f"{lists} lists of actions do not fit {ranks} pipeline ranks")
    # The (stage, micro-batch) cells with a backward in two halves; both halves are then required.
    halves = [action for actions in schedule.actions for action in actions if action.kind in _HALVES]
    split_cells = frozenset((action.stage, action.micro_batch) for action in halves)
    _check_complete(schedule, split_cells)
    dependencies = [
        [tuple(_dependencies(schedule, split_cells, rank, action)) for action in actions]
        for rank, actions in enumerate(schedule.actions)
    ]
    _check_order(schedule, dependencies)
    _check_channels(schedule)
    timeline = _simulate(schedule, dependencies)
    _check_one_queue(schedule, dependencies)
    _check_device_synchronisation(schedule, dependencies)
    time = max(slots[-1].end for slots in timeline)
    busy = sum(slot.end - slot.start for slots in timeline for slot in slots)
    ends = (Kind.BACKWARD, Kind.WEIGHT)
    in_flight = tuple(_most_in_flight(actions, Kind.FORWARD, ends) for actions in schedule.actions)
    deferred = tuple(_most_in_flight(actions, Kind.INPUT, (Kind.WEIGHT,)) for actions in schedule.actions)
    return ScheduleProperties(in_flight, deferred, timeline, time, bubble=1 - busy / (time * len(timeline)))


def _check_complete(schedule: Schedule, split_cells: Cells) -> None:
    """Checks that every rank runs each action of its stages exactly once, and nothing else."""
    required: list[dict[Action, None]] = [{} for _ in schedule.actions]
    for rank, action in _required(schedule, split_cells):
        required[rank][action] = None
    for rank, actions in enumerate(schedule.actions):
        counts = Counter(actions)
        for action, times in counts.items():
            if action not in required[rank]:
                raise ScheduleError(f"rank {rank}: {_describe(action)} does not belong there")
            if times > 1:
                raise ScheduleError(f"rank {rank}: {_describe(action)} appears {times} times")
        for action in required[rank]:
            if action not in counts:
                raise ScheduleError(f"rank {rank}: {_describe(action)} is missing")


def _required(schedule: Schedule, split_cells: Cells) -> Iterator[tuple[int, Action]]:
    """Yields all actions of a step with the rank that must run them.

    If the schedule contains more than forwards, every backward is required.
    """
    placement = schedule.placement
    forward_only = (Kind.FORWARD, Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION)
    training = any(action.kind not in forward_only for actions in schedule.actions for action in actions)
    for stage in range(placement.stages):
        for micro_batch in range(schedule.micro_batches):
            yield placement.rank_of[stage], Action(Kind.FORWARD, stage, micro_batch)
            yield from _message_ends(placement, Kind.SEND_ACTIVATION, stage, stage + 1, micro_batch)
            if training:
                is_split = (stage, micro_batch) in split_cells
                for kind in _HALVES if is_split else (Kind.BACKWARD,):
                    yield placement.rank_of[stage], Action(kind, stage, micro_batch)
                yield from _message_ends(placement, Kind.SEND_GRADIENT, stage, stage - 1, micro_batch)
        if training:
            yield placement.rank_of[stage], Action(Kind.REDUCE, stage)


def _message_ends(
    placement: Placement, send: Kind, source: int, target: int, micro_batch: int
) -> Iterator[tuple[int, Action]]:
    """Yields the send and the receive of a message between two stages; none if they are on the same rank."""
    if not 0 <= target < placement.stages:
        return
    sender, receiver = placement.rank_of[source], placement.rank_of[target]
    if sender != receiver:
        yield sender, Action(send, source, micro_batch, receiver)
        yield receiver, Action(SENDS[send], source, micro_batch, sender)


def _check_order(schedule: Schedule, dependencies: Dependencies) -> None:
    """Checks that no action precedes one that it depends on."""
    for rank, actions in enumerate(schedule.actions):
        done: set[Action] = set()
        for action, required in zip(actions, dependencies[rank]):
            if early := [dependency for dependency in required if dependency not in done]:
                raise ScheduleError(f"rank {rank}: {_describe(action)} comes before {_describe(early[0])}")
            done.add(action)


def _dependencies(schedule: Schedule, split_cells: Cells, rank: int, action: Action) -> Iterator[Action]:
    """Yields the actions that must precede `action` in a rank's list."""
    kind, stage, micro_batch = action.kind, action.stage, action.micro_batch

    def input_gradient(of: int) -> Action:
        return Action(Kind.INPUT if (of, micro_batch) in split_cells else Kind.BACKWARD, of, micro_batch)

    match kind:
        case Kind.FORWARD:
            yield from _input(schedule, rank, Action(Kind.FORWARD, stage - 1, micro_batch))
        case Kind.BACKWARD | Kind.INPUT:
            yield Action(Kind.FORWARD, stage, micro_batch)
            yield from _input(schedule, rank, input_gradient(stage + 1))
        case Kind.WEIGHT:
            yield Action(Kind.INPUT, stage, micro_batch)
        case Kind.SEND_ACTIVATION:
            yield Action(Kind.FORWARD, stage, micro_batch)
        case Kind.SEND_GRADIENT:
            yield input_gradient(stage)
        case Kind.REDUCE:
            for m in range(schedule.micro_batches):
                yield Action(Kind.WEIGHT if (stage, m) in split_cells else Kind.BACKWARD, stage, m)


def _input(schedule: Schedule, rank: int, result: Action) -> Iterator[Action]:
    """Yields the action by which a rank obtains another stage's result: its computation, or its receive."""
    placement = schedule.placement
    if not 0 <= result.stage < placement.stages:
        return
    if placement.rank_of[result.stage] == rank:
        yield result
    else:
        receive = Kind.RECEIVE_ACTIVATION if result.kind is Kind.FORWARD else Kind.RECEIVE_GRADIENT
        yield Action(receive, result.stage, result.micro_batch, placement.rank_of[result.stage])


def _check_channels(schedule: Schedule) -> None:
    """Checks the order of messages: without tags (NCCL) the n-th receive of a channel gets its n-th send."""
    ends: dict[Channel, tuple[list[Action], list[Action]]] = {}
    for end, kinds in enumerate((RECEIVES, SENDS)):
        for rank, actions in enumerate(schedule.actions):
            for action in actions:
                if action.kind in kinds:
                    ends.setdefault(_channel(rank, action), ([], []))[end].append(action)
    for (sender, receiver, _), (receives, sends) in ends.items():
        for receive, send in zip(receives, sends, strict=True):
            if _message(send) != _message(receive):
                got = f"{_describe_message(_message(send))}, which rank {sender} sends first"
                raise ScheduleError(f"rank {receiver}: {_describe(receive)} would get {got}")


def _simulate(schedule: Schedule, dependencies: Dependencies) -> tuple[tuple[TimeSlot, ...], ...]:
    """Simulates the timing; raises on a deadlock.

    A message arrives when it has been sent and its receive is posted, and after the previous one on its
    channel. A send never blocks. With buffered sends messages arrive no later, so that case is covered.
    """
    clock = [0 for _ in schedule.actions]
    slots: list[list[TimeSlot]] = [[] for _ in schedule.actions]
    # When computations ended and sends and receives were posted. Ranks post in order, so that messages of a
    # channel arrive in order.
    done: dict[Action, int] = {}

    def begins(rank: int, action: Action, required: tuple[Action, ...]) -> bool:
        if action.kind in COMPUTATIONS:
            sends = [
                Action(RECEIVES[r.kind], r.stage, r.micro_batch, rank) for r in required if r.kind in RECEIVES
            ]
            if not all(send in done for send in sends):
                return False
            start = max([clock[rank], *(done[needed] for needed in (*required, *sends))])
            clock[rank] = start + DURATION[action.kind]
            slots[rank].append(TimeSlot(start, clock[rank], action))
        done[action] = clock[rank]
        return True

    _run(schedule, dependencies, begins, "as ranks wait for each other in a circle")
    return tuple(map(tuple, slots))


def _check_one_queue(schedule: Schedule, dependencies: Dependencies) -> None:
    """Checks for deadlocks on a GPU whose streams share one hardware queue.

    That is so with CUDA_DEVICE_MAX_CONNECTIONS=1, and for some streams whenever there are more streams than
    queues. Work then begins in the order of its launch, so a message that waits for the previous one on its
    channel blocks all later work of every stream. A schedule that passes is also free of deadlocks with more
    queues.
    """
    started: dict[Channel, list[int]] = {}
    index: dict[tuple[int, Action], int] = {}

    def arrived(channel: Channel) -> int:
        return min(started.setdefault(channel, [0, 0]))

    def begins(rank: int, action: Action, needed: tuple[Action, ...]) -> bool:
        if action.kind in COMPUTATIONS:
            return all(index[rank, n] < arrived(_channel(rank, n)) for n in needed if n.kind in RECEIVES)
        if action.kind is not Kind.REDUCE:
            channel, end = _channel(rank, action), action.kind in RECEIVES
            if arrived(channel) < started[channel][end]:
                return False
            index[rank, action] = started[channel][end]
            started[channel][end] += 1
        return True

    _run(schedule, dependencies, begins, "where a GPU has one queue for all its work")


def _check_device_synchronisation(schedule: Schedule, dependencies: Dependencies) -> None:
    """Checks for deadlocks if every kernel launch of a computation synchronizes the device.

    CUDA may do so at any launch, to load the kernel (lazy loading) or to free memory. Running messages are
    kernels that wait for their peer, so a rank then waits until the peers have posted every message that it
    has posted. A schedule that passes is also free of deadlocks if only some launches synchronize.
    """
    # For each channel how many messages the sender and the receiver have posted.
    posted: dict[Channel, list[int]] = {}
    channels: list[set[Channel]] = [set() for _ in schedule.actions]

    def begins(rank: int, action: Action, needed: tuple[Action, ...]) -> bool:
        if action.kind in COMPUTATIONS:
            # The peer of each channel has posted as much as this rank, or more.
            counts = ((posted[channel], rank == channel[1]) for channel in channels[rank])
            return all(count[not own_end] >= count[own_end] for count, own_end in counts)
        if action.kind is not Kind.REDUCE:
            channel = _channel(rank, action)
            posted.setdefault(channel, [0, 0])[action.kind in RECEIVES] += 1
            channels[rank].add(channel)
        return True

    _run(schedule, dependencies, begins, "if its launch synchronises the device")


def _run(
    schedule: Schedule,
    dependencies: Dependencies,
    begins: Callable[[int, Action, tuple[Action, ...]], bool],
    where: str,
) -> None:
    """Advances the ranks in turns, each as far as its actions can begin; raises if some never do."""
    position = [0 for _ in schedule.actions]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            at = position[rank]
            while at < len(actions) and begins(rank, actions[at], dependencies[rank][at]):
                at += 1
            moved, position[rank] = moved or at > position[rank], at
    for rank, actions in enumerate(schedule.actions):
        if position[rank] < len(actions):
            raise ScheduleError(f"rank {rank}: {_describe(actions[position[rank]])} deadlocks {where}")


def _most_in_flight(actions: tuple[Action, ...], begin: Kind, end: tuple[Kind, ...]) -> int:
    """Returns the most micro-batches that are between two actions; 0 if the second kind never occurs."""
    changes = [(action.kind is begin) - (action.kind in end) for action in actions]
    return max(itertools.accumulate(changes)) if -1 in changes else 0


def _channel(rank: int, action: Action) -> Channel:
    assert action.peer is not None, "a message has two ends"
    if action.kind in SENDS:
        return rank, action.peer, SENDS[action.kind]
    return action.peer, rank, action.kind


def _message(action: Action) -> Message:
    return SENDS.get(action.kind, action.kind), action.stage, action.micro_batch


def _describe_message(message: Message) -> str:
    kind, stage, micro_batch = message
    what = "activation" if kind is Kind.RECEIVE_ACTIVATION else "gradient"
    return f"the {what} of stage {stage}, micro-batch {micro_batch}"


def _describe(action: Action) -> str:
    """Returns the description of an action for error messages."""
    if action.kind is Kind.REDUCE:
        return f"the reduction of stage {action.stage} ({action})"
    if action.kind in COMPUTATIONS:
        name = NAMES.get(action.kind, action.kind.name.lower())
        return f"the {name} of stage {action.stage}, micro-batch {action.micro_batch} ({action})"
    verb, side = ("sending", "to") if action.kind in SENDS else ("receiving", "from")
    return f"{verb} {_describe_message(_message(action))} {side} rank {action.peer} ({action})"

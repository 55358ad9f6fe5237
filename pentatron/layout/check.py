"""Proves a pipeline schedule sound before anything runs: complete, in order, free of deadlock; and times it.

The proof takes nothing from the generators: it reads the finished action lists, so a schedule from anywhere can be
asked.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pentatron.layout.actions import Action, Kind, Placement, Schedule

COMPUTATIONS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
SENDS = {Kind.SEND_ACTIVATION: Kind.RECEIVE_ACTIVATION, Kind.SEND_GRADIENT: Kind.RECEIVE_GRADIENT}
RECEIVES = {receive: send for send, receive in SENDS.items()}
# A backward computes two products for every one of a forward; each of its halves one.
DURATION = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.INPUT: 1, Kind.WEIGHT: 1}
NAMES = {Kind.INPUT: "input gradient", Kind.WEIGHT: "weight gradient"}

# What a message carries, whichever end speaks of it: the kind of its receive, the stage it comes from, the micro-batch.
Message = tuple[Kind, int, int]
# Messages between one sender and one receiver of one kind arrive in the order they were sent, and in no other.
Channel = tuple[int, int, Kind]


# For every rank and each of its actions, what must come before it in the same list.
Needs = list[list[tuple[Action, ...]]]


class ScheduleError(ValueError):
    """A schedule that would compute something wrong, or never end."""


@dataclass(frozen=True)
class Slot:
    """One computation in time, in units of a forward."""

    start: int
    end: int
    action: Action


@dataclass(frozen=True)
class Checked:
    """What a sound schedule promises.

    `alive`: the most micro-batches each rank holds at once, whose forward is done and whose backward is not, or not
    both halves of it (a rank with several stages counts each of them). `deferred`: the most that lie between the two
    halves, of which only what the weight gradients need is kept. `timeline`: when each rank computes what, if a
    backward takes twice as long as a forward, each half as long as one, and messages no time. `bubble`: the share of
    the ranks' time that is spent waiting.
    """

    alive: tuple[int, ...]
    deferred: tuple[int, ...]
    timeline: tuple[tuple[Slot, ...], ...]
    time: int
    bubble: float


def check(schedule: Schedule) -> Checked:
    """Raises `ScheduleError`, with the rank and the action, unless every property holds."""
    if len(schedule.actions) != schedule.placement.ranks:
        raise ScheduleError(
            f"{len(schedule.actions)} lists of actions do not fit {schedule.placement.ranks} pipeline ranks"
        )
    _check_complete(schedule)
    halved = _halved(schedule)
    needs = [
        [tuple(_needs(schedule, halved, rank, action)) for action in actions]
        for rank, actions in enumerate(schedule.actions)
    ]
    _check_order(schedule, needs)
    _check_channels(schedule)
    timeline = _simulate(schedule, needs)
    _check_one_queue(schedule, needs)
    _check_device_synchronisation(schedule, needs)
    time = max(slots[-1].end for slots in timeline)
    busy = sum(slot.end - slot.start for slots in timeline for slot in slots)
    return Checked(
        alive=tuple(
            _most_between(actions, (Kind.FORWARD,), (Kind.BACKWARD, Kind.WEIGHT))
            for actions in schedule.actions
        ),
        deferred=tuple(_most_between(actions, (Kind.INPUT,), (Kind.WEIGHT,)) for actions in schedule.actions),
        timeline=timeline,
        time=time,
        bubble=1 - busy / (time * len(timeline)),
    )


def is_training(schedule: Schedule) -> bool:
    """Whether there is anything but forwards: then every backward must be there."""
    forward_only = (Kind.FORWARD, Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION)
    return any(action.kind not in forward_only for actions in schedule.actions for action in actions)


def _check_complete(schedule: Schedule) -> None:
    """Every rank does what its stages ask for, each thing once, and nothing else."""
    wanted: list[dict[Action, None]] = [{} for _ in schedule.actions]
    for rank, action in _wanted(schedule):
        wanted[rank][action] = None
    for rank, actions in enumerate(schedule.actions):
        counts = Counter(actions)
        for action, times in counts.items():
            if action not in wanted[rank]:
                raise ScheduleError(f"rank {rank}: {_named(action)} does not belong there")
            if times > 1:
                raise ScheduleError(f"rank {rank}: {_named(action)} is there {times} times")
        for action in wanted[rank]:
            if action not in counts:
                raise ScheduleError(f"rank {rank}: {_named(action)} is missing")


def _wanted(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Everything a step consists of, with the rank that has to do it."""
    placement, training, halved = schedule.placement, is_training(schedule), _halved(schedule)
    for stage in range(placement.stages):
        for micro_batch in range(schedule.micro_batches):
            yield placement.rank_of[stage], Action(Kind.FORWARD, stage, micro_batch)
            yield from _pair(placement, Kind.SEND_ACTIVATION, stage, stage + 1, micro_batch)
            if training:
                for kind in (Kind.INPUT, Kind.WEIGHT) if (stage, micro_batch) in halved else (Kind.BACKWARD,):
                    yield placement.rank_of[stage], Action(kind, stage, micro_batch)
                yield from _pair(placement, Kind.SEND_GRADIENT, stage, stage - 1, micro_batch)
        if training:
            yield placement.rank_of[stage], Action(Kind.REDUCE, stage)


def _halved(schedule: Schedule) -> frozenset[tuple[int, int]]:
    """The stages and micro-batches whose backward comes in halves; the two must both be there, and no whole one."""
    return frozenset(
        (action.stage, action.micro_batch)
        for actions in schedule.actions
        for action in actions
        if action.kind in (Kind.INPUT, Kind.WEIGHT)
    )


def _pair(
    placement: Placement, send: Kind, source: int, target: int, micro_batch: int
) -> Iterator[tuple[int, Action]]:
    """The two ends of a message between two stages; stages of one rank need none."""
    if not 0 <= target < placement.stages:
        return
    sender, receiver = placement.rank_of[source], placement.rank_of[target]
    if sender != receiver:
        yield sender, Action(send, source, micro_batch, receiver)
        yield receiver, Action(SENDS[send], source, micro_batch, sender)


def _check_order(schedule: Schedule, needs: Needs) -> None:
    """On one rank, nothing comes before what it needs."""
    for rank, actions in enumerate(schedule.actions):
        done: set[Action] = set()
        for action, all_needed in zip(actions, needs[rank]):
            for needed in all_needed:
                if needed not in done:
                    raise ScheduleError(f"rank {rank}: {_named(action)} comes before {_named(needed)}")
            done.add(action)


def _needs(
    schedule: Schedule, halved: frozenset[tuple[int, int]], rank: int, action: Action
) -> Iterator[Action]:
    """What must be in a rank's list before `action`."""
    kind, stage, micro_batch = action.kind, action.stage, action.micro_batch

    def input_gradient(of: int) -> Action:
        return Action(Kind.INPUT if (of, micro_batch) in halved else Kind.BACKWARD, of, micro_batch)

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
                yield Action(Kind.WEIGHT if (stage, m) in halved else Kind.BACKWARD, stage, m)


def _input(schedule: Schedule, rank: int, made: Action) -> Iterator[Action]:
    """How a computation comes by a result that another stage made: computed on this rank, or received."""
    placement = schedule.placement
    if not 0 <= made.stage < placement.stages:
        return
    if placement.rank_of[made.stage] == rank:
        yield made
    else:
        receive = Kind.RECEIVE_ACTIVATION if made.kind is Kind.FORWARD else Kind.RECEIVE_GRADIENT
        yield Action(receive, made.stage, made.micro_batch, placement.rank_of[made.stage])


def _check_channels(schedule: Schedule) -> None:
    """NCCL has no tags: the n-th receive on a channel gets the n-th message sent, whatever it was meant to be."""
    sent: dict[Channel, list[Message]] = {}
    received: dict[Channel, list[tuple[Message, Action]]] = {}
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind in SENDS:
                sent.setdefault(_channel(rank, action), []).append(_message(action))
            elif action.kind in RECEIVES:
                received.setdefault(_channel(rank, action), []).append((_message(action), action))
    for channel, arrivals in received.items():
        for message, (expected, action) in zip(sent[channel], arrivals, strict=True):
            if message != expected:
                raise ScheduleError(
                    f"rank {channel[1]}: {_named(action)} would get {_in_words(message)}, which rank {channel[0]} "
                    f"sends first"
                )


def _simulate(schedule: Schedule, needs: Needs) -> tuple[tuple[Slot, ...], ...]:
    """Runs the lists against each other; raises where ranks wait in a circle.

    A message arrives when it is sent and its receive is posted, and after those before it on its channel; a sender
    never waits. Where sends are buffered messages arrive no later, so that case is proven with it.
    """
    ranks = range(len(schedule.actions))
    position, clock = [0 for _ in ranks], [0 for _ in ranks]
    slots: list[list[Slot]] = [[] for _ in ranks]
    wire = _Wire()
    ended: dict[Action, int] = {}
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            actions = schedule.actions[rank]
            while position[rank] < len(actions):
                action = actions[position[rank]]
                if action.kind in COMPUTATIONS:
                    ready = _ready(rank, needs[rank][position[rank]], wire, ended)
                    if ready is None:
                        break
                    start = max(clock[rank], ready)
                    clock[rank] = ended[action] = start + DURATION[action.kind]
                    slots[rank].append(Slot(start, clock[rank], action))
                else:
                    wire.post(rank, action, clock[rank])
                position[rank] += 1
                moved = True
    for rank in ranks:
        if position[rank] < len(schedule.actions[rank]):
            stuck = schedule.actions[rank][position[rank]]
            raise ScheduleError(
                f"rank {rank}: {_named(stuck)} waits for ever, as ranks wait for each other in a circle"
            )
    return tuple(map(tuple, slots))


def _check_one_queue(schedule: Schedule, needs: Needs) -> None:
    """Runs the lists as a GPU does whose streams share one queue (CUDA_DEVICE_MAX_CONNECTIONS=1; with more streams than queues some always do).

    There work begins in the order in which the host gave it. A message whose stream is still busy with the one before on its channel holds up
    all that follows, whatever stream that belongs to. Where this ends, it ends with more queues too.
    """
    begun: dict[Channel, list[int]] = {}
    place: dict[tuple[int, Action], int] = {}

    def arrived(channel: Channel) -> int:
        return min(begun.setdefault(channel, [0, 0]))

    def begins(rank: int, action: Action, needed: tuple[Action, ...]) -> bool:
        if action.kind in COMPUTATIONS:
            return all(place[rank, n] < arrived(_channel(rank, n)) for n in needed if n.kind in RECEIVES)
        if action.kind is not Kind.REDUCE:
            channel, end = _channel(rank, action), action.kind in RECEIVES
            if arrived(channel) < begun[channel][end]:
                return False
            place[rank, action] = begun[channel][end]
            begun[channel][end] += 1
        return True

    _walk(schedule, needs, begins, "where a GPU has one queue for all its work")


def _check_device_synchronisation(schedule: Schedule, needs: Needs) -> None:
    """Runs the lists as if the host waited for the whole device before it launches a computation.

    CUDA may do so at any launch: to load the kernel's code (lazy loading) or to free memory. Messages under way are kernels
    that wait for their peer, so a rank then waits until every message that it has posted, sent or to be received, is posted by its
    peer as well. Where this ends, it also ends with a synchronisation at some launches and none at others.
    """
    # For each channel how many messages each end has posted: the sender, the receiver.
    posted: dict[Channel, list[int]] = {}
    own: list[set[Channel]] = [set() for _ in schedule.actions]

    def begins(rank: int, action: Action, needed: tuple[Action, ...]) -> bool:
        if action.kind in COMPUTATIONS:
            return all(
                posted[channel][rank == channel[0]] >= posted[channel][rank == channel[1]]
                for channel in own[rank]
            )
        if action.kind is not Kind.REDUCE:
            channel = _channel(rank, action)
            posted.setdefault(channel, [0, 0])[action.kind in RECEIVES] += 1
            own[rank].add(channel)
        return True

    _walk(schedule, needs, begins, "if its launch synchronises the device")


def _walk(
    schedule: Schedule, needs: Needs, begins: Callable[[int, Action, tuple[Action, ...]], bool], where: str
) -> None:
    """Each rank goes through its list as far as its actions can begin, in turns; raises if some never do."""
    position = [0 for _ in schedule.actions]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            at = position[rank]
            while at < len(actions) and begins(rank, actions[at], needs[rank][at]):
                at += 1
            moved, position[rank] = moved or at > position[rank], at
    for rank, actions in enumerate(schedule.actions):
        if position[rank] < len(actions):
            raise ScheduleError(f"rank {rank}: {_named(actions[position[rank]])} waits for ever {where}")


class _Wire:
    """Messages under way: for every channel the times at which its sends and its receives were posted."""

    def __init__(self) -> None:
        self._posted: dict[Channel, tuple[list[int], list[int]]] = {}
        self._place: dict[tuple[int, Action], int] = {}

    def post(self, rank: int, action: Action, time: int) -> None:
        if action.kind is Kind.REDUCE:
            return
        posted = self._posted.setdefault(_channel(rank, action), ([], []))
        times = posted[0] if action.kind in SENDS else posted[1]
        self._place[rank, action] = len(times)
        # The n-th message cannot arrive before the one ahead of it.
        times.append(max(time, times[-1]) if times else time)

    def arrival(self, rank: int, receive: Action) -> int | None:
        """When the message of a posted receive is there, or None while it has not been sent."""
        sends, receives = self._posted[_channel(rank, receive)]
        place = self._place[rank, receive]
        return max(sends[place], receives[place]) if place < len(sends) else None


def _ready(rank: int, needs: tuple[Action, ...], wire: _Wire, ended: dict[Action, int]) -> int | None:
    """From when on a computation can run, or None while something it needs is not there."""
    latest = 0
    for needed in needs:
        time = wire.arrival(rank, needed) if needed.kind in RECEIVES else ended[needed]
        if time is None:
            return None
        latest = max(latest, time)
    return latest


def _most_between(actions: tuple[Action, ...], begin: tuple[Kind, ...], end: tuple[Kind, ...]) -> int:
    """The most micro-batches that have begun and not ended; where none ever ends nothing is kept."""
    if not any(action.kind in end for action in actions):
        return 0
    now = most = 0
    for action in actions:
        now += (action.kind in begin) - (action.kind in end)
        most = max(most, now)
    return most


def _channel(rank: int, action: Action) -> Channel:
    assert action.peer is not None, "a message has two ends"
    if action.kind in SENDS:
        return rank, action.peer, SENDS[action.kind]
    return action.peer, rank, action.kind


def _message(action: Action) -> Message:
    return SENDS.get(action.kind, action.kind), action.stage, action.micro_batch


def _in_words(message: Message) -> str:
    kind, stage, micro_batch = message
    what = "activation" if kind is Kind.RECEIVE_ACTIVATION else "gradient"
    return f"the {what} of stage {stage}, micro-batch {micro_batch}"


def _named(action: Action) -> str:
    """An action as an error names it."""
    if action.kind is Kind.REDUCE:
        return f"the reduction of stage {action.stage} ({action})"
    if action.kind in COMPUTATIONS:
        name = NAMES.get(action.kind, action.kind.name.lower())
        return f"the {name} of stage {action.stage}, micro-batch {action.micro_batch} ({action})"
    verb = "sending" if action.kind in SENDS else "receiving"
    side = "to" if action.kind in SENDS else "from"
    return f"{verb} {_in_words(_message(action))} {side} rank {action.peer} ({action})"

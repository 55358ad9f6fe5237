"""Pipeline schedules: the order in which every pipeline rank computes, sends, receives and reduces.

A schedule is made in two steps: a compute order (forwards and backwards of each rank, nothing else), which is
what distinguishes one schedule from another, and `add_communication`, which adds the messages and the reductions.
`pentatron.layout.check` proves the result sound.
"""

import bisect
import enum
import functools
import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pentatron.layout.actions import Action, Kind, Placement, Schedule
from pentatron.layout.check import DURATION

# --- zero-bubble schedules: the weight half of a split backward fills the bubbles ---
#
# By Qi et al.: Zero Bubble Pipeline Parallelism; Pipeline Parallelism with Controllable Memory. Each schedule
# is given as prioritized lanes of computations, from which one greedy scheduler derives the order.


# Kind, stage, micro-batch.
Computation = tuple[Kind, int, int]
# Forwards and input gradients of one rank that keep their relative order.
Lane = Sequence[Computation]


def v_placement(ranks: int) -> Placement:
    """Returns two stages per rank, down the ranks and back up: first and last stage are on rank 0."""
    return Placement((*range(ranks), *range(ranks - 1, -1, -1)))


def zero_bubble_orders(
    placement: Placement, orders: Sequence[Sequence[Computation]], limit: int
) -> list[list[Computation]]:
    """Splits the backwards of another schedule's order; no rank holds more than `limit` micro-batches.

    Applied to 1F1B with as many micro-batches as ranks this is ZB-H1.
    """
    lanes = [
        [[(Kind.INPUT if kind is Kind.BACKWARD else kind, stage, m) for kind, stage, m in order]]
        for order in orders
    ]
    return greedy_orders(placement, lanes, limit)


def zbv_orders(ranks: int, micro_batches: int) -> list[list[Computation]]:
    """ZB-V: two stages per rank, each half as large, with as much activation memory as 1F1B.

    Computations that finish a micro-batch sooner have priority: ranks full of new micro-batches would
    deadlock, as no backward could run.
    """
    placement = v_placement(ranks)
    lanes = []
    for rank in range(ranks):
        down, up = placement.stages_of(rank)
        preferences = ((Kind.INPUT, down), (Kind.INPUT, up), (Kind.FORWARD, up), (Kind.FORWARD, down))
        lanes.append([[(kind, stage, m) for m in range(micro_batches)] for kind, stage in preferences])
    return greedy_orders(placement, lanes, 2 * ranks)


@dataclass
class _RankState:
    """Scheduler state of one rank: its order so far, pending weight gradients, held micro-batches."""

    lanes: Sequence[Lane]
    limit: int
    next: list[int] = field(default_factory=list)
    order: list[Computation] = field(default_factory=list)
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    alive: int = 0

    def __post_init__(self) -> None:
        self.next = [0] * len(self.lanes)

    @property
    def has_more(self) -> bool:
        return bool(self.waiting) or any(at < len(lane) for at, lane in zip(self.next, self.lanes))

    def heads(self) -> Iterator[tuple[int, Computation]]:
        """Yields the next computation of each lane, except forwards beyond the memory limit."""
        for number, lane in enumerate(self.lanes):
            if self.next[number] < len(lane):
                computation = lane[self.next[number]]
                if computation[0] is not Kind.FORWARD or self.alive < self.limit:
                    yield number, computation

    def take(self, lane: int | None) -> Computation:
        """Appends the next computation of a lane or, for None, the oldest pending weight gradient."""
        if lane is None:
            computation: Computation = (Kind.WEIGHT, *self.waiting.popleft())
            self.alive -= 1
        else:
            computation = self.lanes[lane][self.next[lane]]
            self.next[lane] += 1
            if computation[0] is Kind.FORWARD:
                self.alive += 1
            else:
                self.waiting.append(computation[1:])
        self.order.append(computation)
        return computation


def greedy_orders(
    placement: Placement, lanes: Sequence[Sequence[Lane]], limit: int
) -> list[list[Computation]]:
    """Returns the order of every rank, simulated in time steps of one computation.

    In each step a rank takes the first lane whose next computation has its inputs (from earlier steps) and
    memory. If there is none, it computes a pending weight gradient, if any.
    """
    ranks = [_RankState(lanes_of_rank, limit) for lanes_of_rank in lanes]
    finished: set[Computation] = set()
    while any(rank.has_more for rank in ranks):
        taken = []
        for rank in ranks:
            lane = next(
                (n for n, computation in rank.heads() if _inputs(placement, computation) <= finished), None
            )
            if lane is not None or rank.waiting:
                taken.append(rank.take(lane))
        assert taken, "ranks wait for each other: the limit is too low for these lanes"
        finished.update(taken)
    return [rank.order for rank in ranks]


def _inputs(placement: Placement, computation: Computation) -> set[Computation]:
    """Returns the computations whose results a computation needs."""
    kind, stage, micro_batch = computation
    if kind is Kind.FORWARD:
        return {(Kind.FORWARD, stage - 1, micro_batch)} if stage > 0 else set()
    inputs = {(Kind.FORWARD, stage, micro_batch)}
    if stage + 1 < placement.stages:
        inputs.add((Kind.INPUT, stage + 1, micro_batch))
    return inputs


# --- DualPipeV: a folded pipeline that pairs the forward of one micro-batch with the backward of another ---
#
# By DeepSeek, in the variant with each stage on one rank. Most backwards stay whole, so that a forward and a
# backward can overlap; they are split only while the pipeline fills and drains.


def fewest_micro_batches(ranks: int) -> int:
    """Returns the fewest micro-batches with which the forwards last until the pipeline is full."""
    return 2 * ranks


def dualpipev_orders(ranks: int, micro_batches: int) -> list[list[Computation]]:
    return [list(_DualPipeVOrder(ranks, micro_batches, rank).run()) for rank in range(ranks)]


class _DualPipeVOrder:
    """Generates the order of one rank; `down` and `up` are its stages on the way down and back up."""

    def __init__(self, ranks: int, micro_batches: int, rank: int) -> None:
        self.down, self.up = v_placement(ranks).stages_of(rank)
        # The number of ranks up to and including this one, and of those after it.
        self.above, self.below = rank + 1, ranks - rank - 1
        self.paired = micro_batches - 2 * ranks + self.above
        self._numbers = {
            (kind, stage): itertools.count()
            for kind in (Kind.FORWARD, Kind.BACKWARD)
            for stage in (self.down, self.up)
        }
        self._waiting: deque[tuple[int, int]] = deque()

    def run(self) -> Iterator[Computation]:
        # Fill: new micro-batches enter until the first one has returned from the last rank.
        for _ in range(2 * self.below):
            yield self._forward(self.down)
        for _ in range(self.above):
            yield self._forward(self.down)
            yield self._forward(self.up)
        # The first gradients arrive: weight gradients fill the gaps between them.
        for _ in range(self.below):
            yield self._input(self.up)
            yield self._weight()
            yield self._forward(self.up)
        # Steady state: each forward is paired with a backward of the other stage.
        for _ in range(self.paired):
            yield self._forward(self.down)
            yield self._backward(self.up)
            yield self._forward(self.up)
            yield self._backward(self.down)
        # Drain: no new micro-batches, then no forwards.
        for _ in range(self.below):
            yield self._backward(self.up)
            yield self._forward(self.up)
            yield self._backward(self.down)
        # The second half of the last backwards is split, so that gradients reach the other ranks sooner.
        for place, stage in enumerate((self.up, self.down) * self.above):
            yield self._input(stage) if place >= self.above else self._backward(stage)
        for _ in range(self.below):
            yield self._weight()
            yield self._input(self.down)
        while self._waiting:
            yield self._weight()

    def _forward(self, stage: int) -> Computation:
        return Kind.FORWARD, stage, next(self._numbers[Kind.FORWARD, stage])

    def _backward(self, stage: int) -> Computation:
        return Kind.BACKWARD, stage, next(self._numbers[Kind.BACKWARD, stage])

    def _input(self, stage: int) -> Computation:
        cell = stage, next(self._numbers[Kind.BACKWARD, stage])
        self._waiting.append(cell)
        return Kind.INPUT, *cell

    def _weight(self) -> Computation:
        return Kind.WEIGHT, *self._waiting.popleft()


# Schedules with two stages on each rank, the first and the last stage on rank 0.
FOLDED = ("zbv", "dualpipev")
KINDS = ("gpipe", "1f1b", "interleaved", "zero-bubble", *FOLDED)
# Schedules that split backwards.
SPLITS_BACKWARD = ("zero-bubble", *FOLDED)


def looped_placement(ranks: int, virtual: int) -> Placement:
    """Returns `virtual` stages per rank, assigned round-robin: stage s is on rank s mod `ranks`."""
    return Placement(tuple(stage % ranks for stage in range(ranks * virtual)))


def placement_for(kind: str, ranks: int, virtual: int) -> Placement:
    """Returns the placement of the stages under a schedule."""
    return v_placement(ranks) if kind in FOLDED else looped_placement(ranks, virtual)


def uses_groups(kind: str, virtual: int) -> bool:
    """Whether ranks switch to their next stage after a group of micro-batches."""
    return kind == "interleaved" or (kind == "zero-bubble" and virtual > 1)


class Stages(enum.Enum):
    """Number of stages a schedule runs on each rank."""

    ONE = "one"
    TWO = "two"
    SEVERAL = "several"

    def admits(self, virtual: int) -> bool:
        return {Stages.ONE: virtual == 1, Stages.TWO: virtual == 2, Stages.SEVERAL: virtual > 1}[self]


def required_stages(kind: str, virtual: int) -> Stages | None:
    """Returns the number of stages a schedule needs if `virtual` does not fit it, else None."""
    if kind == "zero-bubble":
        return None
    needed = Stages.TWO if kind in FOLDED else Stages.SEVERAL if kind == "interleaved" else Stages.ONE
    return None if needed.admits(virtual) else needed


def micro_batches_problem(kind: str, ranks: int, micro_batches: int) -> str | None:
    """Returns why a step has too few micro-batches for a schedule, or None."""
    if kind != "dualpipev" or micro_batches >= fewest_micro_batches(ranks):
        return None
    return (
        f"dualpipev needs 2 × {ranks} (pipeline ranks) = {fewest_micro_batches(ranks)} or more micro-batches, "
        f"not {micro_batches}; use {fewest_micro_batches(ranks)} or more, or the schedule zbv"
    )


def group_problem(ranks: int, micro_batches: int, group: int | None) -> str | None:
    """Returns why ranks cannot switch stages after groups of `group` micro-batches, or None."""
    if group is None or ranks <= group <= micro_batches or group == micro_batches:
        return None
    if micro_batches <= ranks:
        allowed = f"{micro_batches}, all of them, as there are no more than the {ranks} pipeline ranks"
    else:
        allowed = f"a number from {ranks} (pipeline ranks) to {micro_batches} (micro-batches)"
    return f"a group of {group} micro-batches does not fit {micro_batches} micro-batches; use {allowed}"


def schedule_problem(
    kind: str, ranks: int, virtual: int, micro_batches: int, group: int | None = None
) -> str | None:
    """Returns why a schedule is impossible, with sizes that would fit, or None."""
    if kind not in KINDS:
        return f"there is no pipeline schedule {kind}; use {', '.join(KINDS[:-1])} or {KINDS[-1]}"
    if min(ranks, virtual, micro_batches) < 1:
        return (
            f"a schedule needs 1 or more ranks, virtual stages and micro-batches, "
            f"not {ranks}, {virtual} and {micro_batches}"
        )
    match required_stages(kind, virtual):
        case Stages.SEVERAL:
            return f"{kind} needs 2 or more virtual stages per rank, not {virtual}; use more, or the schedule 1f1b"
        case Stages.TWO:
            return f"{kind} runs 2 stages per rank, not {virtual}; use 2, or another schedule"
        case Stages.ONE:
            return f"{kind} runs one stage per rank, not {virtual}; use the schedule interleaved, or 1 stage per rank"
    if uses_groups(kind, virtual):
        return group_problem(ranks, micro_batches, group)
    if problem := micro_batches_problem(kind, ranks, micro_batches):
        return problem
    if group is not None:
        return f"{kind} does not group micro-batches, so a group of {group} means nothing; leave it out"
    return None


@functools.lru_cache(maxsize=32)
def training_schedule(
    kind: str, ranks: int, virtual: int, micro_batches: int, group: int | None = None
) -> Schedule:
    """Returns the schedule of one training step."""
    problem = schedule_problem(kind, ranks, virtual, micro_batches, group)
    if problem is not None:
        raise ValueError(problem)
    placement = placement_for(kind, ranks, virtual)
    return add_communication(placement, micro_batches, _orders(kind, placement, micro_batches, group))


@functools.lru_cache(maxsize=32)
def forward_schedule(placement: Placement, micro_batches: int) -> Schedule:
    """Returns a forward-only schedule for evaluation.

    All ranks follow one global order, so it cannot deadlock.
    """
    orders = [
        list(_in_groups(Kind.FORWARD, placement.stages_of(rank), micro_batches, placement.ranks))
        for rank in range(placement.ranks)
    ]
    return add_communication(placement, micro_batches, orders)


def group_sizes(micro_batches: int, group: int) -> list[int]:
    """Splits the micro-batches into groups of `group` or a few more, larger ones first.

    A group smaller than the pipeline would idle ranks in the middle of a step, so the remainder of equal
    groups is spread over them.
    """
    groups = max(1, micro_batches // group)
    size, left_over = divmod(micro_batches, groups)
    return [size + 1] * left_over + [size] * (groups - left_over)


def warmup_forwards(
    kind: str, ranks: int, virtual: int, rank: int, micro_batches: int, group: int | None
) -> int:
    """Returns the warm-up forwards of a rank before forwards and backwards alternate, as in Megatron."""
    if kind == "gpipe":
        return virtual * micro_batches
    if kind == "1f1b":
        return ranks - rank - 1
    return 2 * (ranks - rank - 1) + (virtual - 1) * group_sizes(micro_batches, group or ranks)[0]


def _orders(
    kind: str, placement: Placement, micro_batches: int, group: int | None
) -> Sequence[Sequence[Computation]]:
    ranks, virtual = placement.ranks, placement.stages // placement.ranks
    if kind == "zbv":
        return zbv_orders(ranks, micro_batches)
    if kind == "dualpipev":
        return dualpipev_orders(ranks, micro_batches)
    if kind == "zero-bubble":
        base = "1f1b" if virtual == 1 else "interleaved"
        orders = _orders(base, placement, micro_batches, group)
        # The most that the base schedule holds, which is on its first rank.
        limit = 1 + warmup_forwards(base, ranks, virtual, 0, micro_batches, group)
        return zero_bubble_orders(placement, orders, limit)
    return [_order(kind, placement, rank, micro_batches, group) for rank in range(ranks)]


def _order(
    kind: str, placement: Placement, rank: int, micro_batches: int, group: int | None
) -> list[Computation]:
    stages, ranks = placement.stages_of(rank), placement.ranks
    forwards = list(_in_groups(Kind.FORWARD, stages, micro_batches, group or ranks))
    # Backwards in the order of micro-batches: every schedule accumulates gradients in the same order.
    backwards = list(_in_groups(Kind.BACKWARD, stages[::-1], micro_batches, group or ranks))
    ahead = warmup_forwards(kind, ranks, len(stages), rank, micro_batches, group)
    return list(_one_forward_one_backward(forwards, backwards, ahead))


def _in_groups(kind: Kind, stages: Sequence[int], micro_batches: int, group: int) -> Iterator[Computation]:
    """Yields every stage in turn for a group of micro-batches, then the next group."""
    first = 0
    for size in group_sizes(micro_batches, group):
        for stage, micro_batch in itertools.product(stages, range(first, first + size)):
            yield kind, stage, micro_batch
        first += size


def _one_forward_one_backward(
    forwards: Sequence[Computation], backwards: Sequence[Computation], ahead: int
) -> Iterator[Computation]:
    """Yields `ahead` warm-up forwards, then forwards and backwards in turn, then the remaining backwards."""
    yield from forwards[:ahead]
    for forward, backward in itertools.zip_longest(forwards[ahead:], backwards):
        if forward is not None:
            yield forward
        yield backward


def add_communication(
    placement: Placement, micro_batches: int, orders: Sequence[Sequence[Computation]]
) -> Schedule:
    """Adds messages and reductions to each rank's computations.

    A result is sent right after its computation. A receive is posted before the first computation that begins
    later than the one that produces its message: the message then overlaps computation, and a launch that
    synchronizes the device waits only for computations that begin earlier, so ranks cannot deadlock (decision
    0057). A stage is reduced right after its last backward or weight half.
    """
    begins = _begin_times(placement, orders)
    return Schedule(
        placement,
        micro_batches,
        tuple(tuple(_lowered(placement, rank, order, begins)) for rank, order in enumerate(orders)),
    )


def _begin_times(placement: Placement, orders: Sequence[Sequence[Computation]]) -> dict[Computation, float]:
    """Returns when each computation begins if it starts as early as possible and messages take no time.

    Computations that never begin are missing.
    """
    begins: dict[Computation, float] = {}
    sent: dict[tuple[bool, int, int], float] = {}
    clock, position = [0.0 for _ in orders], [0 for _ in orders]
    progressed = True
    while progressed:
        progressed = False
        for rank, order in enumerate(orders):
            for computation in order[position[rank] :]:
                kind, stage, micro_batch = computation
                forward = kind is Kind.FORWARD
                source = (forward, stage - 1 if forward else stage + 1, micro_batch)
                has_source = kind is not Kind.WEIGHT and 0 <= source[1] < placement.stages
                if has_source and source not in sent:
                    break
                begins[computation] = max(clock[rank], sent[source] if has_source else 0.0)
                clock[rank] = begins[computation] + DURATION[kind]
                if kind is not Kind.WEIGHT:
                    sent[forward, stage, micro_batch] = clock[rank]
                position[rank] += 1
                progressed = True
    return begins


def _global_order(computation: Computation, begins: dict[Computation, float]) -> tuple[float, bool, int]:
    """Sort key of the computations of all ranks: by begin time, on a tie in the direction of the messages."""
    kind, stage, _ = computation
    forward = kind is Kind.FORWARD
    return begins.get(computation, math.inf), not forward, stage if forward else -stage


def _lowered(
    placement: Placement, rank: int, order: Sequence[Computation], begins: dict[Computation, float]
) -> Iterator[Action]:
    last_backward = {
        stage: i for i, (kind, stage, _) in enumerate(order) if kind in (Kind.BACKWARD, Kind.WEIGHT)
    }
    # Messages of one sender are sent and needed in the same order, so they are posted in it as well.
    posted: list[list[Action]] = [[] for _ in order]
    keys = [_global_order(computation, begins) for computation in order]
    for i, computation in enumerate(order):
        for receive in _received(placement, rank, computation):
            producers = (Kind.FORWARD,) if computation[0] is Kind.FORWARD else (Kind.BACKWARD, Kind.INPUT)
            sender = min(
                _global_order((kind, receive.stage, receive.micro_batch), begins) for kind in producers
            )
            posted[bisect.bisect_right(keys, sender, 0, i)].append(receive)
    for i, computation in enumerate(order):
        yield from posted[i]
        kind, stage, micro_batch = computation
        yield Action(kind, stage, micro_batch)
        yield from _sent(placement, rank, computation)
        if last_backward.get(stage) == i:
            yield Action(Kind.REDUCE, stage)


def _received(placement: Placement, rank: int, computation: Computation) -> Iterator[Action]:
    """Yields the receive of a computation's input, if it comes from another rank."""
    kind, stage, micro_batch = computation
    if kind is Kind.WEIGHT:
        return
    forward = kind is Kind.FORWARD
    source = stage - 1 if forward else stage + 1
    if 0 <= source < placement.stages and placement.rank_of[source] != rank:
        message = Kind.RECEIVE_ACTIVATION if forward else Kind.RECEIVE_GRADIENT
        yield Action(message, source, micro_batch, placement.rank_of[source])


def _sent(placement: Placement, rank: int, computation: Computation) -> Iterator[Action]:
    """Yields the send of a computation's result, if another rank needs it."""
    kind, stage, micro_batch = computation
    if kind is Kind.WEIGHT:
        return
    forward = kind is Kind.FORWARD
    target = stage + 1 if forward else stage - 1
    if 0 <= target < placement.stages and placement.rank_of[target] != rank:
        message = Kind.SEND_ACTIVATION if forward else Kind.SEND_GRADIENT
        yield Action(message, stage, micro_batch, placement.rank_of[target])

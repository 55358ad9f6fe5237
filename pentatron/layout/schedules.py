"""Pipeline schedules: in which order every pipeline rank computes, and when it sends, receives and reduces.

A schedule is made in two steps: a compute order (forwards and backwards of each rank, nothing else), which is what
distinguishes one schedule from another, and `lower`, which adds the messages and the reductions.
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

# Zero-bubble pipelines: a backward is cut in two, and its second half fills the time a rank would wait.
#
# The gradient of a stage's input is what the stage before waits for; the gradients of its weights nobody
# waits for. The idea and the names of the schedules are Qi et al.'s (Zero Bubble Pipeline Parallelism;
# Pipeline Parallelism with Controllable Memory). Here each schedule is a list of wishes, and one small
# scheduler grants them as time passes.


# One computation: its kind, the stage, the micro-batch.
Computation = tuple[Kind, int, int]
# Forwards and input gradients of one rank that keep their order among themselves.
Lane = Sequence[Computation]


def v_placement(ranks: int) -> Placement:
    """Two stages on every rank: the pipeline goes down the ranks and comes back, so that the last stage is on rank 0."""
    return Placement((*range(ranks), *range(ranks - 1, -1, -1)))


def zero_bubble_orders(
    placement: Placement, orders: Sequence[Sequence[Computation]], limit: int
) -> list[list[Computation]]:
    """The order of another schedule, its backwards cut in two; no rank holds more than `limit` micro-batches.

    With 1F1B's order and as many micro-batches as ranks that is ZB-H1.
    """
    lanes = [
        [[(Kind.INPUT if kind is Kind.BACKWARD else kind, stage, m) for kind, stage, m in order]]
        for order in orders
    ]
    return granted(placement, lanes, limit)


def zbv_orders(ranks: int, micro_batches: int) -> list[list[Computation]]:
    """ZB-V: two stages on each rank, and as much memory as 1F1B: twice as many stages as ranks, each half as large.

    What ends a micro-batch sooner comes first: ranks that filled up with new micro-batches would wait for each other
    for ever, as none could come back.
    """
    placement = v_placement(ranks)
    lanes = []
    for rank in range(ranks):
        down, back = placement.stages_of(rank)
        wishes = ((Kind.INPUT, down), (Kind.INPUT, back), (Kind.FORWARD, back), (Kind.FORWARD, down))
        lanes.append([[(kind, stage, m) for m in range(micro_batches)] for kind, stage in wishes])
    return granted(placement, lanes, 2 * ranks)


@dataclass
class _Rank:
    """How far one rank is: what it has done, the weight gradients it could compute, the micro-batches it holds."""

    lanes: Sequence[Lane]
    limit: int
    next: list[int] = field(default_factory=list)
    done: list[Computation] = field(default_factory=list)
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    alive: int = 0

    def __post_init__(self) -> None:
        self.next = [0] * len(self.lanes)

    @property
    def has_more(self) -> bool:
        return bool(self.waiting) or any(at < len(lane) for at, lane in zip(self.next, self.lanes))

    def heads(self) -> Iterator[tuple[int, Computation]]:
        """The next wish of each lane for which there is room."""
        for number, lane in enumerate(self.lanes):
            if self.next[number] < len(lane):
                computation = lane[self.next[number]]
                if computation[0] is not Kind.FORWARD or self.alive < self.limit:
                    yield number, computation

    def take(self, lane: int | None) -> Computation:
        """The next wish of a lane; without one, the weight gradient that waits longest."""
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
        self.done.append(computation)
        return computation


def granted(placement: Placement, lanes: Sequence[Sequence[Lane]], limit: int) -> list[list[Computation]]:
    """What every rank does when time passes in steps of one computation.

    In each step a rank takes the first of its lanes whose next wish can be granted: its input has been computed in an
    earlier step and there is room for it. Where none can, it computes a weight gradient, if one waits.
    """
    ranks = [_Rank(wishes, limit) for wishes in lanes]
    finished: set[Computation] = set()
    while any(rank.has_more for rank in ranks):
        taken = []
        for rank in ranks:
            lane = next((n for n, wish in rank.heads() if _source(placement, wish) <= finished), None)
            if lane is not None or rank.waiting:
                taken.append(rank.take(lane))
        assert taken, "ranks wait for each other: the limit is too low for these lanes"
        finished.update(taken)
    return [rank.done for rank in ranks]


def _source(placement: Placement, computation: Computation) -> set[Computation]:
    """What must be finished before a computation can start."""
    kind, stage, micro_batch = computation
    if kind is Kind.FORWARD:
        return {(Kind.FORWARD, stage - 1, micro_batch)} if stage > 0 else set()
    found = {(Kind.FORWARD, stage, micro_batch)}
    if stage + 1 < placement.stages:
        found.add((Kind.INPUT, stage + 1, micro_batch))
    return found


# DualPipeV: a folded pipeline in which the forward of one micro-batch runs beside the backward of another.
#
# The schedule is DeepSeek's, in the variant that keeps each stage on one rank. Most backwards stay whole, so
# that a forward and a backward can be computed together; only where the pipeline fills and drains are they
# cut in two.


def fewest_micro_batches(ranks: int) -> int:
    """With fewer the forwards are used up before the pipeline is full."""
    return 2 * ranks


def dualpipev_orders(ranks: int, micro_batches: int) -> list[list[Computation]]:
    return [list(_Order(ranks, micro_batches, rank).run()) for rank in range(ranks)]


class _Order:
    """The order of one rank: `down` is its stage on the way down the ranks, `back` the one on the way back."""

    def __init__(self, ranks: int, micro_batches: int, rank: int) -> None:
        self.down, self.back = v_placement(ranks).stages_of(rank)
        # How many ranks lie above this one with it, and how many below.
        self.above, self.below = rank + 1, ranks - rank - 1
        self.paired = micro_batches - 2 * ranks + self.above
        self._numbers = {
            (kind, stage): itertools.count()
            for kind in (Kind.FORWARD, Kind.BACKWARD)
            for stage in (self.down, self.back)
        }
        self._waiting: deque[tuple[int, int]] = deque()

    def run(self) -> Iterator[Computation]:
        # Fill: until the first micro-batch has been to the last rank and back, new ones can follow it.
        for _ in range(2 * self.below):
            yield self._forward(self.down)
        for _ in range(self.above):
            yield self._forward(self.down)
            yield self._forward(self.back)
        # The first gradients come back: weight gradients fill the gaps between them.
        for _ in range(self.below):
            yield self._input(self.back)
            yield self._weight()
            yield self._forward(self.back)
        # Full: each forward stands beside a backward of the other stage.
        for _ in range(self.paired):
            yield self._forward(self.down)
            yield self._backward(self.back)
            yield self._forward(self.back)
            yield self._backward(self.down)
        # Drain: no new micro-batches, then no forwards at all.
        for _ in range(self.below):
            yield self._backward(self.back)
            yield self._forward(self.back)
            yield self._backward(self.down)
        yield from self._last_backwards()
        for _ in range(self.below):
            yield self._weight()
            yield self._input(self.down)
        while self._waiting:
            yield self._weight()

    def _last_backwards(self) -> Iterator[Computation]:
        """Backwards of both stages in turn; the second half of them hurries and leaves the weights for later."""
        stages = (self.back, self.down) * self.above
        for place, stage in enumerate(stages):
            yield self._input(stage) if place >= self.above else self._backward(stage)

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


# Two stages on each rank, the first and the last of all on rank 0.
FOLDED = ("zbv", "dualpipev")
KINDS = ("gpipe", "1f1b", "interleaved", "zero-bubble", *FOLDED)
# Those that cut backwards in two.
HALVING = ("zero-bubble", *FOLDED)


def looped_placement(ranks: int, virtual: int) -> Placement:
    """`virtual` stages on every rank, dealt out in turns: stage s sits on rank s mod `ranks`."""
    return Placement(tuple(stage % ranks for stage in range(ranks * virtual)))


def placement_for(kind: str, ranks: int, virtual: int) -> Placement:
    """Where the stages sit under a schedule."""
    return v_placement(ranks) if kind in FOLDED else looped_placement(ranks, virtual)


def takes_groups(kind: str, virtual: int) -> bool:
    """Whether ranks turn to their next stage after a group of micro-batches."""
    return kind == "interleaved" or (kind == "zero-bubble" and virtual > 1)


class Stages(enum.Enum):
    """How many stages a schedule runs on each rank."""

    ONE = "one"
    TWO = "two"
    SEVERAL = "several"

    def admits(self, virtual: int) -> bool:
        return {Stages.ONE: virtual == 1, Stages.TWO: virtual == 2, Stages.SEVERAL: virtual > 1}[self]


def stages_misfit(kind: str, virtual: int) -> Stages | None:
    """What a schedule needs, if this number of stages on each rank does not fit it."""
    if kind == "zero-bubble":
        return None
    needed = Stages.TWO if kind in FOLDED else Stages.SEVERAL if kind == "interleaved" else Stages.ONE
    return None if needed.admits(virtual) else needed


def micro_batches_problem(kind: str, ranks: int, micro_batches: int) -> str | None:
    """Why a step has too few micro-batches for a schedule, or None."""
    if kind != "dualpipev" or micro_batches >= fewest_micro_batches(ranks):
        return None
    return (
        f"dualpipev needs 2 × {ranks} (pipeline ranks) = {fewest_micro_batches(ranks)} or more micro-batches, "
        f"not {micro_batches}; use {fewest_micro_batches(ranks)} or more, or the schedule zbv"
    )


def group_problem(ranks: int, micro_batches: int, group: int | None) -> str | None:
    """Why ranks cannot turn to their next stage after groups of so many micro-batches, or None."""
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
    """Why there is no such schedule, with the numbers that would do, or None."""
    if kind not in KINDS:
        return f"there is no pipeline schedule {kind}; use {', '.join(KINDS[:-1])} or {KINDS[-1]}"
    if min(ranks, virtual, micro_batches) < 1:
        return (
            f"a schedule needs 1 or more ranks, virtual stages and micro-batches, "
            f"not {ranks}, {virtual} and {micro_batches}"
        )
    match stages_misfit(kind, virtual):
        case Stages.SEVERAL:
            return f"{kind} needs 2 or more virtual stages per rank, not {virtual}; use more, or the schedule 1f1b"
        case Stages.TWO:
            return f"{kind} runs 2 stages per rank, not {virtual}; use 2, or another schedule"
        case Stages.ONE:
            return f"{kind} runs one stage per rank, not {virtual}; use the schedule interleaved, or 1 stage per rank"
    if takes_groups(kind, virtual):
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
    """What every pipeline rank does in one training step."""
    problem = schedule_problem(kind, ranks, virtual, micro_batches, group)
    if problem is not None:
        raise ValueError(problem)
    placement = placement_for(kind, ranks, virtual)
    return lower(placement, micro_batches, _orders(kind, placement, micro_batches, group))


@functools.lru_cache(maxsize=32)
def forward_schedule(placement: Placement, micro_batches: int) -> Schedule:
    """Forward only, for evaluation. All ranks follow one global order, so that none can wait in a circle."""
    orders = [
        list(_in_groups(Kind.FORWARD, placement.stages_of(rank), micro_batches, placement.ranks))
        for rank in range(placement.ranks)
    ]
    return lower(placement, micro_batches, orders)


def group_sizes(micro_batches: int, group: int) -> list[int]:
    """Cuts the micro-batches into groups of `group` or a few more, the larger ones first.

    A group smaller than the pipeline would leave ranks idle in the middle of a step; so what is left over after equal
    groups is spread over them.
    """
    groups = max(1, micro_batches // group)
    size, left_over = divmod(micro_batches, groups)
    return [size + 1] * left_over + [size] * (groups - left_over)


def forwards_ahead(
    kind: str, ranks: int, virtual: int, rank: int, micro_batches: int, group: int | None
) -> int:
    """How many forwards a rank runs before its first backward may follow each further one: Megatron's counts."""
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
        # What the base holds where it holds most, on its first rank.
        limit = 1 + forwards_ahead(base, ranks, virtual, 0, micro_batches, group)
        return zero_bubble_orders(placement, orders, limit)
    return [_order(kind, placement, rank, micro_batches, group) for rank in range(ranks)]


def _order(
    kind: str, placement: Placement, rank: int, micro_batches: int, group: int | None
) -> list[Computation]:
    own, ranks = placement.stages_of(rank), placement.ranks
    forwards = list(_in_groups(Kind.FORWARD, own, micro_batches, group or ranks))
    # Backwards keep the order of the micro-batches, so that every schedule adds up gradients alike.
    backwards = list(_in_groups(Kind.BACKWARD, own[::-1], micro_batches, group or ranks))
    ahead = forwards_ahead(kind, ranks, len(own), rank, micro_batches, group)
    return list(_one_forward_one_backward(forwards, backwards, ahead))


def _in_groups(kind: Kind, stages: Sequence[int], micro_batches: int, group: int) -> Iterator[Computation]:
    """Every stage in turn for a group of micro-batches, then the next group."""
    first = 0
    for size in group_sizes(micro_batches, group):
        for stage, micro_batch in itertools.product(stages, range(first, first + size)):
            yield kind, stage, micro_batch
        first += size


def _one_forward_one_backward(
    forwards: Sequence[Computation], backwards: Sequence[Computation], ahead: int
) -> Iterator[Computation]:
    """`ahead` forwards to fill the pipeline, then one forward and one backward in turn, then the backwards left over."""
    yield from forwards[:ahead]
    for forward, backward in itertools.zip_longest(forwards[ahead:], backwards):
        if forward is not None:
            yield forward
        yield backward


def lower(placement: Placement, micro_batches: int, orders: Sequence[Sequence[Computation]]) -> Schedule:
    """Adds to each rank's computations the messages and the reductions.

    A result is sent right after it was computed. A receive is posted before the first computation that begins later than the one
    which makes its message. The message then travels while the ranks compute, and a launch that synchronises the device waits for
    computations that begin earlier only, so that ranks cannot wait in a circle (decision 0057). A stage is reduced right after its
    last backward, or second half of one.
    """
    begins = _beginnings(placement, orders)
    return Schedule(
        placement,
        micro_batches,
        tuple(tuple(_lowered(placement, rank, order, begins)) for rank, order in enumerate(orders)),
    )


def _beginnings(placement: Placement, orders: Sequence[Sequence[Computation]]) -> dict[Computation, float]:
    """When each computation begins, if it begins as soon as it can and messages take no time. One that never begins is not there."""
    begins: dict[Computation, float] = {}
    sent: dict[tuple[bool, int, int], float] = {}
    clock, done = [0.0 for _ in orders], [0 for _ in orders]
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            for computation in order[done[rank] :]:
                kind, stage, micro_batch = computation
                forward = kind is Kind.FORWARD
                source = (forward, stage - 1 if forward else stage + 1, micro_batch)
                needs = kind is not Kind.WEIGHT and 0 <= source[1] < placement.stages
                if needs and source not in sent:
                    break
                begins[computation] = max(clock[rank], sent[source] if needs else 0.0)
                clock[rank] = begins[computation] + DURATION[kind]
                if kind is not Kind.WEIGHT:
                    sent[forward, stage, micro_batch] = clock[rank]
                done[rank] += 1
                moved = True
    return begins


def _key(computation: Computation, begins: dict[Computation, float]) -> tuple[float, bool, int]:
    """Puts the computations of all ranks into one order: by their beginning, of those that begin together along the way of the messages."""
    kind, stage, _ = computation
    forward = kind is Kind.FORWARD
    return begins.get(computation, math.inf), not forward, stage if forward else -stage


def _lowered(
    placement: Placement, rank: int, order: Sequence[Computation], begins: dict[Computation, float]
) -> Iterator[Action]:
    last_backward = {
        stage: i for i, (kind, stage, _) in enumerate(order) if kind in (Kind.BACKWARD, Kind.WEIGHT)
    }
    # Messages of one sender are sent, and needed, in the same order, so they are posted in it as well.
    posted: list[list[Action]] = [[] for _ in order]
    own = [_key(computation, begins) for computation in order]
    for i, computation in enumerate(order):
        for receive in _received(placement, rank, computation):
            makes = (Kind.FORWARD,) if computation[0] is Kind.FORWARD else (Kind.BACKWARD, Kind.INPUT)
            sender = min(_key((kind, receive.stage, receive.micro_batch), begins) for kind in makes)
            posted[bisect.bisect_right(own, sender, 0, i)].append(receive)
    for i, computation in enumerate(order):
        yield from posted[i]
        kind, stage, micro_batch = computation
        yield Action(kind, stage, micro_batch)
        yield from _sent(placement, rank, computation)
        if last_backward.get(stage) == i:
            yield Action(Kind.REDUCE, stage)


def _received(placement: Placement, rank: int, computation: Computation) -> Iterator[Action]:
    """The message a computation waits for, if it comes from another rank."""
    kind, stage, micro_batch = computation
    if kind is Kind.WEIGHT:
        return
    forward = kind is Kind.FORWARD
    source = stage - 1 if forward else stage + 1
    if 0 <= source < placement.stages and placement.rank_of[source] != rank:
        message = Kind.RECEIVE_ACTIVATION if forward else Kind.RECEIVE_GRADIENT
        yield Action(message, source, micro_batch, placement.rank_of[source])


def _sent(placement: Placement, rank: int, computation: Computation) -> Iterator[Action]:
    """The message that carries the result of a computation, if another rank needs it."""
    kind, stage, micro_batch = computation
    if kind is Kind.WEIGHT:
        return
    forward = kind is Kind.FORWARD
    target = stage + 1 if forward else stage - 1
    if 0 <= target < placement.stages and placement.rank_of[target] != rank:
        message = Kind.SEND_ACTIVATION if forward else Kind.SEND_GRADIENT
        yield Action(message, stage, micro_batch, placement.rank_of[target])

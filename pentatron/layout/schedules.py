"""Pipeline schedules: the order in which every pipeline rank computes, sends, receives and reduces.

A schedule is made in two steps: a compute order (forwards and backwards of each rank, nothing else), which is
what distinguishes one schedule from another, and `add_communication`, which adds the messages and the
reductions. `pentatron.layout.check` proves the result sound. A new schedule is an entry of `SCHEDULES` with
its compute
order.
"""

import bisect
import enum
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
# All computations of one rank.
Order = Sequence[Computation]
Orders = Sequence[Order]


class StagesPerRank(enum.Enum):
    """Number of stages a schedule runs on each rank."""

    ONE = "one"
    TWO = "two"
    SEVERAL = "several"


@dataclass(frozen=True)
class ScheduleKind:
    """A choice of `--pipeline-schedule`.

    `orders` returns the compute order for a placement, a number of micro-batches and the size of a group of
    micro-batches. `stages`: how many a rank has; None if any number fits. `splits_backward`: whether weight
    gradients are computed separately, later. `micro_batches_per_rank`: the fewest that fill the pipeline.
    """

    orders: Callable[[Placement, int, int | None], Orders]
    stages: StagesPerRank | None = None
    splits_backward: bool = False
    micro_batches_per_rank: int = 0


def v_placement(ranks: int) -> Placement:
    """Returns two stages per rank, down the ranks and back up: first and last stage are on rank 0."""
    return Placement((*range(ranks), *range(ranks - 1, -1, -1)))


def zbv_orders(ranks: int, micro_batches: int) -> Orders:
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
    """Scheduler state of one rank: what is left of its lanes, its order so far, pending weight gradients,
    held micro-batches.
    """

    lanes: Sequence[deque[Computation]]
    limit: int
    order: list[Computation] = field(default_factory=list)
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    in_flight: int = 0

    def advance(self, placement: Placement, finished: set[Computation]) -> Computation | None:
        """Runs the next computation of the first lane that has its inputs and memory, else the oldest pending
        weight gradient; returns what ran.
        """
        for lane in filter(None, self.lanes):
            has_memory = lane[0][0] is not Kind.FORWARD or self.in_flight < self.limit
            if has_memory and _inputs(placement, lane[0]) <= finished:
                computation = lane.popleft()
                break
        else:
            if not self.waiting:
                return None
            computation = (Kind.WEIGHT, *self.waiting.popleft())
        self.in_flight += {Kind.FORWARD: 1, Kind.INPUT: 0, Kind.WEIGHT: -1}[computation[0]]
        if computation[0] is Kind.INPUT:
            self.waiting.append(computation[1:])
        self.order.append(computation)
        return computation


def greedy_orders(placement: Placement, lanes: Sequence[Sequence[Lane]], limit: int) -> Orders:
    """Returns the order of every rank, simulated in time steps of one computation.

    In each step a rank takes the first lane whose next computation has its inputs (from earlier steps) and
    memory. If there is none, it computes a pending weight gradient, if any.
    """
    ranks = [_RankState([deque(lane) for lane in lanes_of_rank], limit) for lanes_of_rank in lanes]
    finished: set[Computation] = set()
    while any(rank.waiting or any(rank.lanes) for rank in ranks):
        taken = [rank.advance(placement, finished) for rank in ranks]
        assert any(taken), "ranks wait for each other: the limit is too low for these lanes"
        finished.update(computation for computation in taken if computation is not None)
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


def _dualpipev_order(ranks: int, micro_batches: int, rank: int) -> Order:
    """Returns the order of one rank; `down` and `up` are its stages on the way down and back up."""
    down, up = v_placement(ranks).stages_of(rank)
    # The number of ranks up to and including this one, and of those after it.
    above, below = rank + 1, ranks - rank - 1
    forward_down, forward_up = (Kind.FORWARD, down), (Kind.FORWARD, up)
    backward_down, backward_up = (Kind.BACKWARD, down), (Kind.BACKWARD, up)
    # The oldest pending one, whatever its stage.
    weight = (Kind.WEIGHT, -1)
    pattern = [
        # Fill: new micro-batches enter until the first one has returned from the last rank.
        *[forward_down] * (2 * below),
        *[forward_down, forward_up] * above,
        # The first gradients arrive: weight gradients fill the gaps between them.
        *[(Kind.INPUT, up), weight, forward_up] * below,
        # Steady state: each forward is paired with a backward of the other stage.
        *[forward_down, backward_up, forward_up, backward_down] * (micro_batches - 2 * ranks + above),
        # Drain: no new micro-batches, then no forwards.
        *[backward_up, forward_up, backward_down] * below,
        # The second half of the last backwards is split, so that gradients reach the other ranks sooner.
        *([backward_up, backward_down] * above)[:above],
        *([(Kind.INPUT, up), (Kind.INPUT, down)] * above)[above:],
        *[weight, (Kind.INPUT, down)] * below,
        *[weight] * above,
    ]
    numbers = {(is_forward, stage): itertools.count() for is_forward in (True, False) for stage in (down, up)}
    waiting: deque[tuple[int, int]] = deque()
    order: list[Computation] = []
    for kind, stage in pattern:
        is_forward = kind is Kind.FORWARD
        cell = waiting.popleft() if kind is Kind.WEIGHT else (stage, next(numbers[is_forward, stage]))
        if kind is Kind.INPUT:
            waiting.append(cell)
        order.append((kind, *cell))
    return order


def looped_placement(ranks: int, virtual: int) -> Placement:
    """Returns `virtual` stages per rank, assigned round-robin: stage s is on rank s mod `ranks`."""
    return Placement(tuple(stage % ranks for stage in range(ranks * virtual)))


def placement_for(kind: str, ranks: int, virtual: int) -> Placement:
    """Returns the placement of the stages under a schedule."""
    return v_placement(ranks) if kind in FOLDED else looped_placement(ranks, virtual)


def uses_groups(kind: str, virtual: int) -> bool:
    """Whether ranks switch to their next stage after a group of micro-batches."""
    return kind == "interleaved" or (kind == "zero-bubble" and virtual > 1)


def required_stages(kind: str, virtual: int) -> StagesPerRank | None:
    """Returns the number of stages a schedule needs if `virtual` does not fit it, else None."""
    needed = SCHEDULES[kind].stages
    fits = {
        None: True,
        StagesPerRank.ONE: virtual == 1,
        StagesPerRank.TWO: virtual == 2,
        StagesPerRank.SEVERAL: virtual > 1,
    }
    return None if fits[needed] else needed


def micro_batches_problem(kind: str, ranks: int, micro_batches: int) -> str | None:
    """Returns why a step has too few micro-batches for a schedule, or None."""
    per_rank = SCHEDULES[kind].micro_batches_per_rank
    if micro_batches >= per_rank * ranks:
        return None
    return (
        f"{kind} needs {per_rank} × {ranks} (pipeline ranks) = {per_rank * ranks} or more micro-batches, "
        f"not {micro_batches}; use {per_rank * ranks} or more, or the schedule zbv"
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
        sizes = f"{ranks}, {virtual} and {micro_batches}"
        return f"a schedule needs 1 or more ranks, virtual stages and micro-batches, not {sizes}"
    match required_stages(kind, virtual):
        case StagesPerRank.SEVERAL:
            return f"{kind} needs 2 or more virtual stages per rank, not {virtual}; use more, or the schedule 1f1b"
        case StagesPerRank.TWO:
            return f"{kind} runs 2 stages per rank, not {virtual}; use 2, or another schedule"
        case StagesPerRank.ONE:
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
    if problem := schedule_problem(kind, ranks, virtual, micro_batches, group):
        raise ValueError(problem)
    placement = placement_for(kind, ranks, virtual)
    orders = SCHEDULES[kind].orders(placement, micro_batches, group)
    return add_communication(placement, micro_batches, orders)


@functools.lru_cache(maxsize=32)
def forward_schedule(placement: Placement, micro_batches: int) -> Schedule:
    """Returns a forward-only schedule for evaluation.

    All ranks follow one global order, so it cannot deadlock.
    """
    ranks = placement.ranks
    stages = map(placement.stages_of, range(ranks))
    orders = [list(_in_groups(Kind.FORWARD, own, micro_batches, ranks)) for own in stages]
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


def _zero_bubble_orders(placement: Placement, micro_batches: int, group: int | None) -> Orders:
    """Splits the backwards of 1F1B, or of interleaved.

    With as many micro-batches as ranks 1F1B becomes ZB-H1.
    """
    ranks, virtual = placement.ranks, placement.stages // placement.ranks
    base = "1f1b" if virtual == 1 else "interleaved"
    halves = {Kind.FORWARD: Kind.FORWARD, Kind.BACKWARD: Kind.INPUT}
    orders = _warmup_orders(base, placement, micro_batches, group)
    lanes = [[[(halves[kind], stage, m) for kind, stage, m in order]] for order in orders]
    # The most that the base schedule holds, which is on its first rank.
    limit = 1 + warmup_forwards(base, ranks, virtual, 0, micro_batches, group)
    return greedy_orders(placement, lanes, limit)


def _warmup_orders(kind: str, placement: Placement, micro_batches: int, group: int | None) -> Orders:
    return [_order(kind, placement, rank, micro_batches, group) for rank in range(placement.ranks)]


def _order(kind: str, placement: Placement, rank: int, micro_batches: int, group: int | None) -> Order:
    stages, ranks = placement.stages_of(rank), placement.ranks
    forwards = list(_in_groups(Kind.FORWARD, stages, micro_batches, group or ranks))
    # Backwards in the order of micro-batches: every schedule accumulates gradients in the same order.
    backwards = list(_in_groups(Kind.BACKWARD, stages[::-1], micro_batches, group or ranks))
    ahead = warmup_forwards(kind, ranks, len(stages), rank, micro_batches, group)
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(forwards[ahead:], backwards))
    return [*forwards[:ahead], *(computation for computation in in_turn if computation is not None)]


def _in_groups(kind: Kind, stages: Sequence[int], micro_batches: int, group: int) -> Iterator[Computation]:
    """Yields every stage in turn for a group of micro-batches, then the next group."""
    first = 0
    for size in group_sizes(micro_batches, group):
        for stage, micro_batch in itertools.product(stages, range(first, first + size)):
            yield kind, stage, micro_batch
        first += size


# Every choice of `--pipeline-schedule`.
SCHEDULES: dict[str, ScheduleKind] = {
    "1f1b": ScheduleKind(functools.partial(_warmup_orders, "1f1b"), StagesPerRank.ONE),
    "gpipe": ScheduleKind(functools.partial(_warmup_orders, "gpipe"), StagesPerRank.ONE),
    "interleaved": ScheduleKind(functools.partial(_warmup_orders, "interleaved"), StagesPerRank.SEVERAL),
    "zero-bubble": ScheduleKind(_zero_bubble_orders, splits_backward=True),
    "zbv": ScheduleKind(
        lambda placement, count, _: zbv_orders(placement.ranks, count), StagesPerRank.TWO, True
    ),
    "dualpipev": ScheduleKind(
        lambda placement, micro_batches, _: [
            _dualpipev_order(placement.ranks, micro_batches, rank) for rank in range(placement.ranks)
        ],
        StagesPerRank.TWO,
        splits_backward=True,
        micro_batches_per_rank=2,
    ),
}
KINDS = tuple(SCHEDULES)
# Schedules with the first and the last stage on rank 0.
FOLDED = tuple(kind for kind, schedule in SCHEDULES.items() if schedule.stages is StagesPerRank.TWO)
SPLITS_BACKWARD = tuple(kind for kind, schedule in SCHEDULES.items() if schedule.splits_backward)


def add_communication(placement: Placement, micro_batches: int, orders: Orders) -> Schedule:
    """Adds messages and reductions to each rank's computations.

    A result is sent right after its computation. A receive is posted before the first computation that begins
    later than the one that produces its message: the message then overlaps computation, and a launch that
    synchronizes the device waits only for computations that begin earlier, so ranks cannot deadlock (decision
    0057). A stage is reduced right after its last backward or weight half.
    """
    begins = _begin_times(placement, orders)
    actions = tuple(tuple(_rank_actions(placement, rank, order, begins)) for rank, order in enumerate(orders))
    return Schedule(placement, micro_batches, actions)


def _begin_times(placement: Placement, orders: Orders) -> dict[Computation, float]:
    """Returns when each computation begins if it starts as early as possible and messages take no time.

    Computations that never begin are missing.
    """
    begins: dict[Computation, float] = {}
    sent: dict[tuple[bool, int | None, int], float] = {}
    clock, position = [0.0 for _ in orders], [0 for _ in orders]
    progressed = True
    while progressed:
        progressed = False
        for rank, order in enumerate(orders):
            for computation in order[position[rank] :]:
                kind, stage, micro_batch = computation
                source, _ = _neighbours(placement, computation)
                needed = (kind is Kind.FORWARD, source, micro_batch)
                if source is not None and needed not in sent:
                    break
                begins[computation] = max(clock[rank], sent.get(needed, 0.0))
                clock[rank] = begins[computation] + DURATION[kind]
                if kind is not Kind.WEIGHT:
                    sent[kind is Kind.FORWARD, stage, micro_batch] = clock[rank]
                position[rank] += 1
                progressed = True
    return begins


def _neighbours(placement: Placement, computation: Computation) -> tuple[int | None, int | None]:
    """Returns the stages that a computation's input comes from and its result goes to; None if
    there is none.
    """
    kind, stage, _ = computation
    if kind is Kind.WEIGHT:
        return None, None
    step = 1 if kind is Kind.FORWARD else -1
    before, after = (s if 0 <= s < placement.stages else None for s in (stage - step, stage + step))
    return before, after


def _global_order(computation: Computation, begins: dict[Computation, float]) -> tuple[float, bool, int]:
    """Sort key of the computations of all ranks: by begin time, on a tie in the direction of the messages."""
    kind, stage, _ = computation
    forward = kind is Kind.FORWARD
    return begins.get(computation, math.inf), not forward, stage if forward else -stage


def _rank_actions(
    placement: Placement, rank: int, order: Order, begins: dict[Computation, float]
) -> Iterator[Action]:
    # The place of the last backward of each stage.
    last = {stage: i for i, (kind, stage, _) in enumerate(order) if kind in (Kind.BACKWARD, Kind.WEIGHT)}
    # Messages of one sender are sent and needed in the same order, so they are posted in it as well.
    posted: list[list[Action]] = [[] for _ in order]
    keys = [_global_order(computation, begins) for computation in order]
    for i, computation in enumerate(order):
        kind, _, micro_batch = computation
        source, _ = _neighbours(placement, computation)
        if source is not None and placement.rank_of[source] != rank:
            forward = kind is Kind.FORWARD
            producers = (Kind.FORWARD,) if forward else (Kind.BACKWARD, Kind.INPUT)
            sender = min(_global_order((producer, source, micro_batch), begins) for producer in producers)
            receive = Kind.RECEIVE_ACTIVATION if forward else Kind.RECEIVE_GRADIENT
            message = Action(receive, source, micro_batch, placement.rank_of[source])
            posted[bisect.bisect_right(keys, sender, 0, i)].append(message)
    for i, computation in enumerate(order):
        yield from posted[i]
        yield Action(*computation)
        kind, stage, micro_batch = computation
        _, target = _neighbours(placement, computation)
        if target is not None and placement.rank_of[target] != rank:
            send = Kind.SEND_ACTIVATION if kind is Kind.FORWARD else Kind.SEND_GRADIENT
            yield Action(send, stage, micro_batch, placement.rank_of[target])
        if last.get(stage) == i:
            yield Action(Kind.REDUCE, stage)

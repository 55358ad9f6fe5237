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
from collections.abc import Iterator, Sequence

from pentatron.layout.actions import Action, Kind, Placement, Schedule
from pentatron.layout.check import DURATION
from pentatron.layout.dualpipev import dualpipev_orders, fewest_micro_batches
from pentatron.layout.zero_bubble import Computation, v_placement, zbv_orders, zero_bubble_orders

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

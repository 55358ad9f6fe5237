"""Zero-bubble pipelines: a backward is cut in two, and its second half fills the time a rank would wait.

The gradient of a stage's input is what the stage before waits for; the gradients of its weights nobody waits for. The
idea and the names of the schedules are Qi et al.'s (Zero Bubble Pipeline Parallelism; Pipeline Parallelism with
Controllable Memory). Here each schedule is a list of wishes, and one small scheduler grants them as time passes.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pentatron.layout.actions import Kind, Placement

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

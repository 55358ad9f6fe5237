"""What lives on a pipeline rank at once: the schedule's actions, walked through with the bytes of each."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from pentatron.layout import schedules
from pentatron.layout.actions import Kind
from pentatron.layout.stages import StagePart
from pentatron.plan.activations import Activations, deferred, kept
from pentatron.plan.shape import Shape

# A step of so many micro-batches for each pipeline rank holds as much as any longer one.
_ENOUGH = 3

# For every stage of a rank, how many micro-batches are kept whole, and how many lie between the halves of their backward.
State = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Peak:
    """The moment at which a rank keeps most."""

    activations: Activations
    micro_batches: int


def peak(shape: Shape, pipeline_rank: int, parts: Mapping[int, StagePart]) -> Peak:
    whole = [kept(shape, part) for part in parts.values()]
    halved = [deferred(shape, part) if shape.config.defers_weight_gradients else 0 for part in parts.values()]

    def of(state: State) -> Activations:
        return Activations(
            sum(n * w.layers + m * h for (n, m), w, h in zip(state, whole, halved)),
            sum(n * w.logits for (n, _), w in zip(state, whole)),
        )

    most = max(_states_of(shape, pipeline_rank), key=lambda state: of(state).total)
    return Peak(of(most), sum(n + m for n, m in most))


def _states_of(shape: Shape, rank: int) -> frozenset[State]:
    if shape.grid.pipeline == 1:
        return frozenset({((1, 0),)})
    if shape.config.parallel.pipeline_schedule == "gpipe":
        return frozenset({((shape.accumulation, 0),)})
    return _states(*_shown(shape), rank)


def _shown(shape: Shape) -> tuple[str, int, int, int, int | None]:
    """A schedule that is long enough to show all that a longer one holds."""
    config, steps = shape.config, shape.accumulation
    ranks, virtual, kind = shape.grid.pipeline, config.virtual_stages, config.parallel.pipeline_schedule
    shown = min(steps, _ENOUGH * ranks + steps % ranks)
    group = config.parallel.microbatch_group_size_per_virtual_pipeline_stage
    if group is not None:
        shown = min(steps, _ENOUGH * group + steps % group)
    grouped = group is not None and schedules.takes_groups(kind, virtual)
    return kind, ranks, virtual, shown, min(group, shown) if grouped and group else None


def received_ahead(shape: Shape, pipeline_rank: int) -> int:
    """For how many messages at once a rank has room made before it computes with them."""
    return _received_ahead(*_shown(shape), pipeline_rank) if shape.grid.pipeline > 1 else 0


@functools.lru_cache(maxsize=1024)
def _received_ahead(
    kind: str, ranks: int, virtual: int, micro_batches: int, group: int | None, rank: int
) -> int:
    schedule = schedules.training_schedule(kind, ranks, virtual, micro_batches, group)
    most = 0
    receives: set[tuple[bool, int, int]] = set()
    for action in schedule.actions[rank]:
        forward = action.kind in (Kind.FORWARD, Kind.RECEIVE_ACTIVATION)
        if action.kind in (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT):
            receives.add((forward, action.stage, action.micro_batch))
        elif action.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT):
            receives.discard((forward, action.stage + (-1 if forward else 1), action.micro_batch))
        most = max(most, len(receives))
    return most


@functools.lru_cache(maxsize=1024)
def _states(
    kind: str, ranks: int, virtual: int, micro_batches: int, group: int | None, rank: int
) -> frozenset[State]:
    """Everything that a rank holds at some time. A micro-batch of a stage is there from its forward to its backward; cut in
    two, what is deferred of it to the second half."""
    schedule = schedules.training_schedule(kind, ranks, virtual, micro_batches, group)
    places = {stage: i for i, stage in enumerate(schedule.placement.stages_of(rank))}
    now = [[0, 0] for _ in places]
    changes = {Kind.FORWARD: (1, 0), Kind.BACKWARD: (-1, 0), Kind.INPUT: (-1, 1), Kind.WEIGHT: (0, -1)}
    found: set[State] = set()
    for action in schedule.actions[rank]:
        if action.kind in changes:
            at = now[places[action.stage]]
            at[0], at[1] = at[0] + changes[action.kind][0], at[1] + changes[action.kind][1]
            found.add(tuple((n, m) for n, m in now))
    return frozenset(found)

"""Compares gradients and compute orders with `torch.distributed.pipelining`."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining.stage as stage_module
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    ScheduleDualPipeV,
)

import pentatron.parallel.executor as executor_module
from pentatron.layout.actions import Kind
from pentatron.layout.check import check
from pentatron.layout.schedules import (
    SPLITS_BACKWARD,
    Computation,
    add_communication,
    placement_for,
    training_schedule,
)
from pentatron.ops.linear import DeferredGradients
from pentatron.parallel.messages import open_messages
from pentatron.parallel.world import World
from tests.harness import run_distributed
from tests.parallel.planting import plant
from tests.parallel.stage_network import CPU, Program, Record, build_stage, named, pipeline_world

MICRO_BATCHES = 8
LENGTH = 3

SINGLE: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI: dict[str, type[PipelineScheduleMulti]] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}

Gradients = dict[str, Tensor]
Result = tuple[float, Gradients]


def program_of(world: World, kind: str, virtual: int, deferred: DeferredGradients | None = None) -> Program:
    placement = placement_for(kind, world.pipeline.size, virtual)
    stages = {s: build_stage(s, deferred=deferred) for s in placement.stages_of(world.pipeline.rank)}
    return Program(stages, placement.stages - 1, (LENGTH,) * MICRO_BATCHES, 0)


def gradients_of(program: Program) -> Gradients:
    return {n: p.grad for n, p in named(program.stages).items() if p.grad is not None}


def ours(world: World, kind: str, virtual: int) -> Result:
    deferred = DeferredGradients() if kind in SPLITS_BACKWARD else None
    program = program_of(world, kind, virtual, deferred)
    schedule = training_schedule(kind, world.pipeline.size, virtual, MICRO_BATCHES)
    messages = open_messages(world, schedule.placement)
    executor = executor_module.Executor(
        messages, world.pipeline.rank, torch.float32, CPU, deferred or DeferredGradients()
    )
    return float(executor.train(schedule, program, Record())), gradients_of(program)


def _send_nothing_to_oneself() -> None:
    """Removes messages of a rank to itself, which gloo refuses.

    Older torch warms up connections with messages between the two stages of the rank where a pipeline turns.
    """
    real = stage_module._PipelineStageBase._get_init_p2p_neighbors_ops

    def to_others(self: Any) -> list[Any]:
        own = dist.get_rank(self.group)
        return [message for message in real(self) if message.group_peer != own]

    stage_module._PipelineStageBase._get_init_p2p_neighbors_ops = to_others  # type: ignore[method-assign]


class _Copied(nn.Module):
    """Copies the output of a stage.

    Torch detaches outputs in place, which fails for views, and linear layers return views here.
    """

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.stage(x)
        return made.clone()


def theirs(world: World, kind: str, virtual: int) -> Result:
    program = program_of(world, kind, virtual)
    last = program.last_stage
    # Torch splits the batch along its first dimension, which is the sequence here.
    inputs, targets = (
        torch.cat([program._numbers(stage, m) for m in range(MICRO_BATCHES)]) for stage in (0, last + 1)
    )

    def loss_of(hidden: Tensor, target: Tensor) -> Tensor:
        return (hidden - target).square().sum() / targets.numel()

    _send_nothing_to_oneself()
    group = world.pipeline.process_group
    stages = [PipelineStage(_Copied(m), s, last + 1, CPU, group=group) for s, m in program.stages.items()]
    schedule: PipelineScheduleMulti | PipelineScheduleSingle
    if kind in MULTI:
        schedule = MULTI[kind](stages, MICRO_BATCHES, loss_of, scale_grads=False)  # type: ignore[arg-type]
    else:
        schedule = SINGLE[kind](stages[0], MICRO_BATCHES, loss_of, scale_grads=False)
    losses: list[Tensor] = []
    here = (inputs,) if 0 in program.stages else ()
    schedule.step(*here, target=targets if last in program.stages else None, losses=losses)
    return sum(map(float, losses)), gradients_of(program)


def both(kind: str, virtual: int, bug: str = "") -> tuple[Result, Result]:
    if bug:
        plant(bug)
    world = pipeline_world()
    return ours(world, kind, virtual), theirs(world, kind, virtual)


@pytest.mark.parametrize(
    ("kind", "ranks", "virtual"),
    [
        ("gpipe", 2, 1),
        ("1f1b", 2, 1),
        ("interleaved", 2, 2),
        ("1f1b", 4, 1),
        ("interleaved", 4, 2),
        ("zero-bubble", 2, 2),
        ("zero-bubble", 4, 2),
        ("zbv", 2, 2),
        ("zbv", 4, 2),
        ("dualpipev", 2, 2),
        ("dualpipev", 4, 2),
    ],
)
def test_gradients_are_those_of_torchs_own_pipelining(kind: str, ranks: int, virtual: int) -> None:
    for mine, other in run_distributed(both, ranks, kind=kind, virtual=virtual):
        assert_close(mine, other)
        assert len(mine[1]) == 4 * virtual


def assert_close(mine: Result, other: Result) -> None:
    assert mine[0] == pytest.approx(other[0], rel=1e-6)
    assert mine[1].keys() == other[1].keys()
    for name, gradient in mine[1].items():
        # Sums over micro-batches have rounding errors relative to their largest terms, and some processors
        # add in another order.
        allowed = 1e-6 * float(gradient.abs().max())
        torch.testing.assert_close(gradient, other[1][name], rtol=1e-6, atol=allowed)


def test_a_dropped_micro_batch_does_not_agree() -> None:
    found = run_distributed(both, 2, kind="1f1b", virtual=1, bug="a micro-batch is dropped")
    for mine, other in found:
        with pytest.raises(AssertionError, match="Tensor-likes are not close"):
            assert_close(mine, other)


# Orders of computation.


KINDS = {
    "FORWARD": Kind.FORWARD,
    "FULL_BACKWARD": Kind.BACKWARD,
    "BACKWARD_INPUT": Kind.INPUT,
    "BACKWARD_WEIGHT": Kind.WEIGHT,
}


def _ours(action: Any) -> list[Computation]:
    """Converts an action of torch; one that overlaps two others becomes those two."""
    if action is None:
        return []
    if action.sub_actions:
        return [computation for part in action.sub_actions for computation in _ours(part)]
    return [(KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)]


def their_orders(kind: str, virtual: int, micro_batches: int) -> list[list[Computation]]:
    """Returns the order in which torch computes on every rank."""
    world = pipeline_world()
    program = program_of(world, kind, virtual)
    group, count = world.pipeline.process_group, program.last_stage + 1
    stages = [PipelineStage(m, s, count, CPU, group=group) for s, m in program.stages.items()]
    schedule = MULTI[kind](stages, micro_batches, torch.dist)  # type: ignore[arg-type]
    orders = schedule.pipeline_order
    return [[made for action in orders[rank] for made in _ours(action)] for rank in sorted(orders)]


@pytest.mark.parametrize(
    # Torch's zero-bubble schedule with virtual stages fills the pipeline with fewer micro-batches than ours.
    ("kind", "in_flight"),
    [("zero-bubble", (11, 8)), ("zbv", (8, 8)), ("dualpipev", (9, 9))],
)
def test_orders_are_those_of_torchs_own_pipelining(kind: str, in_flight: tuple[int, int]) -> None:
    """Four ranks with two stages each take the time of torch's schedule, with the same order of forwards.

    `in_flight`: the most micro-batches in flight, here and in torch.
    """
    mine = training_schedule(kind, 4, 2, MICRO_BATCHES)
    found = run_distributed(their_orders, 4, kind=kind, virtual=2, micro_batches=MICRO_BATCHES)[0]
    other = add_communication(mine.placement, MICRO_BATCHES, found)
    assert check(mine).time == check(other).time
    assert (max(check(mine).in_flight), max(check(other).in_flight)) == in_flight
    for rank, theirs in enumerate(found):
        own = [(a.kind, a.stage, a.micro_batch) for a in mine.actions[rank] if a.kind in KINDS.values()]
        if kind == "dualpipev":
            assert own == theirs
        assert [c for c in own if c[0] is Kind.FORWARD] == [c for c in theirs if c[0] is Kind.FORWARD]

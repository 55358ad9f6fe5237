"""`torch.distributed.pipelining` as a second opinion: the same network, the same gradients."""

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

import pentatron.parallel.executor as executor_module
from pentatron.layout.schedules import training_schedule
from pentatron.parallel.messages import open_messages
from pentatron.parallel.world import World
from tests.harness import run_distributed
from tests.parallel.planting import plant
from tests.parallel.stage_network import CPU, Program, Record, build_stage, named, pipeline_world

MICRO_BATCHES = 8
LENGTH = 3

Gradients = dict[str, Tensor]
Result = tuple[float, Gradients]


def program_of(world: World, virtual: int) -> Program:
    rank, ranks = world.pipeline.rank, world.pipeline.size
    stages = {s: build_stage(s) for s in range(rank, ranks * virtual, ranks)}
    return Program(stages, ranks * virtual - 1, (LENGTH,) * MICRO_BATCHES, 0)


def gradients_of(program: Program) -> Gradients:
    return {n: p.grad for n, p in named(program.stages).items() if p.grad is not None}


def ours(world: World, kind: str, virtual: int) -> Result:
    program = program_of(world, virtual)
    executor = executor_module.Executor(open_messages(world), world.pipeline.rank, torch.float32, CPU)
    schedule = training_schedule(kind, world.pipeline.size, virtual, MICRO_BATCHES)
    return float(executor.train(schedule, program, Record())), gradients_of(program)


def theirs(world: World, kind: str, virtual: int) -> Result:
    program = program_of(world, virtual)
    last = program.last_stage
    # It cuts the batch along its first dimension, which here is the sequence.
    inputs, targets = (
        torch.cat([program._numbers(stage, m) for m in range(MICRO_BATCHES)]) for stage in (0, last + 1)
    )

    def loss_of(hidden: Tensor, target: Tensor) -> Tensor:
        return (hidden - target).square().sum() / targets.numel()

    group = world.pipeline.process_group
    stages = [PipelineStage(m, s, last + 1, CPU, group=group) for s, m in program.stages.items()]
    schedule: PipelineScheduleMulti | PipelineScheduleSingle
    if virtual > 1:
        schedule = ScheduleInterleaved1F1B(stages, MICRO_BATCHES, loss_of, scale_grads=False)  # type: ignore[arg-type]
    else:
        single = ScheduleGPipe if kind == "gpipe" else Schedule1F1B
        schedule = single(stages[0], MICRO_BATCHES, loss_of, scale_grads=False)
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
    [("gpipe", 2, 1), ("1f1b", 2, 1), ("interleaved", 2, 2), ("1f1b", 4, 1), ("interleaved", 4, 2)],
)
def test_gradients_are_those_of_torchs_own_pipelining(kind: str, ranks: int, virtual: int) -> None:
    for mine, other in run_distributed(both, ranks, kind=kind, virtual=virtual):
        assert_close(mine, other)
        assert len(mine[1]) == 4 * virtual


def assert_close(mine: Result, other: Result) -> None:
    assert mine[0] == pytest.approx(other[0], rel=1e-6)
    assert mine[1].keys() == other[1].keys()
    for name, gradient in mine[1].items():
        torch.testing.assert_close(gradient, other[1][name], rtol=1e-6, atol=1e-8)


def test_a_dropped_micro_batch_does_not_agree() -> None:
    found = run_distributed(both, 2, kind="1f1b", virtual=1, bug="a micro-batch is dropped")
    for mine, other in found:
        with pytest.raises(AssertionError, match="Tensor-likes are not close"):
            assert_close(mine, other)

"""A rank that fails or gets other micro-batches than its peers ends all ranks with a message."""

import time

import pytest
import torch
from torch import Tensor, nn

import pentatron.parallel.executor as executor_module
from pentatron.layout.schedules import training_schedule
from pentatron.parallel.messages import Messages, open_messages
from pentatron.parallel.world import ALONE
from tests.harness import distributed, run_distributed
from tests.harness.report import RanksFailed
from tests.parallel.planting import plant
from tests.parallel.stage_network import CPU, Program, Record, build_stage, pipeline_world


class Fails(Program):
    def forward(self, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        if stage == 1 and micro_batch == 2:
            raise ValueError("the stage broke")
        return super().forward(stage, micro_batch, received)


class Unused(Program):
    """A program whose stages do not use what they receive."""

    def forward(self, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        return super().forward(
            stage, micro_batch, received if received is None else torch.ones_like(received)
        )


def train(
    program_type: type[Program], lengths: tuple[int, ...], stages: dict[int, nn.Module] | None = None
) -> Program:
    world = pipeline_world()
    rank = world.pipeline.rank
    schedule = training_schedule("1f1b", world.pipeline.size, 1, 4)
    program = program_type(stages or {rank: build_stage(rank)}, world.pipeline.size - 1, lengths, 0)
    executor = executor_module.Executor(open_messages(world, schedule.placement), rank, torch.float32, CPU)
    executor.train(schedule, program, Record())
    return program


def with_own_lengths(lengths: tuple[tuple[int, ...], ...], bug: str = "") -> None:
    if bug:
        plant(bug)
    train(Program, lengths[pipeline_world().pipeline.rank])


def with_a_failing_stage() -> None:
    train(Fails, (3, 3, 3, 3))


def test_an_error_in_a_stage_ends_all_ranks() -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailed, match="the stage broke"):
        run_distributed(with_a_failing_stage, 4)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ((3, 3, 3, 2), "of 144 elements.* expects 4 activations of 132 elements"),
        ((3, 4, 3, 2), "in other shapes"),
    ],
)
def test_ranks_with_other_shapes_are_an_error(other: tuple[int, ...], reason: str) -> None:
    with pytest.raises(RanksFailed, match=f"{reason}.*must see the same micro-batches"):
        run_distributed(with_own_lengths, 2, lengths=((3, 3, 3, 3), other))


def test_without_the_agreement_gloo_ends_the_process() -> None:
    """Control: without the check of sizes gloo aborts the process, with no exception and no message."""
    with pytest.raises(RanksFailed, match="SIGABRT"):
        run_distributed(with_own_lengths, 2, lengths=((3, 3, 3, 2), (3, 3, 3, 3)), bug="no agreement")


def test_an_activation_of_another_shape_or_dtype_is_refused() -> None:
    schedule = training_schedule("interleaved", 1, 2, 2)
    for changed, reason in ((nn.Linear(5, 9), r"shape \(3, 2, 9\)"), (nn.Linear(5, 6).double(), "float64")):
        program = Program({0: nn.Sequential(changed), 1: build_stage(1)}, 1, (3, 3), 0)
        if changed.weight.dtype is torch.float64:
            program.dtype = torch.float64
        executor = executor_module.Executor(Messages(ALONE), 0, torch.float32, CPU)
        with pytest.raises(RuntimeError, match=reason):
            executor.train(schedule, program, Record())


@distributed(world=2)
def test_an_unused_input_gets_a_gradient_of_zeros() -> None:
    program = train(Unused, (3, 2, 4, 1))
    gradients = [p.grad for stage in program.stages.values() for p in stage.parameters()]
    if 0 in program.stages:
        assert all(g is not None and not g.any() for g in gradients)
    else:
        assert any(g is not None and g.any() for g in gradients)


@distributed(world=2)
def test_a_stage_without_trained_parameters_only_passes_on() -> None:
    """The first stage then has no graph; the second trains as usual."""
    rank = pipeline_world().pipeline.rank
    stage = build_stage(rank).requires_grad_(rank > 0)
    program = train(Program, (3, 2, 4, 1), {rank: stage})
    assert all((p.grad is not None) == (rank > 0) for s in program.stages.values() for p in s.parameters())


class Through(Program):
    """A program whose middle stages return what they receive."""

    def forward(self, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        if received is None:
            return self.stages[0](torch.ones(self.message_shape(0, micro_batch)))  # type: ignore[no-any-return]
        return received if stage < self.last_stage else received.sum()

    def message_shape(self, stage: int, micro_batch: int) -> tuple[int, ...]:
        return (self.lengths[micro_batch], 2, 5)


@distributed(world=3)
def test_a_stage_may_return_what_it_received() -> None:
    rank = pipeline_world().pipeline.rank
    program = train(Through, (3, 2, 4, 1), {rank: nn.Linear(5, 5)})
    for stage, module in program.stages.items():
        bias = module.bias
        assert isinstance(bias, nn.Parameter)
        if stage == 0:
            assert bias.grad is not None
            assert torch.equal(bias.grad, torch.full_like(bias, 2.0 * (3 + 2 + 4 + 1)))
        else:
            assert bias.grad is None

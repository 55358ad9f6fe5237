"""A small network in stages, run by the executor or in one process, for pipeline tests and benches."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pentatron.parallel.executor as executor_module
from pentatron.layout.actions import Kind, Schedule
from pentatron.layout.ranks import Grid
from pentatron.ops.linear import DeferredGradients, linear
from pentatron.parallel.messages import open_messages
from pentatron.parallel.world import World, create_groups

CPU = torch.device("cpu")
WIDTH = 5
# Sequence lengths of the micro-batches of three steps, with different numbers and lengths.
LENGTHS = ((3, 6, 2, 4, 5), (7, 1), (2, 4, 4, 3, 6, 1, 5))


def pipeline_world(device: torch.device = CPU) -> World:
    rank, size = dist.get_rank(), dist.get_world_size()
    return create_groups(Grid(pipeline=size), rank, rank, device)


def width(stage: int) -> int:
    """Returns the width of the activation that a stage receives; neighbouring stages differ."""
    return WIDTH + stage % 3


class Linear(nn.Linear):
    """A linear layer that can defer its weight gradient."""

    def __init__(self, inputs: int, outputs: int, deferred: DeferredGradients | None) -> None:
        super().__init__(inputs, outputs)
        self.deferred = deferred

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias, self.deferred)


def build_stage(
    stage: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    deferred: DeferredGradients | None = None,
) -> nn.Module:
    generator = torch.Generator().manual_seed(100 + stage)
    module = nn.Sequential(
        Linear(width(stage), 8, deferred), nn.Tanh(), Linear(8, width(stage + 1), deferred)
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return module.to(device, dtype)


@dataclass
class Program:
    """The program of one step, which records its forwards.

    `lengths`: sequence lengths of the micro-batches.
    """

    stages: dict[int, nn.Module]
    last_stage: int
    lengths: Sequence[int]
    seed: int
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    forwards: list[tuple[int, int]] = field(default_factory=list)
    with_graph: list[bool] = field(default_factory=list)

    def forward(self, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        self.forwards.append((stage, micro_batch))
        self.with_graph.append(torch.is_grad_enabled())
        assert (received is None) == (stage == 0)
        hidden = self.stages[stage](self._numbers(0, micro_batch) if received is None else received)
        if stage < self.last_stage:
            return hidden
        count = 2 * sum(self.lengths) * width(self.last_stage + 1)
        return (hidden - self._numbers(self.last_stage + 1, micro_batch)).float().square().sum() / count

    def message_shape(self, stage: int, micro_batch: int) -> tuple[int, ...]:
        return (self.lengths[micro_batch], 2, width(stage))

    def _numbers(self, stage: int, micro_batch: int) -> Tensor:
        """Draws the inputs (stage 0) or the targets."""
        generator = torch.Generator().manual_seed(1000 * self.seed + 10 * micro_batch + (stage > 0))
        return torch.randn(self.message_shape(stage, micro_batch), generator=generator).to(
            self.device, self.dtype
        )


class Record:
    """A gradient sink that records its calls; gradients stay in the parameters."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, bool]] = []

    def begin_backward(self, stage: int, last: bool, kind: Kind) -> None:
        if kind is not Kind.INPUT:
            self.calls.append(("begin", stage, last))

    def end_backward(self, stage: int, last: bool, kind: Kind) -> None:
        if kind is not Kind.INPUT:
            self.calls.append(("end", stage, last))

    def reduce(self, stage: int) -> None:
        self.calls.append(("reduce", stage, True))


@dataclass
class Found:
    """Results of a rank or of one process: loss and gradients of every step, and the final weights."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    evaluation: float = 0.0
    forwards: list[list[tuple[int, int]]] = field(default_factory=list)
    calls: list[list[tuple[str, int, bool]]] = field(default_factory=list)


def named(stages: dict[int, nn.Module]) -> dict[str, nn.Parameter]:
    return {f"{s}.{n}": p for s, module in stages.items() for n, p in module.named_parameters()}


def one_process(
    last_stage: int,
    lengths: Sequence[Sequence[int]] = LENGTHS,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> Found:
    """Runs the same training in one process, without messages and executor."""
    found = Found()
    stages = {s: build_stage(s, dtype, device) for s in range(last_stage + 1)}
    optimizer = torch.optim.AdamW(named(stages).values(), lr=0.01)
    for step, now in enumerate(lengths):
        program = Program(stages, last_stage, now, step, dtype, device)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for micro_batch in range(len(now)):
            loss = _all_stages(program, micro_batch)
            loss.backward()
            total += loss.detach()
        update(found, total, stages, optimizer)
    with torch.no_grad():
        program = Program(stages, last_stage, lengths[0], 77, dtype, device)
        found.evaluation = sum(float(_all_stages(program, m)) for m in range(len(lengths[0])))
    return found


def _all_stages(program: Program, micro_batch: int) -> Tensor:
    hidden = None
    for stage in program.stages:
        hidden = program.forward(stage, micro_batch, hidden)
    assert hidden is not None
    return hidden


def update(
    found: Found, total: Tensor, stages: dict[int, nn.Module], optimizer: torch.optim.Optimizer
) -> None:
    found.losses.append(float(total))
    parameters = named(stages)
    found.gradients.append({n: p.grad.cpu().clone() for n, p in parameters.items() if p.grad is not None})
    optimizer.step()
    optimizer.zero_grad()
    found.weights = {n: p.detach().cpu().clone() for n, p in parameters.items()}


def halves(schedule: Schedule) -> bool:
    """Whether the schedule splits backwards into two halves."""
    return any(action.kind is Kind.WEIGHT for actions in schedule.actions for action in actions)


def in_pipeline(
    world: World,
    training: Sequence[Schedule],
    evaluation: Schedule,
    lengths: Sequence[Sequence[int]] = LENGTHS,
    dtype: torch.dtype = torch.float32,
    messages: Any = None,
) -> Found:
    """Runs some training steps and an evaluation on this pipeline rank."""
    found = Found()
    placement = evaluation.placement
    last_stage = placement.stages - 1
    deferred = DeferredGradients() if halves(training[0]) else None
    stages = {
        s: build_stage(s, dtype, world.device, deferred) for s in placement.stages_of(world.pipeline.rank)
    }
    optimizer = torch.optim.AdamW(named(stages).values(), lr=0.01)
    # Accessed through its module, so that a bug planted there takes effect.
    messages = messages or open_messages(world, placement)
    executor = executor_module.Executor(
        messages, world.pipeline.rank, dtype, world.device, deferred or DeferredGradients()
    )
    for step, now in enumerate(lengths):
        program, record = Program(stages, last_stage, now, step, dtype, world.device), Record()
        total = executor.train(training[step], program, record)
        assert not executor.messages.under_way and not total.requires_grad
        found.forwards.append(program.forwards)
        found.calls.append(record.calls)
        update(found, total, stages, optimizer)
    program = Program(stages, last_stage, lengths[0], 77, dtype, world.device)
    found.evaluation = float(executor.evaluate(evaluation, program))
    assert not any(program.with_graph)
    return found

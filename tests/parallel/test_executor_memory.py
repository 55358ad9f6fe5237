"""Measures live graphs, sent outputs and pending messages of a step against the checker's bounds."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import pentatron.parallel.executor as executor_module
from pentatron.layout.actions import Kind
from pentatron.layout.check import check
from pentatron.layout.schedules import training_schedule
from pentatron.ops.linear import DeferredGradients
from pentatron.parallel.messages import Messages, open_messages
from tests.harness import run_distributed
from tests.harness.report import RanksFailed
from tests.parallel.planting import plant
from tests.parallel.stage_network import CPU, Program, Record, build_stage, pipeline_world, width

MICRO_BATCHES = 7


class Mark:
    """Lives as long as the autograd graph that holds it."""


class Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, mark: Mark) -> Tensor:
        ctx.mark = mark
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class WatchedProgram(Program):
    """Counts live graphs, and tracks outputs."""

    def watch(self, messages: Messages, deferred: DeferredGradients) -> None:
        self.messages = messages
        self.deferred = deferred
        self.graphs: weakref.WeakSet[Mark] = weakref.WeakSet()
        self.outputs: dict[tuple[int, int], StorageWeakRef] = {}
        self.kept: list[Tensor] = []
        self.most_graphs = self.most_under_way = 0

    def forward(self, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        output = super().forward(stage, micro_batch, received)
        self.outputs[stage, micro_batch] = StorageWeakRef(output.untyped_storage())
        mark = Mark()
        self.graphs.add(mark)
        self.most_graphs = max(self.most_graphs, len(self.graphs) + len(self.deferred.cells))
        self.most_under_way = max(self.most_under_way, len(self.messages.under_way))
        return Marked.apply(output, mark)  # type: ignore[no-any-return,no-untyped-call]


class WatchedSink(Record):
    """Counts outputs whose memory is still allocated when their backward begins."""

    def __init__(self, program: WatchedProgram) -> None:
        super().__init__()
        self.program = program
        self.kept_outputs = 0
        self.most_deferred = self.most_elements = 0
        self.backwards: dict[int, int] = {}

    def begin_backward(self, stage: int, last: bool, kind: Kind) -> None:
        self.most_deferred = max(self.most_deferred, len(self.program.deferred.cells))
        self.most_elements = max(self.most_elements, self.program.deferred.elements)
        if kind is Kind.WEIGHT:
            return
        micro_batch = self.backwards.get(stage, 0)
        self.backwards[stage] = micro_batch + 1
        # An output that stays on the rank is the input of the next stage, which is kept.
        if stage < self.program.last_stage and stage + 1 not in self.program.stages:
            self.kept_outputs += not self.program.outputs[stage, micro_batch].expired()


def measured(kind: str, virtual: int, bug: str = "") -> dict[str, int]:
    if bug:
        plant(bug)
    world = pipeline_world()
    rank, ranks = world.pipeline.rank, world.pipeline.size
    schedule = training_schedule(kind, ranks, virtual, MICRO_BATCHES)
    deferred = DeferredGradients()
    stages = {s: build_stage(s, deferred=deferred) for s in schedule.placement.stages_of(rank)}
    messages = open_messages(world, schedule.placement)
    program = WatchedProgram(stages, schedule.placement.stages - 1, (3,) * MICRO_BATCHES, 0)
    program.watch(messages, deferred)
    sink = WatchedSink(program)
    executor = executor_module.Executor(messages, rank, torch.float32, CPU, deferred)
    executor.train(schedule, program, sink)
    return {
        "graphs": program.most_graphs,
        "left": len(program.graphs) + len(deferred.cells),
        "deferred": sink.most_deferred,
        "elements": sink.most_elements,
        "outputs": sink.kept_outputs,
        "under way": program.most_under_way,
    }


@pytest.mark.parametrize(
    ("kind", "ranks", "virtual"),
    [
        ("gpipe", 2, 1),
        ("1f1b", 2, 1),
        ("1f1b", 4, 1),
        ("interleaved", 2, 2),
        ("interleaved", 4, 2),
        ("zero-bubble", 2, 1),
        ("zero-bubble", 4, 1),
        ("zero-bubble", 2, 2),
        ("zbv", 2, 2),
        ("zbv", 4, 2),
        ("dualpipev", 2, 2),
    ],
)
def test_as_many_micro_batches_live_as_the_checker_promises(kind: str, ranks: int, virtual: int) -> None:
    found = run_distributed(measured, ranks, kind=kind, virtual=virtual)
    checked = check(training_schedule(kind, ranks, virtual, MICRO_BATCHES))
    promised = checked.in_flight
    assert tuple(rank["graphs"] for rank in found) == promised
    assert tuple(rank["deferred"] for rank in found) == checked.deferred
    if kind in ("gpipe", "1f1b"):
        by_formula = [
            MICRO_BATCHES if kind == "gpipe" else min(MICRO_BATCHES, ranks - r) for r in range(ranks)
        ]
        assert list(promised) == by_formula
    assert all(rank["left"] == 0 for rank in found)
    assert all(rank["outputs"] == 0 for rank in found), "a sent output was kept until its backward"


def test_a_deferred_weight_gradient_keeps_its_input_and_its_outputs_gradient_and_nothing_else() -> None:
    """Stages have two linear layers, 5 → 8 → 6 or 6 → 8 → 7 wide, and 3 × 2 positions per micro-batch."""
    for rank, found in enumerate(run_distributed(measured, 2, kind="zero-bubble", virtual=1)):
        inside, into, out_of = 8, width(rank), width(rank + 1)
        of_one = 3 * 2 * ((into + inside) + (inside + out_of))
        assert found["elements"] == found["deferred"] * of_one


def test_halves_that_are_never_joined_are_noticed() -> None:
    with pytest.raises(RanksFailed, match="left over at the end of a step"):
        run_distributed(measured, 2, kind="zero-bubble", virtual=1, bug="weight gradients are forgotten")


def test_an_output_that_is_kept_is_noticed() -> None:
    found = run_distributed(measured, 2, kind="1f1b", virtual=1, bug="the output is kept")
    assert found[0]["outputs"] == MICRO_BATCHES


def test_sent_tensors_are_freed_during_the_step() -> None:
    right = run_distributed(measured, 2, kind="1f1b", virtual=1)
    assert max(rank["under way"] for rank in right) <= 2
    kept = run_distributed(measured, 2, kind="1f1b", virtual=1, bug="sends are kept to the end")
    assert min(rank["under way"] for rank in kept) >= MICRO_BATCHES - 1


def test_leftover_activations_are_an_error() -> None:
    with pytest.raises(RanksFailed, match="left over at the end of a step"):
        run_distributed(measured, 2, kind="1f1b", virtual=1, bug="nothing is released")

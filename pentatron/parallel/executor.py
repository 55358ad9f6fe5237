"""Runs one step of a pipeline schedule on this rank: forwards, backwards and what lies between them.

The executor knows nothing of models, batches or optimizers. It walks the rank's list of actions; a model in one piece
is the list of one stage. What a stage made for the next one waits in a table until it is sent or, when the next stage
sits on the same rank, taken from there; gradients go the other way alike. A micro-batch lives from its forward to its
backward on a stage; where that is cut in two, what its weight gradients need lives on to the second half. When a step
ends nothing of it may be left.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pentatron.layout.actions import Action, Kind, Schedule
from pentatron.ops.linear import Cell, DeferredGradients
from pentatron.parallel.messages import Announced, Arrival, Messages, Parcel, announced, deliveries
from pentatron.parallel.shards import Shape
from pentatron.parallel.timers import Timers

# The timers' names; receiving is timed where it is waited for as well.
_TIMED = {
    Kind.FORWARD: "forward-compute",
    **dict.fromkeys((Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT), "backward-compute"),
    Kind.SEND_ACTIVATION: "forward-send",
    Kind.RECEIVE_ACTIVATION: "forward-recv",
    Kind.SEND_GRADIENT: "backward-send",
    Kind.RECEIVE_GRADIENT: "backward-recv",
    Kind.REDUCE: "all-grads-sync",
}


class StageProgram(Protocol):
    """The computation of a step."""

    def forward(self, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        """The activation for the next stage or, on the last one, the micro-batch's share of the loss (a scalar).

        `received` is what the stage before made; None on the first stage.
        """
        ...

    def message_shape(self, stage: int, micro_batch: int) -> Shape:
        """The shape of the activation a stage receives; also asked for the stage after one of this rank's."""
        ...


class GradientSink(Protocol):
    """Who takes the gradients of the parameters. `last`: no other backward of the stage follows in this step.

    `kind` is BACKWARD, INPUT or WEIGHT: INPUT brings the gradients of some parameters, the WEIGHT that follows it later
    those of the others. Between the two of one micro-batch there may be those of others.
    """

    def begin_backward(self, stage: int, last: bool, kind: Kind) -> None: ...
    def end_backward(self, stage: int, last: bool, kind: Kind) -> None: ...
    def reduce(self, stage: int) -> None: ...


class Executor:
    """Runs schedules on one pipeline rank. `dtype` and `device` are those of the activations between stages.

    `deferred` is where the layers of this rank's stages leave weight gradients for later.
    """

    def __init__(
        self,
        messages: Messages,
        pipeline_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        deferred: DeferredGradients | None = None,
        timers: Timers | None = None,
    ) -> None:
        self.messages = messages
        self.rank = pipeline_rank
        self.dtype = dtype
        self.device = device
        self.deferred = deferred or DeferredGradients()
        self.timers = timers or Timers()

    def train(
        self, schedule: Schedule, program: StageProgram, gradients: GradientSink, scale: float = 1.0
    ) -> Tensor:
        """Forward and backward of every micro-batch; the sum of the losses (fp64), 0 on a rank without the last stage.

        Gradients are those of `scale` times the losses.
        """
        return _Step(self, schedule, program, gradients, scale).run()

    @torch.no_grad()
    def evaluate(self, schedule: Schedule, program: StageProgram) -> Tensor:
        """A schedule of forwards only; the sum of what the last stage returned (fp64), 0 on a rank without it."""
        return _Step(self, schedule, program, None).run()


@dataclass(frozen=True)
class _Passed:
    """What a backward needs of the forward: the input, whose gradient it makes, and where in the graph it starts.

    The output itself is not kept. Once it has been sent or used its memory is free, unless the graph needs it.
    """

    received: Tensor | None
    start: GradientEdge | None


class _Step:
    """One walk over this rank's actions. A cell (s, m) of `activations` holds what stage s made of micro-batch m, one
    of `gradients` the gradient of what stage s received; messages on their way are there as arrivals."""

    def __init__(
        self,
        executor: Executor,
        schedule: Schedule,
        program: StageProgram,
        gradients: GradientSink | None,
        scale: float = 1.0,
    ) -> None:
        self.executor = executor
        # What the backward of a loss begins with.
        self.seed = None if scale == 1 else torch.full((), scale, device=executor.device)
        self.messages = executor.messages
        self.deferred = executor.deferred
        self.program = program
        self.sink = gradients
        self.actions = schedule.actions[executor.rank]
        self.last_stage = schedule.placement.stages - 1
        self.backwards_left = _count_backwards(self.actions)
        self.proven = deliveries(schedule, executor.rank)
        self.activations: dict[Cell, Tensor | Arrival] = {}
        self.gradients: dict[Cell, Tensor | Arrival] = {}
        self.passed: dict[Cell, _Passed] = {}
        self.total = torch.zeros((), dtype=torch.float64, device=executor.device)

    def run(self) -> Tensor:
        perform: dict[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT: self._backward,
            Kind.WEIGHT: self._weights,
            Kind.SEND_ACTIVATION: self._send,
            Kind.RECEIVE_ACTIVATION: self._receive,
            Kind.SEND_GRADIENT: self._send,
            Kind.RECEIVE_GRADIENT: self._receive,
            Kind.REDUCE: self._reduce,
        }
        self.messages.agree(self._announced(Kind.SEND_ACTIVATION), self._announced(Kind.RECEIVE_ACTIVATION))
        for action in self.actions:
            with self.executor.timers(_TIMED[action.kind], 2):
                perform[action.kind](action)
        self.messages.finish()
        left = [*self.activations, *self.gradients, *self.passed, *self.deferred.cells]
        assert not left, f"left over at the end of a step (stage, micro-batch): {left}"
        return self.total

    def _forward(self, action: Action) -> None:
        stage, micro_batch = cell = (action.stage, action.micro_batch)
        training = self.sink is not None
        received = self._take(self.activations, False, (stage - 1, micro_batch)) if stage > 0 else None
        if received is not None:
            received.requires_grad_(training)
        output = self.program.forward(stage, micro_batch, received)
        if stage == self.last_stage:
            self.total += output.detach()
        else:
            self._require_shape(output, cell)
            self.activations[cell] = output.detach()
        if training:
            # An output without a graph: nothing up to this stage is trained.
            start = get_gradient_edge(output) if output.requires_grad else None
            self.passed[cell] = _Passed(received, start)

    def _backward(self, action: Action) -> None:
        """A whole backward, or its input half: everything but the weight gradients that layers leave for later."""
        assert self.sink is not None, "a schedule for evaluation has no backward"
        stage, micro_batch = cell = (action.stage, action.micro_batch)
        gradient = self.seed
        if stage < self.last_stage:
            gradient = self._take(self.gradients, True, (stage + 1, micro_batch))
        passed = self.passed.pop(cell)
        whole = action.kind is Kind.BACKWARD
        last = whole and self._is_last(stage)
        self.sink.begin_backward(stage, last, action.kind)
        with nullcontext() if whole else self.deferred.collecting(cell):
            if passed.start is not None:
                torch.autograd.backward(passed.start, gradient)
        self.sink.end_backward(stage, last, action.kind)
        if passed.received is not None:
            made = passed.received.grad
            # A stage that does not use its input still owes its gradient.
            self.gradients[cell] = torch.zeros_like(passed.received) if made is None else made

    def _weights(self, action: Action) -> None:
        assert self.sink is not None, "a schedule for evaluation has no backward"
        last = self._is_last(action.stage)
        self.sink.begin_backward(action.stage, last, action.kind)
        self.deferred.compute((action.stage, action.micro_batch))
        self.sink.end_backward(action.stage, last, action.kind)

    def _is_last(self, stage: int) -> bool:
        """To be asked once for each backward: whether no other of the stage follows."""
        self.backwards_left[stage] -= 1
        return self.backwards_left[stage] == 0

    def _send(self, action: Action) -> None:
        table = self.activations if action.kind is Kind.SEND_ACTIVATION else self.gradients
        value = table.pop((action.stage, action.micro_batch))
        assert isinstance(value, Tensor) and action.peer is not None, f"{action}: nothing to send"
        self.messages.post_send(value.detach(), action.peer, action)

    def _receive(self, action: Action) -> None:
        assert action.peer is not None, f"{action}: from nobody"
        # An activation goes into the stage after the one that sends it; a gradient is that of the sender's own input.
        activation = action.kind is Kind.RECEIVE_ACTIVATION
        table, receiver = (
            (self.activations, action.stage + 1) if activation else (self.gradients, action.stage)
        )
        shape = self.program.message_shape(receiver, action.micro_batch)
        table[action.stage, action.micro_batch] = self.messages.post_receive(
            shape, self.executor.dtype, self.executor.device, action.peer, action
        )

    def _reduce(self, action: Action) -> None:
        assert self.sink is not None, "a schedule for evaluation reduces nothing"
        self.sink.reduce(action.stage)

    def _take(self, table: dict[Cell, Tensor | Arrival], gradient: bool, cell: Cell) -> Tensor:
        value = table.pop(cell)
        if isinstance(value, Tensor):
            return value
        with self.executor.timers("backward-recv" if gradient else "forward-recv", 2):
            tensor = value.wait()
        parcel: Parcel = (gradient, *cell)
        for arrived in self.proven.get(parcel, ()):
            self.messages.delivered(arrived)
        return tensor

    def _require_shape(self, output: Tensor, cell: Cell) -> None:
        """What leaves a stage must be what the next one was promised."""
        stage, micro_batch = cell
        expected, dtype = self.program.message_shape(stage + 1, micro_batch), self.executor.dtype
        if tuple(output.shape) != tuple(expected) or output.dtype != dtype:
            raise RuntimeError(
                f"stage {stage} made a {output.dtype} tensor of shape {tuple(output.shape)} of micro-batch "
                f"{micro_batch}, but stage {stage + 1} expects {dtype} of shape {tuple(expected)}"
            )

    def _announced(self, kind: Kind) -> dict[int, Announced]:
        """The activations that travel between this rank and each peer in this step."""
        cells: dict[int, list[Cell]] = {}
        for action in self.actions:
            if action.kind is kind and action.peer is not None:
                cells.setdefault(action.peer, []).append((action.stage + 1, action.micro_batch))
        return {
            peer: announced(
                [self.program.message_shape(*cell) for cell in sorted(found)], self.executor.dtype
            )
            for peer, found in cells.items()
        }


def _count_backwards(actions: tuple[Action, ...]) -> dict[int, int]:
    """Of every stage; one in two halves ends with the second."""
    found: dict[int, int] = {}
    for action in actions:
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            found[action.stage] = found.get(action.stage, 0) + 1
    return found

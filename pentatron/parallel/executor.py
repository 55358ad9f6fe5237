"""Executor of pipeline schedules: runs the actions of one step on this rank.

The executor does not depend on models, batches or optimizers. Without pipeline parallelism the schedule has
one stage. The output of a stage waits in a table until it is sent or, if the next stage is on the same rank,
until that stage takes it; gradients likewise in the other direction. Activations saved for a micro-batch live
from its forward to its backward on a stage; if the backward is split, the inputs of the weight gradients live
until the weight half. At the end of a step the tables must be empty.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pentatron.layout.actions import Action, Cell, Kind, Schedule
from pentatron.ops.linear import DeferredGradients
from pentatron.parallel.collectives import Pending
from pentatron.parallel.messages import MessageKey, Messages, SendSummary, acknowledged_sends, summarize_sends
from pentatron.parallel.sharding import Shape
from pentatron.parallel.timers import Timers


class StageProgram(Protocol):
    """The model computation of a step, stage by stage."""

    def forward(self, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        """Returns the activation for the next stage or, on the last one, the micro-batch's share of the loss
        (a scalar).

        `received` is the output of the previous stage; None on the first stage.
        """
        ...

    def message_shape(self, stage: int, micro_batch: int) -> Shape:
        """Returns the shape of a stage's input; also called for the stage after one of this rank's."""
        ...


class GradientSink(Protocol):
    """Receiver of parameter gradients. `last`: this is the last backward of the stage in this step.

    `kind` is BACKWARD, INPUT or WEIGHT: INPUT produces the gradients of some parameters, the later WEIGHT
    those of the others. Other micro-batches may run between the two halves of one.
    """

    def begin_backward(self, stage: int, last: bool, kind: Kind) -> None: ...
    def end_backward(self, stage: int, last: bool, kind: Kind) -> None: ...
    def reduce(self, stage: int) -> None: ...


@dataclass(eq=False)
class Executor:
    """Runs schedules on one pipeline rank. `dtype` and `device` are those of the activations between stages.

    `deferred` collects the weight gradients that the layers of this rank's stages postpone.
    """

    messages: Messages
    rank: int
    dtype: torch.dtype
    device: torch.device
    deferred: DeferredGradients = field(default_factory=DeferredGradients)
    timers: Timers = field(default_factory=Timers)

    def train(
        self, schedule: Schedule, program: StageProgram, gradients: GradientSink, scale: float = 1.0
    ) -> Tensor:
        """Runs forward and backward of every micro-batch, with the loss multiplied by `scale` for the
        gradients.

        Returns the sum of the losses (fp64), without `scale`; 0 on a rank without the last stage.
        """
        return _ScheduleRun(self, schedule, program, gradients, scale).run()

    @torch.no_grad()
    def evaluate(self, schedule: Schedule, program: StageProgram) -> Tensor:
        """Runs a forward-only schedule; returns the sum of the last stage's outputs (fp64) or 0."""
        return _ScheduleRun(self, schedule, program, None).run()


@dataclass(frozen=True)
class _SavedForward:
    """State kept from the forward for the backward: the stage's input, and the graph edge where the backward
    starts.

    The output itself is not kept: its memory is free once it has been sent or used, unless autograd saved it.
    """

    received: Tensor | None
    start: GradientEdge | None


@dataclass(eq=False)
class _ScheduleRun:
    """One run through this rank's actions.

    `activations[s, m]` is the output of stage s for micro-batch m, `gradients[s, m]` the gradient of the
    input of stage s. Both hold a `Pending` for tensors that are still being received.
    """

    executor: Executor
    schedule: Schedule
    program: StageProgram
    sink: GradientSink | None
    scale: float = 1.0

    def __post_init__(self) -> None:
        executor, schedule = self.executor, self.schedule
        # The initial gradient of the loss.
        self.seed = None if self.scale == 1 else torch.full((), self.scale, device=executor.device)
        self.messages, self.deferred = executor.messages, executor.deferred
        self.actions, self.last_stage = schedule.actions[executor.rank], schedule.placement.stages - 1
        # A backward in two halves ends with the weight half.
        ends = (Kind.BACKWARD, Kind.WEIGHT)
        self.backwards_left = Counter(action.stage for action in self.actions if action.kind in ends)
        self.acknowledged = acknowledged_sends(schedule, executor.rank)
        self.activations: dict[Cell, Tensor | Pending] = {}
        self.gradients: dict[Cell, Tensor | Pending] = {}
        self.saved: dict[Cell, _SavedForward] = {}
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=executor.device)

    def run(self) -> Tensor:
        self.messages.agree(self._announced(Kind.SEND_ACTIVATION), self._announced(Kind.RECEIVE_ACTIVATION))
        for action in self.actions:
            timer, perform = _ACTIONS[action.kind]
            with self.executor.timers(timer, 2):
                perform(self, action)
        self.messages.finish()
        unused = [*self.activations, *self.gradients, *self.saved, *self.deferred.cells]
        assert not unused, f"left over at the end of a step (stage, micro-batch): {unused}"
        return self.loss_sum

    def _forward(self, action: Action) -> None:
        stage, micro_batch = cell = (action.stage, action.micro_batch)
        training = self.sink is not None
        received = self._take(self.activations, False, (stage - 1, micro_batch)) if stage > 0 else None
        if received is not None:
            received.requires_grad_(training)
        output = self.program.forward(stage, micro_batch, received)
        if stage == self.last_stage:
            self.loss_sum += output.detach()
        else:
            self._require_shape(output, cell)
            self.activations[cell] = output.detach()
        if training:
            # An output without a graph: no parameter up to this stage is trained.
            start = get_gradient_edge(output) if output.requires_grad else None
            self.saved[cell] = _SavedForward(received, start)

    def _backward(self, action: Action) -> None:
        """Runs a whole backward, or its input half: all but the weight gradients that layers defer."""
        assert self.sink is not None, "a schedule for evaluation has no backward"
        stage, micro_batch = cell = (action.stage, action.micro_batch)
        output_gradient = self.seed
        if stage < self.last_stage:
            output_gradient = self._take(self.gradients, True, (stage + 1, micro_batch))
        saved = self.saved.pop(cell)
        whole = action.kind is Kind.BACKWARD
        last = whole and self._is_last(stage)
        self.sink.begin_backward(stage, last, action.kind)
        with nullcontext() if whole else self.deferred.collect(cell):
            if saved.start is not None:
                torch.autograd.backward(saved.start, output_gradient)
        self.sink.end_backward(stage, last, action.kind)
        if saved.received is not None:
            gradient = saved.received.grad
            # If the stage does not use its input, the previous stage still expects a gradient.
            self.gradients[cell] = torch.zeros_like(saved.received) if gradient is None else gradient

    def _weights(self, action: Action) -> None:
        assert self.sink is not None, "a schedule for evaluation has no backward"
        last = self._is_last(action.stage)
        self.sink.begin_backward(action.stage, last, action.kind)
        self.deferred.compute((action.stage, action.micro_batch))
        self.sink.end_backward(action.stage, last, action.kind)

    def _is_last(self, stage: int) -> bool:
        """Counts a backward of the stage and returns whether it was the last one of the step."""
        self.backwards_left[stage] -= 1
        return self.backwards_left[stage] == 0

    def _send(self, action: Action) -> None:
        table = self.activations if action.kind is Kind.SEND_ACTIVATION else self.gradients
        value = table.pop((action.stage, action.micro_batch))
        assert isinstance(value, Tensor) and action.peer is not None, f"{action}: nothing to send"
        self.messages.post_send(value.detach(), action.peer, action)

    def _receive(self, action: Action) -> None:
        assert action.peer is not None, f"{action}: no peer"
        # An activation is the input of the next stage; a gradient is that of the sender's input.
        is_activation = action.kind is Kind.RECEIVE_ACTIVATION
        table = self.activations if is_activation else self.gradients
        receiver = action.stage + is_activation
        shape = self.program.message_shape(receiver, action.micro_batch)
        table[action.stage, action.micro_batch] = self.messages.post_receive(
            shape, self.executor.dtype, self.executor.device, action.peer, action
        )

    def _reduce(self, action: Action) -> None:
        assert self.sink is not None, "a schedule for evaluation reduces nothing"
        self.sink.reduce(action.stage)

    def _take(self, table: dict[Cell, Tensor | Pending], gradient: bool, cell: Cell) -> Tensor:
        value = table.pop(cell)
        if isinstance(value, Tensor):
            return value
        with self.executor.timers("backward-recv" if gradient else "forward-recv", 2):
            tensor = value.wait()
        parcel: MessageKey = (gradient, *cell)
        for delivered in self.acknowledged.get(parcel, ()):
            self.messages.delivered(delivered)
        return tensor

    def _require_shape(self, output: Tensor, cell: Cell) -> None:
        """Raises if the shape or dtype of an output differs from what the next stage expects."""
        stage, micro_batch = cell
        expected, dtype = self.program.message_shape(stage + 1, micro_batch), self.executor.dtype
        if tuple(output.shape) != tuple(expected) or output.dtype != dtype:
            raise RuntimeError(
                f"stage {stage} returned a {output.dtype} tensor of shape {tuple(output.shape)} for micro-batch "
                f"{micro_batch}, but stage {stage + 1} expects {dtype} of shape {tuple(expected)}"
            )

    def _announced(self, kind: Kind) -> dict[int, SendSummary]:
        """Summarizes the activations between this rank and each peer in this step."""
        cells: dict[int, list[Cell]] = {}
        for action in self.actions:
            if action.kind is kind and action.peer is not None:
                cells.setdefault(action.peer, []).append((action.stage + 1, action.micro_batch))
        shapes = {peer: [self.program.message_shape(*c) for c in sorted(own)] for peer, own in cells.items()}
        return {peer: summarize_sends(sent, self.executor.dtype) for peer, sent in shapes.items()}


# The timer and the method of each action; receiving is also timed where the tensor is waited for.
_ACTIONS: dict[Kind, tuple[str, Callable[[_ScheduleRun, Action], None]]] = {
    Kind.FORWARD: ("forward-compute", _ScheduleRun._forward),
    Kind.BACKWARD: ("backward-compute", _ScheduleRun._backward),
    Kind.INPUT: ("backward-compute", _ScheduleRun._backward),
    Kind.WEIGHT: ("backward-compute", _ScheduleRun._weights),
    Kind.SEND_ACTIVATION: ("forward-send", _ScheduleRun._send),
    Kind.RECEIVE_ACTIVATION: ("forward-recv", _ScheduleRun._receive),
    Kind.SEND_GRADIENT: ("backward-send", _ScheduleRun._send),
    Kind.RECEIVE_GRADIENT: ("backward-recv", _ScheduleRun._receive),
    Kind.REDUCE: ("all-grads-sync", _ScheduleRun._reduce),
}

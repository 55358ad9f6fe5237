"""Detects NaN/inf and spikes of loss and gradient norm, and finds the module where NaN/inf first appears."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pentatron.checkpoint.state import TrainState
from pentatron.data.loader import Batch
from pentatron.errors import AgreedError, NonFiniteError
from pentatron.optim.build import AnyOptimizer
from pentatron.parallel.collectives import gather_objects
from pentatron.parallel.executor import StageProgram
from pentatron.parallel.serialization import sendable
from pentatron.parallel.sharding import Shape
from pentatron.text import plural
from pentatron.train.model import MicroBatches, ParallelModel
from pentatron.train.output import Output
from pentatron.train.step import StepResult, start_step

_WEIGHT, _FORWARD, _BACKWARD, _REDUCED = range(4)
# A value this many times the largest so far is a spike, once this many updates have been made.
_SPIKE = 10
_STEPS_BEFORE = 10
_ADVICE = "Lower --lr, raise --lr-warmup-iters, or check the data"


@sendable
@dataclass(frozen=True, order=True)
class NanLocation:
    """Where NaN/inf first appeared on one rank. The smallest place over all ranks is the origin.

    Weights come before forward, forward before backward, which runs from the last stage to the first. Ranks
    that share a layer run the same modules in the same order, so that `order` is comparable between them.
    """

    phase: int
    stage: int
    micro_batch: int
    order: int
    rank: int
    what: str

    def sentence(self) -> str:
        where = f"{self.what} on rank {self.rank}"
        if self.phase in (_FORWARD, _BACKWARD):
            where += f", stage {abs(self.stage)}"
        return where if self.micro_batch < 0 else f"{where}, micro-batch {self.micro_batch}"


def first_nonfinite_gradient(optimizer: AnyOptimizer) -> str | None:
    """Returns the name of this rank's first parameter whose reduced gradient has NaN/inf."""
    gradients = optimizer.gradients(owned_only=False)
    return next((f.tensor.removeprefix("gradients/") for f in gradients if not _is_finite(f.values)), None)


def repeat_step(
    model: ParallelModel, optimizer: AnyOptimizer, batches: Sequence[Batch], step: int, scale: float
) -> tuple[StepResult, NanLocation | None]:
    """Repeats a step with hooks in every module; overwrites its gradients. Collective.

    Returns its result, and the origin of its NaN/inf, if it has any.
    """
    probe, rank = _NonFiniteProbe(model), model.world.all_ranks.rank
    with probe.installed(), model.compilation.off():
        again = start_step(model, optimizer, batches, step, scale, probe.wrap).wait()
    # A list: every rank iterates to the end, as `model_weights` may be collective.
    weights = [(n, f.tensor) for n, f in enumerate(optimizer.model_weights()) if not _is_finite(f.values)]
    place = probe.place
    if weights:
        place = NanLocation(_WEIGHT, 0, -1, weights[0][0], rank, f"the weight {weights[0][1]}")
    elif place is None and (name := first_nonfinite_gradient(optimizer)) is not None:
        place = NanLocation(_REDUCED, 0, -1, 0, rank, f"the gradient of {name}")
    places = [p for p in gather_objects(place, model.world.all_ranks) if p is not None]
    return again, min(places, default=None)


class _NonFiniteProbe:
    """Runs the stages with hooks that find the first module output and the first gradient with NaN/inf."""

    def __init__(self, model: ParallelModel) -> None:
        self.model, self.rank = model, model.world.all_ranks.rank
        self.place: NanLocation | None = None
        self._program: MicroBatches | None = None
        # Stage and micro-batch of the running forward; None outside, where outputs are not checked.
        self._cell: tuple[int, int] | None = None
        self._outputs = self._gradients = 0

    def wrap(self, program: MicroBatches) -> StageProgram:
        self._program = program
        return self

    @contextmanager
    def installed(self) -> Iterator[None]:
        with ExitStack() as handles:
            for number, stage in self.model.stages.items():
                for name, module in stage.named_modules():
                    check = partial(self._check_output, f"the output of {name or 'the stage'}")
                    handles.callback(module.register_forward_hook(check).remove)
                for name, parameter in stage.named_parameters():
                    if parameter.requires_grad and type(parameter) is nn.Parameter:
                        check = partial(self._check_gradient, number, name)
                        handles.callback(parameter.register_hook(check).remove)
            yield

    def forward(self, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        assert self._program is not None
        # NaN/inf in the input originates in an earlier stage: this forward is not checked then.
        self._cell = (stage, micro_batch) if received is None or _is_finite(received) else None
        self._outputs = 0
        try:
            output = self._program.forward(stage, micro_batch, received)
            if stage == self.model.config.placement.stages - 1:
                self._check_output("the loss", output)
            return output
        finally:
            # Recomputation in backward calls the forward hooks again.
            self._cell = None

    def message_shape(self, stage: int, micro_batch: int) -> Shape:
        assert self._program is not None
        return self._program.message_shape(stage, micro_batch)

    def _check_output(self, what: str, *given: Any) -> None:
        """`given`: what a forward hook is called with, the output last."""
        if self._cell is None:
            return
        self._outputs += 1
        tensors = given[-1] if isinstance(given[-1], tuple | list) else (given[-1],)
        if not all(_is_finite(t) for t in tensors if isinstance(t, Tensor)):
            self._keep_first(NanLocation(_FORWARD, *self._cell, self._outputs, self.rank, what))
            self._cell = None

    def _check_gradient(self, stage: int, name: str, gradient: Tensor) -> None:
        self._gradients += 1
        if not _is_finite(gradient):
            # Negative, as backward runs from the last stage to the first.
            what = f"the gradient of {name} before it was summed,"
            self._keep_first(NanLocation(_BACKWARD, -stage, -1, self._gradients, self.rank, what))

    def _keep_first(self, place: NanLocation) -> None:
        self.place = place if self.place is None else min(self.place, place)


def _is_finite(values: Tensor) -> bool:
    return not values.is_floating_point() or bool(torch.isfinite(values.detach()).all())


class NumericsCheck:
    """Diagnoses steps with NaN/inf, and warns of spikes and of steps without labels."""

    def __init__(
        self, model: ParallelModel, optimizer: AnyOptimizer, state: TrainState, output: Output
    ) -> None:
        config = self.config = model.config
        self.world, self.model, self.optimizer = model.world, model, optimizer
        self.state, self.output = state, output
        # Only attention dropout uses torch's generators: their state must be restored to repeat a step.
        self._keeps_rng = config.model.attention_dropout > 0 and config.loop.rerun_mode != "disabled"
        self._rng_states: list[Tensor] = []
        self._empty_steps = 0

    def before_step(self) -> None:
        if self._keeps_rng:
            self._rng_states = [torch.get_rng_state()]
            if self.world.device.type == "cuda":
                self._rng_states.append(torch.cuda.get_rng_state(self.world.device))

    def diagnose(
        self, result: StepResult, batches: Sequence[Batch], scale: float, last_saved: str
    ) -> NonFiniteError | AgreedError:
        """Repeats the step and returns the error that ends the run. Collective."""
        step = self.state.step
        event = (
            f"step {step + 1}: the loss is {result.loss} and the gradient norm {result.gradient_norm}; training stopped before the "
            f"weight update"
        )
        first = self._first_time(result)
        if self.config.loop.rerun_mode == "disabled":
            return AgreedError(f"{event}{first}. {_ADVICE}; {last_saved}")
        self.restore_rng()
        again, origin = repeat_step(self.model, self.optimizer, batches, step, scale)
        if again.updated:
            return NonFiniteError(
                f"{event}{first}. Recomputed, the loss is {again.loss:.6g} and the norm {again.gradient_norm:.6g}: a transient "
                f"hardware fault rather than a fault of the data; check that rank's memory and GPU; {last_saved}",
                NonFiniteError.TRANSIENT,
            )
        saved = "This is the first step"
        if step:
            saves = self.config.checkpoint.save_checkpoints
            saved = (
                f"The checkpoint of step {step} has the state before this step"
                if saves
                else "Nothing is saved"
            )
        begin = "" if origin is None else f", and begins with {origin.sentence()}"
        return NonFiniteError(
            f"{event}. Recomputing the step reproduces it{begin}. {_ADVICE}; --iterations-to-skip {step + 1} skips this step. {saved}",
            NonFiniteError.REPRODUCIBLE,
        )

    def _first_time(self, result: StepResult) -> str:
        """Returns which ranks had NaN/inf in the loss, or else a gradient that has it."""
        is_finite = result.own_loss is None or _is_finite(result.own_loss)
        own = (is_finite, first_nonfinite_gradient(self.optimizer))
        by_rank = gather_objects(own, self.world.all_ranks)
        ranks = [str(rank) for rank, (is_finite, _) in enumerate(by_rank) if not is_finite]
        if ranks:
            return f" (the loss of rank {', '.join(ranks)})"
        gradients = [f"{name} on rank {rank}" for rank, (_, name) in enumerate(by_rank) if name is not None]
        return f" (first of all the gradient of {gradients[0]})" if gradients else ""

    def restore_rng(self) -> None:
        """Restores the states of torch's generators from before the step."""
        if self._rng_states:
            torch.set_rng_state(self._rng_states[0])
        if len(self._rng_states) > 1:
            torch.cuda.set_rng_state(self._rng_states[1], self.world.device)

    def watch(self, result: StepResult) -> None:
        """Warns of a spike of loss or gradient norm, and of steps in which no label counts."""
        loop, state = self.config.loop, self.state
        if result.loss == 0 and result.gradient_norm == 0:
            self._empty_steps = count = self._empty_steps + 1
            # At the first such step, the tenth, the hundredth, ...
            if str(count).strip("0") == "1":
                self.output.say(
                    f"warning: step {state.step + 1}: loss and gradients are 0, in {count} {plural(count, 'step')} so far: no label "
                    f"counts in the loss, and weight decay alone changes the weights; check the data, its masks and --eod-mask-loss"
                )
        if state.updates > _STEPS_BEFORE:
            if loop.check_for_spiky_loss:
                self._warn_of_spike("loss", result.loss, state.largest_loss)
            if loop.check_for_large_grads:
                self._warn_of_spike("gradient norm", result.gradient_norm, state.largest_norm)
        state.largest_loss = max(state.largest_loss, result.loss)
        state.largest_norm = max(state.largest_norm, result.gradient_norm)

    def _warn_of_spike(self, what: str, value: float, before: float) -> None:
        # `before` is 0 if the largest value is unknown, as after loading a checkpoint of Megatron-LM.
        if 0 < before * _SPIKE < value:
            self.output.say(
                f"warning: step {self.state.step + 1}: the {what} {value:.6g} is {value / before:.1f} times the largest one before"
            )

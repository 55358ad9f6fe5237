"""Numbers that are none, and numbers that stand out: what is done about them, and what is told."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pentatron.checkpoint.state import TrainState
from pentatron.data.loader import Batch
from pentatron.errors import AgreedError, BadNumbers
from pentatron.optim.build import AnyOptimizer
from pentatron.parallel.collectives import gather_objects
from pentatron.parallel.encoding import sendable
from pentatron.parallel.shards import Shape
from pentatron.parallel.world import World
from pentatron.settings.run import RunConfig
from pentatron.train.model import MicroBatches, ParallelModel
from pentatron.train.output import Output
from pentatron.train.step import Computed, StepResult, compute_gradients

# Where numbers first cease to be numbers: a step computed once more, watched module by module on every rank.


@sendable
@dataclass(frozen=True, order=True)
class Place:
    """Where it was first met on one rank; the smallest place of all ranks is the origin.

    A bad weight comes before what it does in a forward, that before what follows in a backward, which runs from the last stage to
    the first. Ranks that share a layer run the same modules: who met it at an earlier one had it first.
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


_WEIGHT, _FORWARD, _BACKWARD, _REDUCED = range(4)


@dataclass(frozen=True)
class Diagnosis:
    """What the repeated step gave, and the place its bad numbers come from, if it had any."""

    again: Computed
    origin: Place | None

    @property
    def repeats(self) -> bool:
        return not (math.isfinite(self.again.loss) and math.isfinite(self.again.norm))


def bad_gradient(optimizer: AnyOptimizer) -> str | None:
    """The first parameter of this rank, in the order it keeps them, of whose summed gradient some element is no number."""
    for fragment in optimizer.gradients(owned_only=False):
        if not _is_finite(fragment.values):
            return fragment.tensor.removeprefix("gradients/")
    return None


def compute_again(
    model: ParallelModel, optimizer: AnyOptimizer, batches: Sequence[Batch], step: int, scale: float
) -> Diagnosis:
    """Every rank must ask. The gradients of the first time are gone afterwards."""
    watch = _Watch(model)
    with watch.installed(), model.compilation.off():
        again = compute_gradients(model, optimizer, batches, step, scale, watch.around)
    place = _bad_weight(optimizer, model.world) or watch.place
    if place is None and (name := bad_gradient(optimizer)) is not None:
        place = Place(_REDUCED, 0, -1, 0, model.world.everyone.rank, f"the gradient of {name}")
    places = [p for p in gather_objects(place, model.world.everyone) if p is not None]
    return Diagnosis(again, min(places, default=None))


def _bad_weight(optimizer: AnyOptimizer, world: World) -> Place | None:
    found = None
    # All of them, whatever is found: other ranks ask for all.
    for number, fragment in enumerate(optimizer.model_weights()):
        if found is None and not _is_finite(fragment.values):
            found = Place(_WEIGHT, 0, -1, number, world.everyone.rank, f"the weight {fragment.tensor}")
    return found


class _Watch:
    """Notes the first module whose output, and the first parameter whose gradient, is not all numbers."""

    def __init__(self, model: ParallelModel) -> None:
        self.model, self.rank = model, model.world.everyone.rank
        self.place: Place | None = None
        self._cell: tuple[int, int] | None = None
        self._order = 0
        self._gradients = 0

    def around(self, program: MicroBatches) -> "_WatchedProgram":
        return _WatchedProgram(program, self)

    @contextmanager
    def installed(self) -> Iterator[None]:
        handles: list[Any] = []
        for number, stage in self.model.stages.items():
            for name, module in stage.named_modules():
                handles.append(module.register_forward_hook(self._after(name or "the stage")))
            for name, parameter in stage.named_parameters():
                if parameter.requires_grad and type(parameter) is nn.Parameter:
                    handles.append(parameter.register_hook(self._gradient(number, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def in_forward(self, stage: int, micro_batch: int) -> Iterator[None]:
        self._cell, self._order = (stage, micro_batch), 0
        try:
            yield
        finally:
            # What runs again in a backward has been seen.
            self._cell = None

    def received(self, values: Tensor | None) -> None:
        """What an earlier stage made is its matter: nothing that follows from it is met first here."""
        if values is not None and not _is_finite(values):
            self._cell = None

    def made_loss(self, loss: Tensor) -> None:
        self._note(loss, "the loss")

    def _after(self, name: str) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            self._note(output, f"the output of {name}")

        return hook

    def _note(self, output: Any, what: str) -> None:
        if self._cell is None:
            return
        self._order += 1
        tensors = output if isinstance(output, tuple | list) else (output,)
        if all(_is_finite(t) for t in tensors if isinstance(t, Tensor)):
            return
        self._keep(Place(_FORWARD, *self._cell, self._order, self.rank, what))
        self._cell = None

    def _gradient(self, stage: int, name: str) -> Any:
        def hook(gradient: Tensor) -> None:
            self._gradients += 1
            if not _is_finite(gradient):
                # A backward runs from the last stage to the first.
                what = f"the gradient of {name} before it was summed,"
                self._keep(Place(_BACKWARD, -stage, -1, self._gradients, self.rank, what))

        return hook

    def _keep(self, place: Place) -> None:
        self.place = place if self.place is None else min(self.place, place)


@dataclass(frozen=True)
class _WatchedProgram:
    program: MicroBatches
    watch: _Watch

    def forward(self, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        with self.watch.in_forward(stage, micro_batch):
            self.watch.received(received)
            made = self.program.forward(stage, micro_batch, received)
            if stage == self.program.model.config.placement.stages - 1:
                self.watch.made_loss(made)
            return made

    def message_shape(self, stage: int, micro_batch: int) -> Shape:
        return self.program.message_shape(stage, micro_batch)


def _is_finite(values: Tensor) -> bool:
    """Integers always are."""
    return not values.is_floating_point() or bool(torch.isfinite(values.detach()).all())


# How much larger than anything before a number must be to be told of, and how many steps must come before.
_SPIKE = 10
_STEPS_BEFORE = 10
_ADVICE = "Lower --lr, raise --lr-warmup-iters, or check the data"


class Health:
    def __init__(
        self,
        config: RunConfig,
        world: World,
        model: ParallelModel,
        optimizer: AnyOptimizer,
        state: TrainState,
        output: Output,
    ) -> None:
        self.config, self.world, self.model, self.optimizer = config, world, model, optimizer
        self.state, self.output = state, output
        # Only attention dropout draws from torch's generators; without it a step can be repeated as it is.
        self._draws = config.model.attention_dropout > 0 and config.loop.rerun_mode != "disabled"
        self._random: list[Tensor] = []
        self._empty_steps = 0

    @property
    def stops(self) -> bool:
        """Whether numbers that are none end the run."""
        return self.config.loop.check_for_nan_in_loss_and_grad

    def before_step(self) -> None:
        if self._draws:
            self._random = [torch.get_rng_state()]
            if self.world.device.type == "cuda":
                self._random.append(torch.cuda.get_rng_state(self.world.device))

    def diagnose(
        self, result: StepResult, batches: Sequence[Batch], scale: float, last_saved: str
    ) -> BadNumbers | AgreedError:
        """Computes the step again and says what was found out, and which checkpoint is the last one. Every rank must ask."""
        step = self.state.step
        met = (
            f"step {step + 1}: the loss is {result.loss} and the gradient norm {result.gradient_norm}; training stopped before the "
            f"weights were touched"
        )
        first = self._first_time(result)
        if self.config.loop.rerun_mode == "disabled":
            return AgreedError(f"{met}{first}. {_ADVICE}; {last_saved}")
        self.as_before_step()
        found = compute_again(self.model, self.optimizer, batches, step, scale)
        if not found.repeats:
            return BadNumbers(
                f"{met}{first}. Computed again, the loss is {found.again.loss:.6g} and the norm {found.again.norm:.6g}: a passing "
                f"fault, of a machine rather than of the data; check that rank's memory and GPU; {last_saved}",
                BadNumbers.TRANSIENT,
            )
        saved = "Nothing was trained before"
        if step:
            saved = (
                f"The checkpoint of step {step} has everything before it"
                if self.config.checkpoint.save_checkpoints
                else "Nothing is saved"
            )
        origin = "" if found.origin is None else f", and begins with {found.origin.sentence()}"
        return BadNumbers(
            f"{met}. Computed again, it is the same{origin}. {_ADVICE}; --iterations-to-skip {step + 1} leaves this step out. "
            f"{saved}",
            BadNumbers.REPRODUCIBLE,
        )

    def _first_time(self, result: StepResult) -> str:
        """Which ranks had a bad loss, or else where a bad gradient lies."""
        own = result.own_loss is None or bool(torch.isfinite(result.own_loss))
        everyone = gather_objects((own, bad_gradient(self.optimizer)), self.world.everyone)
        losses = [str(rank) for rank, (sound, _) in enumerate(everyone) if not sound]
        if losses:
            return f" (the loss of rank {', '.join(losses)})"
        gradients = [f"{name} on rank {rank}" for rank, (_, name) in enumerate(everyone) if name is not None]
        return f" (first of all the gradient of {gradients[0]})" if gradients else ""

    def as_before_step(self) -> None:
        """Torch's generators as they were then."""
        if self._random:
            torch.set_rng_state(self._random[0])
        if len(self._random) > 1:
            torch.cuda.set_rng_state(self._random[1], self.world.device)

    def watch(self, result: StepResult) -> None:
        """Tells of a loss or a norm far above all before, and of steps in which no label counts; the run goes on."""
        loop, state = self.config.loop, self.state
        if result.loss == 0 and result.gradient_norm == 0:
            self._count_empty_step()
        if state.updates > _STEPS_BEFORE:
            if loop.check_for_spiky_loss and _stands_out(result.loss, state.largest_loss):
                self._tell("loss", result.loss, state.largest_loss)
            if loop.check_for_large_grads and _stands_out(result.gradient_norm, state.largest_norm):
                self._tell("gradient norm", result.gradient_norm, state.largest_norm)
        state.largest_loss = max(state.largest_loss, result.loss)
        state.largest_norm = max(state.largest_norm, result.gradient_norm)

    def _count_empty_step(self) -> None:
        """Warns at the first such step, the tenth, the hundredth, ..."""
        self._empty_steps += 1
        if str(self._empty_steps).strip("0") == "1":
            steps = "1 step" if self._empty_steps == 1 else f"{self._empty_steps} steps"
            self.output.say(
                f"warning: step {self.state.step + 1}: loss and gradients are 0, in {steps} so far: no label counts in the loss, and "
                f"weight decay alone changes the weights; check the data, its masks and --eod-mask-loss"
            )

    def _tell(self, what: str, value: float, before: float) -> None:
        self.output.say(
            f"warning: step {self.state.step + 1}: the {what} {value:.6g} is {value / before:.1f} times the largest one before"
        )


def _stands_out(value: float, before: float) -> bool:
    """Never true if the largest value so far is 0: nothing is known of it then, as after a checkpoint of Megatron-LM."""
    return 0 < before * _SPIKE < value

"""Numbers that are none, and numbers that stand out: what is done about them, and what is told."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pentatron.config.run import RunConfig
from pentatron.data.loader import Batch
from pentatron.errors import AgreedError, BadNumbers
from pentatron.optim.build import AnyOptimizer
from pentatron.parallel.collectives import gather_objects
from pentatron.parallel.world import World
from pentatron.train.diagnosis import bad_gradient, compute_again
from pentatron.train.output import Output
from pentatron.train.parallel_model import ParallelModel
from pentatron.train.state import TrainState
from pentatron.train.step import StepResult

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

"""Evaluation on the validation and the test set, during training, after it, or instead of it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pentatron.checkpoint.state import TrainState
from pentatron.data.loader import Batch, FiniteDataset, PaddedDataset, RepeatedDataset
from pentatron.data.open_data import Datasets
from pentatron.monitor.report import perplexity
from pentatron.train.batches import micro_batches, next_step_batches
from pentatron.train.model import ParallelModel
from pentatron.train.output import Output
from pentatron.train.step import evaluate
from pentatron.train.stop import StopConditions, StopReason

# The loss of an evaluation, and the values that the loss function reported.
Result = tuple[float, Mapping[str, float]]


@dataclass(eq=False)
class Evaluation:
    """Evaluates and logs the loss.

    A validation continues after the samples of the previous one; the test set is read from its start.
    """

    model: ParallelModel
    datasets: Datasets
    state: TrainState
    output: Output
    endings: StopConditions

    def __post_init__(self) -> None:
        self.config, self.world = self.model.config, self.model.world
        # Step and result of the last validation over the whole set.
        self._whole: dict[int, Result] = {}
        # Why the last evaluation was interrupted, if it was.
        self.ended_by: StopReason | None = None
        self._validated_step: int | None = None

    def after_training(self) -> dict[str, float]:
        """Returns the losses on the validation and the test set by name. Collective."""
        step, losses = self.state.step, {}
        if (loss := self.validate(f"iteration {step} on validation set")) is not None:
            losses["validation"] = loss
        if self.ended_by is None and (loss := self.test(f"iteration {step} on test set")) is not None:
            losses["test"] = loss
        if self.datasets.no_test:
            self.output.note(f"no test: {self.datasets.no_test}")
        return losses

    def test(self, where: str) -> float | None:
        """Returns the loss on the test set, logged as "at `where`"."""
        if self.datasets.test is None or (result := self._evaluate(self.datasets.test, 0)) is None:
            return None
        return self._log("test", where, result)

    def validate(self, where: str) -> float | None:
        """Returns the loss on the next validation samples, logged as "at `where`".

        None without a validation set, or if the run is to stop.
        """
        if self.datasets.valid is None:
            return None
        whole = self._is_whole(self.datasets.valid)
        # At the same step neither the weights nor the samples have changed.
        known = self._whole.get(self.state.step) if whole else None
        result = known or self._evaluate(self.datasets.valid, self.state.consumed_valid_samples)
        if result is None:
            return None
        if whole:
            self._whole = {self.state.step: result}
        else:
            self.state.consumed_valid_samples += self.config.train.eval_iters * self.config.eval_batch[0]
        # The final validation may follow one of the same step: the remark explains why its loss differs.
        again = self._validated_step == self.state.step and not whole
        self._validated_step = self.state.step
        return self._log("validation", where, result, " (final, on the next samples)" if again else "")

    def _is_whole(self, samples: Any) -> bool:
        return self.config.train.full_validation and isinstance(samples, FiniteDataset)

    def _evaluate(self, samples: Any, consumed: int) -> Result | None:
        """Evaluates --eval-iters steps, or all samples; returns None if the run is to stop."""
        steps, (size, micro) = self.config.train.eval_iters, self.config.eval_batch
        if self._is_whole(samples):
            steps, consumed = -(-len(samples) // size), 0
            samples = PaddedDataset(samples, steps * size)
        elif isinstance(samples, FiniteDataset):
            samples = RepeatedDataset(samples)
        count = self.config.eval_accumulation
        batches = micro_batches(self.config, self.world, samples, consumed, micro)
        result = evaluate(self.model, self._until_stopped(batches, steps, count), count)
        if self.ended_by is not None:
            why = "timelimit reached" if self.ended_by.signal is None else "signal received"
            self.output.note(f"Exiting during evaluation, {why}")
            return None
        return result

    def _until_stopped(self, batches: Iterator[Batch], steps: int, at_once: int) -> Iterator[Batch]:
        """Yields the micro-batches of `steps` steps; ends early and sets `ended_by` if the run is to stop."""
        self.ended_by, endings = None, self.endings
        for _ in range(steps):
            step_batches, number = next_step_batches(batches, at_once, endings.stop, endings.world)
            self.ended_by = endings.by_time_limit() if number is None else endings.by_signal(number)
            if self.ended_by is not None:
                return
            yield from step_batches

    def _log(self, name: str, where: str, result: Result, remark: str = "") -> float:
        """Logs the result and returns its loss."""
        loss, reported = result
        values = {"lm loss": loss, **reported}
        shown = (f"{n} value: {v:.6E} | {n} PPL: {perplexity(v):.6E} | " for n, v in values.items())
        line = f" validation loss at {where} | {''.join(shown)}"
        rule = "-" * (len(line) + 1)
        for text in (rule, line, rule):
            self.output.note(text)
        if not self.output.echoes:
            self.output.display.say(f"step {self.state.step:>5}  {name} loss {loss:.4f}{remark}")
        return loss

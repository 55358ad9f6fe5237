"""The loss on data that is not trained on: during training, after it, or instead of it."""

from collections.abc import Iterator
from typing import Any

from pentatron.checkpoint.state import TrainState
from pentatron.data.datasets import Datasets
from pentatron.data.loader import Batch, FiniteDataset, Padded, Repeated
from pentatron.monitor.report import perplexity
from pentatron.parallel.world import World
from pentatron.settings.run import RunConfig
from pentatron.train.batches import agree_on_next_step, micro_batches
from pentatron.train.model import ParallelModel
from pentatron.train.output import Output
from pentatron.train.step import Evaluated, evaluate
from pentatron.train.stop import Ending, Endings


class Evaluation:
    """Every validation goes on where the last one ended; the test set is always read from its beginning."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        model: ParallelModel,
        datasets: Datasets,
        state: TrainState,
        output: Output,
        endings: Endings,
    ) -> None:
        self.config, self.world, self.model, self.datasets = config, world, model, datasets
        self.state, self.output, self.endings = state, output, endings
        # Of the last one over a whole set: at which step it was, and what it found.
        self._whole: tuple[int, Evaluated] | None = None
        # What broke the last one off, if it was.
        self.ended_by: Ending | None = None
        self._validated: int | None = None

    def during_training(self) -> float | None:
        """The loss on the next validation samples, if there are any; None also if it was broken off."""
        return self.validate(f"iteration {self.state.step}")

    def after_training(self) -> dict[str, float]:
        """The losses on the sets that there are, by name. Every rank must ask."""
        step, found = self.state.step, {}
        if (loss := self.validate(f"iteration {step} on validation set")) is not None:
            found["validation"] = loss
        if self.ended_by is None and (loss := self.test(f"iteration {step} on test set")) is not None:
            found["test"] = loss
        if self.datasets.untested:
            self.output.note(f"no test: {self.datasets.untested}")
        return found

    def test(self, where: str) -> float | None:
        """The loss on the test set, told with `where`."""
        if self.datasets.test is None or (found := self._evaluate(self.datasets.test, 0)) is None:
            return None
        self._tell("test", where, found)
        return found.loss

    def validate(self, where: str) -> float | None:
        """The loss on the next validation samples, told with `where`."""
        if self.datasets.valid is None:
            return None
        whole = self._is_whole(self.datasets.valid)
        if whole and self._whole is not None and self._whole[0] == self.state.step:
            # The same weights on the same samples.
            found: Evaluated | None = self._whole[1]
        else:
            found = self._evaluate(self.datasets.valid, self.state.consumed_valid_samples)
        if found is None:
            return None
        if whole:
            self._whole = self.state.step, found
        else:
            self.state.consumed_valid_samples += self.config.train.eval_iters * self.config.eval_batch[0]
        # After the last step a second one may follow at once, which would seem to contradict the first.
        again = self._validated == self.state.step and not whole
        self._validated = self.state.step
        self._tell("validation", where, found, " (on the samples after those)" if again else "")
        return found.loss

    def _is_whole(self, samples: Any) -> bool:
        return self.config.train.full_validation and isinstance(samples, FiniteDataset)

    def _evaluate(self, samples: Any, consumed: int) -> Evaluated | None:
        """The mean over the tokens of `--eval-iters` steps, or of all samples; None if the run is to end at once."""
        steps, (size, micro) = self.config.train.eval_iters, self.config.eval_batch
        if self._is_whole(samples):
            steps, consumed = -(-len(samples) // size), 0
            samples = Padded(samples, steps * size)
        elif isinstance(samples, FiniteDataset):
            samples = Repeated(samples)
        count = self.config.eval_accumulation
        batches = micro_batches(self.config, self.world, samples, consumed, micro)
        walk = _Walk(batches, steps, count, self.endings)
        found = evaluate(self.model, walk, count)
        self.ended_by = walk.ended_by
        if self.ended_by is not None:
            why = "timelimit reached" if self.ended_by.signal is None else "signal received"
            self.output.note(f"Exiting during evaluation, {why}")
            return None
        return found

    def _tell(self, name: str, where: str, found: Evaluated, remark: str = "") -> None:
        values = {"lm loss": found.loss, **found.reported}
        shown = (f"{n} value: {v:.6E} | {n} PPL: {perplexity(v):.6E} | " for n, v in values.items())
        line = f" validation loss at {where} | {''.join(shown)}"
        rule = "-" * (len(line) + 1)
        for text in (rule, line, rule):
            self.output.note(text)
        if not self.output.echoes:
            self.output.display.say(f"step {self.state.step:>5}  {name} loss {found.loss:.4f}{remark}")


class _Walk:
    """The micro-batches of so many steps, up to the first one before which the run is to end; bad data ends it on all ranks."""

    def __init__(self, batches: Iterator[Batch], steps: int, at_once: int, endings: Endings) -> None:
        self.batches, self.steps, self.at_once, self.endings = batches, steps, at_once, endings
        self.ended_by: Ending | None = None

    def __iter__(self) -> Iterator[Batch]:
        endings = self.endings
        for _ in range(self.steps):
            drawn, number = agree_on_next_step(self.batches, self.at_once, endings.stop, endings.world)
            self.ended_by = endings.by_the_clock() if number is None else endings.by_signal(number)
            if self.ended_by is not None:
                return
            yield from drawn

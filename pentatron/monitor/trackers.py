"""The numbers of every step for Weights & Biases."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentatron.errors import UserError
from pentatron.monitor.recorder import Recorder, RecorderDown
from pentatron.monitor.report import StepReport, perplexity
from pentatron.text import redacted

# Megatron's names for the numbers of a step, as TensorBoard and Weights & Biases show them.


@dataclass(frozen=True)
class Choices:
    """Which of the numbers beyond the usual ones are wanted."""

    timers: bool = False
    memory: bool = False
    world_size: int | None = None
    perplexity: bool = False


@dataclass(frozen=True)
class Scalar:
    name: str
    value: float
    # Drawn over the samples consumed, instead of over the steps.
    over_samples: bool = False


def scalars(report: StepReport, validation: float | None, choices: Choices) -> list[Scalar]:
    """In the order of Megatron's writer."""
    # As in the log, and as Megatron has it: the rate after the step, which the next one will have.
    both = {"learning-rate": report.next_learning_rate, "batch-size": float(report.global_batch_size)}
    if not report.is_skipped:
        both |= {"lm loss": report.loss, **report.reported}
        both |= report.experts.by_name() if report.experts else {}
    both |= {"loss-scale": report.loss_scale, "grad-norm": report.gradient_norm}
    found = [
        scalar
        for name, value in both.items()
        for scalar in (Scalar(name, value), Scalar(f"{name} vs samples", value, over_samples=True))
    ]
    if report.skipped_samples:
        found.append(Scalar("skipped-train-samples", float(report.skipped_samples)))
    if choices.world_size is not None:
        found.append(Scalar("world-size", float(choices.world_size)))
    if choices.memory:
        found.append(Scalar("mem-max-allocated-bytes", float(report.memory_bytes)))
        found += [Scalar(name, value) for name, value in report.memory.items()]
    if choices.timers:
        found.append(Scalar("throughput", report.teraflops_per_device))
        found.append(Scalar("iteration-time", report.seconds))
    found.append(Scalar("tokens-per-second", report.tokens_per_second))
    if validation is not None:
        found += _of_set("validation", validation, choices.perplexity)
    return found


def of_evaluation(losses: Mapping[str, float], choices: Choices) -> list[Scalar]:
    """Of the sets that are evaluated after the last step, over the steps."""
    found = [s for name, loss in losses.items() for s in _of_set(name, loss, choices.perplexity)]
    return [scalar for scalar in found if not scalar.over_samples]


def _of_set(name: str, loss: float, with_perplexity: bool) -> list[Scalar]:
    values = {f"lm loss {name}": loss}
    if with_perplexity:
        values[f"lm loss {name} ppl"] = perplexity(loss)
    return [
        scalar
        for name, value in values.items()
        for scalar in (Scalar(name, value), Scalar(f"{name} vs samples", value, over_samples=True))
    ]


# The numbers of every step for TensorBoard.


class TensorBoard(Recorder):
    def __init__(
        self, folder: Path, settings: Mapping[str, Any], choices: Choices, interval: int, step: int
    ) -> None:
        """Events after `step` were lost with an interrupted run and are computed again: the viewer drops the old ones."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                "--tensorboard-dir needs the tensorboard package: pip install tensorboard"
            ) from None
        folder.mkdir(parents=True, exist_ok=True)
        # Its writer would find out in a thread of its own, with a traceback.
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)
        with contextlib.suppress(AttributeError):
            # What the thread fails with comes back from the next call as well; once is enough.
            events: Any = self._writer.file_writer
            events.event_writer._async_writer._worker._invoke_excepthook = lambda thread: None
        self.choices, self.interval = choices, interval
        for name, value in settings.items():
            self._writer.add_text(name, redacted(str(value)), global_step=step)

    def record(self, report: StepReport, validation: float | None) -> None:
        if report.step % self.interval and validation is None:
            return
        for scalar in scalars(report, validation, self.choices):
            place = report.consumed_samples if scalar.over_samples else report.step
            self._writer.add_scalar(scalar.name, scalar.value, place)
        self._writer.flush()

    def evaluated(self, step: int, losses: Mapping[str, float]) -> None:
        for scalar in of_evaluation(losses, self.choices):
            self._writer.add_scalar(scalar.name, scalar.value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


@dataclass(frozen=True)
class Place:
    """Whose run it is, its name there and the folder that wandb keeps its own files in."""

    project: str
    name: str
    entity: str | None
    folder: Path


@contextmanager
def _redacted_arguments() -> Iterator[None]:
    """Hides secrets of the command line from `wandb.init`, which stores and uploads `sys.argv`."""
    typed = sys.argv
    sys.argv = [redacted(word) for word in typed]
    try:
        yield
    finally:
        sys.argv = typed


class WeightsAndBiases(Recorder):
    def __init__(self, place: Place, settings: Mapping[str, Any], choices: Choices, interval: int) -> None:
        """Online, offline or off is what `wandb` itself is told (WANDB_MODE, `wandb login`)."""
        try:
            import wandb
        except ImportError:
            raise UserError("--wandb-project needs the wandb package: pip install wandb") from None
        place.folder.mkdir(parents=True, exist_ok=True)
        try:
            with _redacted_arguments():
                self._run = wandb.init(
                    dir=os.fspath(place.folder),
                    name=redacted(place.name),
                    project=place.project,
                    entity=place.entity,
                    config=dict(settings),
                )
        except wandb.errors.Error as error:
            reason = str(error).strip().rstrip(".").splitlines()[0]
            raise RecorderDown(
                f"it did not start: {reason}; log in with `wandb login`, or keep the run on this machine with WANDB_MODE=offline"
            ) from None
        self.choices, self.interval = choices, interval

    def record(self, report: StepReport, validation: float | None) -> None:
        if report.step % self.interval and validation is None:
            return
        # Its own horizontal axis is the step; the samples are a line of their own, to draw others over.
        found = {s.name: s.value for s in scalars(report, validation, self.choices) if not s.over_samples}
        self._run.log({**found, "samples vs steps": report.consumed_samples}, step=report.step)

    def evaluated(self, step: int, losses: Mapping[str, float]) -> None:
        if found := {scalar.name: scalar.value for scalar in of_evaluation(losses, self.choices)}:
            self._run.log(found, step=step)

    def close(self) -> None:
        self._run.finish()

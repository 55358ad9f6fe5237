"""Recorders for TensorBoard and Weights & Biases, with Megatron-LM's names of metrics."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentatron.errors import UserError
from pentatron.monitor.recorder import Recorder, RecorderUnavailable
from pentatron.monitor.report import StepReport, perplexity
from pentatron.text import redact

# --- scalars under Megatron-LM's names ---


@dataclass(frozen=True)
class OptionalScalars:
    """Optional metrics."""

    timers: bool = False
    memory: bool = False
    world_size: int | None = None
    perplexity: bool = False


@dataclass(frozen=True)
class Scalar:
    """A value to plot."""

    name: str
    value: float
    # Plotted over consumed samples instead of steps.
    over_samples: bool = False


def scalars(report: StepReport, validation: float | None, choices: OptionalScalars) -> list[Scalar]:
    """Returns the metrics of a step in the order of Megatron-LM's writer."""
    # The learning rate of the next step, as in the log and in Megatron-LM.
    over_both = {"learning-rate": report.next_learning_rate, "batch-size": float(report.global_batch_size)}
    if not report.is_skipped:
        over_both |= {"lm loss": report.loss, **report.reported}
        over_both |= report.experts.by_name() if report.experts else {}
    over_both |= {"loss-scale": report.loss_scale, "grad-norm": report.gradient_norm}
    values = _over_steps_and_samples(over_both)
    if report.skipped_samples:
        values.append(Scalar("skipped-train-samples", float(report.skipped_samples)))
    if choices.world_size is not None:
        values.append(Scalar("world-size", float(choices.world_size)))
    if choices.memory:
        values.append(Scalar("mem-max-allocated-bytes", float(report.memory_bytes)))
        values += [Scalar(name, value) for name, value in report.memory.items()]
    if choices.timers:
        values.append(Scalar("throughput", report.teraflops_per_device))
        values.append(Scalar("iteration-time", report.seconds))
    values.append(Scalar("tokens-per-second", report.tokens_per_second))
    if validation is not None:
        values += _evaluation_scalars("validation", validation, choices.perplexity)
    return values


def evaluation_scalars(losses: Mapping[str, float], choices: OptionalScalars) -> list[Scalar]:
    """Returns the losses evaluated after the last step, over steps only."""
    values = [s for name, loss in losses.items() for s in _evaluation_scalars(name, loss, choices.perplexity)]
    return [scalar for scalar in values if not scalar.over_samples]


def _evaluation_scalars(name: str, loss: float, with_perplexity: bool) -> list[Scalar]:
    values = {f"lm loss {name}": loss}
    if with_perplexity:
        values[f"lm loss {name} ppl"] = perplexity(loss)
    return _over_steps_and_samples(values)


def _over_steps_and_samples(values: Mapping[str, float]) -> list[Scalar]:
    return [
        scalar
        for name, value in values.items()
        for scalar in (Scalar(name, value), Scalar(f"{name} vs samples", value, over_samples=True))
    ]


# --- recorders ---


class TensorBoard(Recorder):
    """Writes TensorBoard events."""

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], choices: OptionalScalars, interval: int, step: int
    ) -> None:
        """Purges events after `step`: they were lost with an interrupted run and are computed again."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                "--tensorboard-dir needs the tensorboard package: pip install tensorboard"
            ) from None
        folder.mkdir(parents=True, exist_ok=True)
        # Fails here if the folder is not writable; TensorBoard's background thread would print a stack trace.
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)
        with contextlib.suppress(AttributeError):
            # The next call raises the thread's exception; its stack trace is not printed as well.
            events: Any = self._writer.file_writer
            events.event_writer._async_writer._worker._invoke_excepthook = lambda thread: None
        self.choices, self.interval = choices, interval
        for name, value in settings.items():
            self._writer.add_text(name, redact(str(value)), global_step=step)

    def record(self, report: StepReport, validation: float | None) -> None:
        if report.step % self.interval and validation is None:
            return
        for scalar in scalars(report, validation, self.choices):
            position = report.consumed_samples if scalar.over_samples else report.step
            self._writer.add_scalar(scalar.name, scalar.value, position)
        self._writer.flush()

    def evaluated(self, step: int, losses: Mapping[str, float]) -> None:
        for scalar in evaluation_scalars(losses, self.choices):
            self._writer.add_scalar(scalar.name, scalar.value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


@dataclass(frozen=True)
class WandbDestination:
    """Destination of a Weights & Biases run. `folder`: for wandb's own files."""

    project: str
    name: str
    entity: str | None
    folder: Path


@contextmanager
def _redacted_arguments() -> Iterator[None]:
    """Context manager that hides secrets of the command line from `wandb.init`, which uploads `sys.argv`."""
    original = sys.argv
    sys.argv = [redact(word) for word in original]
    try:
        yield
    finally:
        sys.argv = original


class WeightsAndBiases(Recorder):
    """Logs to Weights & Biases."""

    def __init__(
        self, place: WandbDestination, settings: Mapping[str, Any], choices: OptionalScalars, interval: int
    ) -> None:
        """Online or offline mode is set by wandb's own means (WANDB_MODE, `wandb login`)."""
        try:
            import wandb
        except ImportError:
            raise UserError("--wandb-project needs the wandb package: pip install wandb") from None
        place.folder.mkdir(parents=True, exist_ok=True)
        try:
            with _redacted_arguments():
                self._run = wandb.init(
                    dir=os.fspath(place.folder),
                    name=redact(place.name),
                    project=place.project,
                    entity=place.entity,
                    config=dict(settings),
                )
        except wandb.errors.Error as error:
            reason = str(error).strip().rstrip(".").splitlines()[0]
            raise RecorderUnavailable(
                f"it did not start: {reason}; log in with `wandb login`, or keep the run on this machine with WANDB_MODE=offline"
            ) from None
        self.choices, self.interval = choices, interval

    def record(self, report: StepReport, validation: float | None) -> None:
        if report.step % self.interval and validation is None:
            return
        # The x axis is the step. Consumed samples are logged as a metric, which can be selected as x axis.
        values = {s.name: s.value for s in scalars(report, validation, self.choices) if not s.over_samples}
        self._run.log({**values, "samples vs steps": report.consumed_samples}, step=report.step)

    def evaluated(self, step: int, losses: Mapping[str, float]) -> None:
        if values := {scalar.name: scalar.value for scalar in evaluation_scalars(losses, self.choices)}:
            self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()

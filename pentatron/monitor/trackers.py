"""Recorders for TensorBoard and Weights & Biases, with Megatron-LM's names of metrics."""

import contextlib
import os
import sys
from collections.abc import Mapping
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


# Name and value to plot, and whether it is plotted over consumed samples instead of steps.
Scalar = tuple[str, float, bool]


def scalars(report: StepReport, validation: float | None, choices: OptionalScalars) -> list[Scalar]:
    """Returns the metrics of a step in the order of Megatron-LM's writer."""
    # The learning rate of the next step, as in the log and in Megatron-LM.
    over_both = {"learning-rate": report.next_learning_rate, "batch-size": float(report.global_batch_size)}
    if not report.is_skipped:
        over_both |= {"lm loss": report.loss, **report.reported}
        over_both |= report.experts.by_name() if report.experts else {}
    over_both |= {"loss-scale": report.loss_scale, "grad-norm": report.gradient_norm}
    memory = {"mem-max-allocated-bytes": float(report.memory_bytes), **report.memory}
    times = {"throughput": report.teraflops_per_device, "iteration-time": report.seconds}
    over_steps = {
        **({"skipped-train-samples": float(report.skipped_samples)} if report.skipped_samples else {}),
        **({} if choices.world_size is None else {"world-size": float(choices.world_size)}),
        **(memory if choices.memory else {}),
        **(times if choices.timers else {}),
        "tokens-per-second": report.tokens_per_second,
    }
    losses = {} if validation is None else {"validation": validation}
    return [
        *_over_steps_and_samples(over_both),
        *((name, value, False) for name, value in over_steps.items()),
        *_over_steps_and_samples(evaluation_scalars(losses, choices)),
    ]


def evaluation_scalars(losses: Mapping[str, float], choices: OptionalScalars) -> dict[str, float]:
    """Returns evaluated losses, and their perplexities."""
    values = {f"lm loss {name}": loss for name, loss in losses.items()}
    return values | {f"{name} ppl": perplexity(loss) for name, loss in values.items() if choices.perplexity}


def _over_steps_and_samples(values: Mapping[str, float]) -> list[Scalar]:
    return [
        scalar
        for name, value in values.items()
        for scalar in ((name, value, False), (f"{name} vs samples", value, True))
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
            package = "the tensorboard package: pip install tensorboard"
            raise UserError(f"--tensorboard-dir needs {package}") from None
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
        for name, value, over_samples in scalars(report, validation, self.choices):
            self._writer.add_scalar(name, value, report.consumed_samples if over_samples else report.step)
        self._writer.flush()

    def evaluated(self, step: int, losses: Mapping[str, float]) -> None:
        for name, value in evaluation_scalars(losses, self.choices).items():
            self._writer.add_scalar(name, value, step)
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
        # `wandb.init` uploads `sys.argv`, which may contain secrets.
        words = sys.argv
        sys.argv = list(map(redact, words))
        try:
            about: dict[str, Any] = {"name": redact(place.name), "config": dict(settings)}
            folder = os.fspath(place.folder)
            self._run = wandb.init(project=place.project, entity=place.entity, dir=folder, **about)
        except wandb.errors.Error as error:
            reason = str(error).strip().rstrip(".").splitlines()[0]
            ways = "log in with `wandb login`, or keep the run on this machine with WANDB_MODE=offline"
            raise RecorderUnavailable(f"it did not start: {reason}; {ways}") from None
        finally:
            sys.argv = words
        self.choices, self.interval = choices, interval

    def record(self, report: StepReport, validation: float | None) -> None:
        if report.step % self.interval and validation is None:
            return
        # The x axis is the step. Consumed samples are logged as a metric, which can be selected as x axis.
        metrics = scalars(report, validation, self.choices)
        values = {name: value for name, value, over_samples in metrics if not over_samples}
        self._run.log({**values, "samples vs steps": report.consumed_samples}, step=report.step)

    def evaluated(self, step: int, losses: Mapping[str, float]) -> None:
        if losses:
            self._run.log(evaluation_scalars(losses, self.choices), step=step)

    def close(self) -> None:
        self._run.finish()

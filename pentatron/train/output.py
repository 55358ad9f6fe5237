"""Output of a run: terminal, log file and recorders (metrics, TensorBoard, Weights & Biases)."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pentatron.checkpoint.state import TrainState
from pentatron.errors import UserError
from pentatron.monitor.display import Display
from pentatron.monitor.metrics import MetricsFile
from pentatron.monitor.recorder import (
    AppendedFile,
    PerformanceSummary,
    ProgressFile,
    Recorder,
    TolerantRecorder,
)
from pentatron.monitor.report import LogLines, StepReport
from pentatron.monitor.terminal import output_error
from pentatron.monitor.trackers import OptionalScalars, TensorBoard, WandbDestination, WeightsAndBiases
from pentatron.parallel.world import World
from pentatron.settings.run_config import RunConfig
from pentatron.text import printable_without_secrets
from pentatron.train.run_folder import RunFolder

_TERMINAL = "the terminal"


def refuse_pipes(*files: Path) -> None:
    """Raises an error for FIFOs: opening one for writing blocks until a reader opens it."""
    for file in files:
        if file.is_fifo():
            raise UserError(f"{file} is a FIFO, but a run writes its records to regular files; remove it")


@dataclass(frozen=True)
class Output:
    """Writes to the terminal, the log and the recorders. On other ranks than the first it writes nothing.

    `echoes`: the terminal shows the lines of the log instead of a short form. `may_write`: whether the run
    still holds the lock of its folder; if not, no file is written.
    """

    display: Display
    log: AppendedFile | None = None
    recorders: Sequence[Recorder] = ()
    lines: LogLines | None = None
    echoes: bool = False
    # Names of outputs that could not be written, to warn once of each.
    missing: list[str] = field(default_factory=list)
    may_write: Callable[[], bool] = lambda: True

    def say(self, text: str) -> None:
        self.display.say(text)
        self._write(text)

    def note(self, text: str | None) -> None:
        """Writes a line, if there is one, to the log, and to the terminal if that shows the log."""
        if text is None:
            return
        if self.echoes:
            self.display.say(text)
        self._write(text)

    def _write(self, text: str) -> None:
        if (log := self.log) is None:
            return
        if _TERMINAL not in self.missing and (lost := output_error()) is not None:
            self.missing.append(_TERMINAL)
            text = f"warning: standard output cannot be written any more ({lost.strerror}); this log has every line\n{text}"
        self.attempt("train.log", lambda: log.write(f"{printable_without_secrets(text)}\n"))

    def attempt(
        self, what: str, write: Callable[[], object], else_: str = "training continues; lines will be missing"
    ) -> None:
        """Writes a file; warns once instead of failing, as on a full disk. `else_`: the consequence."""
        if not self.may_write():
            return
        try:
            write()
        except OSError as error:
            if what not in self.missing:
                self.missing.append(what)
                self.display.say(f"warning: {what} cannot be written ({error.strerror or error}); {else_}")

    def _recorded(self, write: Callable[[Recorder], None]) -> None:
        for recorder in self.recorders:
            self.attempt(recorder.name, partial(write, recorder))

    def step(self, report: StepReport, eta_seconds: float) -> None:
        self.display.step(report, eta_seconds)
        self.note(self.lines.after(report, datetime.now()) if self.lines else None)

    def record(self, report: StepReport, validation: float | None) -> None:
        self._recorded(lambda recorder: recorder.record(report, validation))

    def left_out(self, step: int, consumed_samples: int, text: str) -> None:
        self.say(text)
        self._recorded(lambda recorder: recorder.left_out(step, consumed_samples))

    def evaluated(self, step: int, losses: Mapping[str, float]) -> None:
        self._recorded(lambda recorder: recorder.evaluated(step, losses))

    def saved(self, step: int, text: str) -> None:
        self.note(text)
        self._recorded(lambda recorder: recorder.saved(step))

    def close(self) -> None:
        """Closes log and recorders, ignoring errors."""
        if not self.may_write():
            return
        opened: list[Recorder | AppendedFile] = [*self.recorders, *([self.log] if self.log else [])]
        for one in opened:
            with contextlib.suppress(OSError):
                one.close()


def open_recorders(
    config: RunConfig,
    world: World,
    folder: RunFolder,
    state: TrainState,
    parameters: int,
    tell: Callable[[str], None],
) -> Iterator[Recorder]:
    """Yields the configured recorders one by one, so that the caller can close the open ones if one fails.

    A failure of TensorBoard or Weights & Biases is a warning.
    """
    log, interval = config.log, config.log.tensorboard_log_interval
    yield MetricsFile(folder.metrics, state.step, tell)
    choices = OptionalScalars(
        timers=log.log_timers_to_tensorboard,
        memory=log.log_memory_to_tensorboard,
        world_size=world.all_ranks.size if log.log_world_size_to_tensorboard else None,
        perplexity=log.log_validation_ppl_to_tensorboard,
    )
    if log.tensorboard_dir is not None:
        events = Path(log.tensorboard_dir)
        board = partial(TensorBoard, events, config.flat(), choices, interval, state.step)
        yield TolerantRecorder(f"TensorBoard in {events}", board, tell)
    if log.wandb_project is not None:
        name, entity = log.wandb_exp_name or folder.path.name, log.wandb_entity
        saved_to = Path(log.wandb_save_dir) if log.wandb_save_dir else folder.path / "wandb"
        place = WandbDestination(project=log.wandb_project, name=name, entity=entity, folder=saved_to)
        biases = partial(WeightsAndBiases, place, config.nested(), choices, interval)
        yield TolerantRecorder("Weights & Biases", biases, tell)
    if log.log_progress:
        path, job = Path(config.checkpoint.save) / "progress.txt", config.launch.job_id or ""
        yield ProgressFile(path, job, world.all_ranks.size, state.flops, state.consumed_tokens)
    if log.save_performance_summary:
        properties = _run_properties(config, world, parameters)
        yield PerformanceSummary(folder.path / "performance_summary.json", properties)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _run_properties(config: RunConfig, world: World, parameters: int) -> dict[str, Any]:
    grid = config.grid
    return {
        "parameters": parameters,
        "device": device_name(world.device),
        "torch": torch.__version__,
        "world_size": grid.world_size,
        "tensor_parallel": grid.tensor,
        "pipeline_parallel": grid.pipeline,
        "context_parallel": grid.context,
        "expert_parallel": config.parallel.expert_model_parallel_size,
        "data_parallel": grid.data,
        "precision": config.precision.name,
        "micro_batch_size": config.train.micro_batch_size,
        "global_batch_size": config.train.global_batch_size,
        "sequence_length": config.model.seq_length,
    }

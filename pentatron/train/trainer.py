"""The training loop."""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from pentatron.checkpoint.state import TrainState
from pentatron.data.loader import Batch
from pentatron.data.open_data import Datasets
from pentatron.errors import AgreedError, NonFiniteError
from pentatron.models.router_load import ExpertLoad
from pentatron.monitor.memory import memory_bytes, memory_scalars
from pentatron.monitor.report import ExpertReport, StepReport
from pentatron.optim.build import AnyOptimizer
from pentatron.optim.loss_scale import LossScaler
from pentatron.settings.model_sizes import step_flops
from pentatron.train.batches import micro_batches, next_step_batches
from pentatron.train.checkpoints import Checkpoints
from pentatron.train.evaluation import Evaluation
from pentatron.train.health import NumericsCheck
from pentatron.train.lr_schedule import OptimizerSchedule
from pentatron.train.model import ParallelModel, peak_teraflops
from pentatron.train.output import Output
from pentatron.train.run_header import log_memory, merge_messages
from pentatron.train.step import StepResult, train_step
from pentatron.train.step_hooks import StepHooks
from pentatron.train.stop import StopConditions, StopReason
from pentatron.train.stragglers import RankStatistics, StragglerDetector

# Steps over which the remaining time is estimated.
_SPEED_WINDOW = 20
_EVALUATE_TIMER = "evaluate"


@dataclass(eq=False)
class Trainer:
    """Runs the steps, evaluations and saves of a run until its last step or a stop condition."""

    model: ParallelModel
    optimizer: AnyOptimizer
    datasets: Datasets
    state: TrainState
    output: Output
    endings: StopConditions
    hooks: StepHooks
    checkpoints: Checkpoints

    def __post_init__(self) -> None:
        model, state, output, world = self.model, self.state, self.output, self.model.world
        self.config, self.timers = model.config, model.timers
        self.world, self.status = world, world.status
        self.health = NumericsCheck(model, self.optimizer, state, output)
        self.evaluation = Evaluation(model, self.datasets, state, output, self.endings)
        self.total_steps, self.plan = self.config.train.train_iters, self.config.batch_plan
        # Global batch size of the current step.
        self.batch_size = self.plan.size_at(state.consumed_samples)
        saved = state.schedule
        self.schedule = OptimizerSchedule.from_json(saved) if saved else OptimizerSchedule.of(self.config)
        self.scaler = LossScaler(self.config.precision, state.loss_scaling)
        self.ranks = RankStatistics(self.config, world, self.total_steps)
        self.stragglers = StragglerDetector(world.grid)
        # Samples and seconds of the last steps.
        self._recent: list[tuple[int, float]] = []
        self._peak_teraflops = peak_teraflops(self.config, world.device)
        # Steps since times were logged.
        self._timed_steps = 0
        self._first_step = state.step

    def run(self) -> StopReason | None:
        """Trains to the last step, saves and evaluates. Returns why it stopped early, if it did."""
        with self._finishing_save():
            if self.config.train.skip_train:
                self.output.say("skipping training (--skip-train is on) ...")
                return self._evaluate_at_the_end()
            is_done = self.state.step >= self.total_steps
            ending = self._train()
            if ending is None:
                self.save()
                ending = None if is_done else self._evaluate_at_the_end()
            return ending

    def train(self) -> StopReason | None:
        """Runs the loop without a final evaluation or save."""
        with self._finishing_save():
            return self._train()

    @contextlib.contextmanager
    def _finishing_save(self) -> Iterator[None]:
        """Waits for a background save at the end, also if all ranks end with the same error."""
        try:
            yield
        except AgreedError as error:
            self.checkpoints.commit_pending_after_error(error)
            raise
        self._report_compile_fallbacks()
        self.checkpoints.commit_pending(wait=True)

    def _train(self) -> StopReason | None:
        batches = micro_batches(self.config, self.world, self.datasets.train, self.state.consumed_samples)
        self.status.begin_at(self.state.step)
        self.status.phase = "step"
        while self.state.step < self.total_steps:
            self.ranks.begin(self.state.step + 1)
            started = time.perf_counter()
            self.hooks.before(self.state.step + 1)
            self.update_batch_size()
            count = self.config.accumulation_of(self.batch_size)
            with self.timers("batch-generator", 2), self.status.doing("reading data"):
                stop, guard = self.endings.stop, self.checkpoints.store.guard
                step_batches, stopped_by = next_step_batches(batches, count, stop, self.world, guard)
            if stopped_by is not None:
                if self.state.step != self._first_step:
                    self.save()
                return self.endings.by_signal(stopped_by)
            if self.state.step + 1 in self.config.loop.iterations_to_skip:
                self._skip_step()
            else:
                self._step(step_batches, started)
            self.hooks.after(self.state.step)
            self.checkpoints.commit_pending()
            if self.state.step % self.config.checkpoint.save_interval == 0:
                with self.status.doing("saving"):
                    self.checkpoints.save_or_warn()
            ending = self.endings.after_step(self.state.step) if self.state.step < self.total_steps else None
            if ending is not None:
                self.save()
                return ending
        return None

    def _step(self, batches: Sequence[Batch], started: float) -> None:
        """Runs one step, then reports it to the terminal, the log and the recorders."""
        result, rate = self.advance(batches)
        report = self._report(result, rate, time.perf_counter() - started)
        self.state.flops += report.flops
        self.status.step_done(self.state.step, report.seconds)
        self.output.step(report, self._seconds_left())
        if report.ranks is not None and len(self._recent) > 1:
            for line in self.stragglers.check(self.state.step, report.ranks):
                self.output.say(line)
        self._timed_steps += 1
        if self.state.step % self.config.log.log_interval == 0:
            self.output.note(self.timers.block(self.world.all_ranks, self._timed_steps))
            self._timed_steps = 0
        if len(self._recent) == 1:
            log_memory(self.world, self.state.step, self.output)
            # The first step may compile and connect for minutes; later steps have a shorter timeout.
            timeout = self.config.launch.distributed_timeout_seconds_after_init
            if timeout is not None:
                self.world.set_timeout(timeout, self.model.executor.messages.channels.values())
        for line in (*self.model.compilation.time_lines(report.seconds), *self.model.recording.pop_lines()):
            self.output.say(line)
        # All ranks decide alike: the gathered report has the number of unreported messages of each rank.
        if self.world.all_ranks.size == 1 or (
            report.ranks is not None and any(report.ranks.pending_messages)
        ):
            self._report_compile_fallbacks()
        self.output.record(report, self._validate_if_due())

    def _report_compile_fallbacks(self) -> None:
        """Logs which functions torch runs uncompiled, on any rank. Collective."""
        for line in merge_messages(self.model.compilation.unreported_fallbacks(), self.world):
            self.output.say(line)
        self.model.compilation.mark_reported()

    def advance(self, batches: Sequence[Batch]) -> tuple[StepResult, float]:
        """Runs one step with this rank's micro-batches. Returns its result and its learning rate."""
        rate = self.schedule.learning_rate(self.state.scheduled_samples)
        decay = self.schedule.weight_decay(self.state.scheduled_samples)
        self.health.before_step()
        step, scale = self.state.step, self.scaler.scale
        result = train_step(self.model, self.optimizer, batches, rate, step, scale, decay)
        self._finish_update(result, batches)
        self._count_step()
        self.state.consumed_tokens += result.tokens
        return result, rate

    def _skip_step(self) -> None:
        """Skips a step of --iterations-to-skip. Its samples count as consumed."""
        self._count_step()
        self.state.count_skipped(is_nan=False)
        self.state.skipped_samples += self.batch_size
        self.status.step_done(self.state.step, 0.0)
        step, size = self.state.step, self.batch_size
        line = f"step {step} is skipped (--iterations-to-skip); its {size} samples count as consumed"
        self.output.left_out(step, self.state.consumed_samples, line)

    def update_batch_size(self) -> None:
        """Sets the global batch size of the next step."""
        before, self.batch_size = self.batch_size, self.plan.size_at(self.state.consumed_samples)
        if before != self.batch_size:
            self.output.note(
                f"  the global batch size changes from {before} to {self.batch_size} after iteration {self.state.step}"
            )

    def _count_step(self) -> None:
        self.state.step += 1
        before = self.state.consumed_samples
        self.state.consumed_samples += self.batch_size
        for name, count in self.datasets.drawn(before, self.state.consumed_samples).items():
            self.state.drawn[name] = self.state.drawn.get(name, 0) + count

    def save(self) -> None:
        """Saves this step, or starts a background save, unless it is saved already."""
        with self.status.doing("saving"):
            self.checkpoints.save()

    def _finish_update(self, result: StepResult, batches: Sequence[Batch]) -> None:
        """Updates the loss scale and counts the update or the skipped step; NaN/inf may end the run.

        With a dynamic loss scale overflows are expected: they lower the scale.
        """
        scale = self.scaler.scale
        self.scaler.update(result.updated)
        self.state.loss_scaling = self.scaler.state()
        if result.updated:
            self.health.watch(result)
            self.state.count_update(self.batch_size)
        elif self.scaler.cannot_recover:
            raise AgreedError(
                f"step {self.state.step + 1}: fp16 overflows at every loss scale (now {self.scaler.scale:g}), so no "
                f"update is possible. Lower --lr, use --bf16, or check the data; {self.checkpoints.last}"
            )
        elif self.scaler.is_dynamic or not self.config.loop.check_for_nan_in_loss_and_grad:
            self.state.count_skipped(not math.isfinite(result.loss))
        else:
            self._stop_for_nan(result, batches, scale)

    def _stop_for_nan(self, result: StepResult, batches: Sequence[Batch], scale: float) -> NoReturn:
        """Raises the diagnosis of NaN/inf.

        If repeating the step gives NaN/inf again, the state before it is sound and is saved first. A machine
        with transient faults saves nothing.
        """
        problem = self.health.diagnose(result, batches, scale, self.checkpoints.last)
        if problem.exit_code == NonFiniteError.REPRODUCIBLE and self.state.step:
            self.health.restore_rng()
            self.save()
        raise problem

    def _validate_if_due(self) -> float | None:
        interval = self.config.train.eval_interval
        if not interval or self.state.step % interval:
            return None
        timer = self.timers(_EVALUATE_TIMER, 0)
        with timer, self.status.doing("evaluating"), self.hooks.around_evaluation():
            loss = self.evaluation.validate(f"iteration {self.state.step}")
        self.output.note(self.timers.block(self.world.all_ranks, only=_EVALUATE_TIMER))
        return loss

    def _evaluate_at_the_end(self) -> StopReason | None:
        """Evaluates on the validation and the test set."""
        with self.status.doing("evaluating"):
            losses = self.evaluation.after_training()
        if not self.config.train.skip_train:
            self.output.evaluated(self.state.step, losses)
        elif not losses:
            missing = "no validation and no test samples (--eval-iters, --split)"
            self.output.say(f"there is nothing to evaluate on: {missing}")
        return self.evaluation.ended_by

    def _report(self, result: StepResult, rate: float, seconds: float) -> StepReport:
        self._recent = [*self._recent[1 - _SPEED_WINDOW :], (self.batch_size, seconds)]
        config, fallbacks = self.config, len(self.model.compilation.unreported_fallbacks())
        return StepReport(
            step=self.state.step,
            total_steps=self.total_steps,
            loss=result.loss,
            learning_rate=rate,
            next_learning_rate=self.schedule.learning_rate(self.state.scheduled_samples),
            gradient_norm=result.gradient_norm,
            tokens=result.tokens,
            consumed_samples=self.state.consumed_samples,
            global_batch_size=self.batch_size,
            seconds=seconds,
            memory_bytes=memory_bytes(self.world.device),
            flops=step_flops(config.model, self.batch_size, config.model.seq_length, config.moe),
            devices=self.world.all_ranks.size,
            consumed_tokens=self.state.consumed_tokens,
            skipped_samples=self.state.skipped_samples,
            peak_teraflops=self._peak_teraflops,
            memory=memory_scalars(self.world.device) if config.log.log_memory_to_tensorboard else {},
            reported=result.reported,
            experts=self._expert_report(result.experts),
            ranks=self.ranks.report(self.state.step, seconds, fallbacks),
            loss_scale=self.scaler.scale,
            is_skipped=not result.updated,
            is_nan=not result.updated and not math.isfinite(result.loss),
        )

    def _expert_report(self, load: ExpertLoad | None) -> ExpertReport | None:
        if load is None:
            return None
        counts = load.counts.long().tolist() if self.config.moe.moe_per_layer_logging else ()
        return ExpertReport(load.losses, load.imbalance, load.idle, dict(zip(load.layers, counts)))

    def _seconds_left(self) -> float:
        """Estimates the remaining time by samples, as a batch size ramp-up makes steps longer."""
        samples, seconds = (sum(numbers) for numbers in zip(*self._recent))
        end = self.plan.advance(self.state.consumed_samples, self.total_steps - self.state.step)
        return (end - self.state.consumed_samples) * seconds / samples

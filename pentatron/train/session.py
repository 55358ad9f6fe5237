"""Lifecycle of a run on this rank: run folder, data, model and optimizer, training loop, results."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypedDict, TypeVar, Unpack

from pentatron.checkpoint.state import TrainState
from pentatron.data.open_data import OpenedData, build_datasets, resolve_epochs
from pentatron.interchange.store import create_store
from pentatron.monitor.display import Display, SilentDisplay, open_display
from pentatron.monitor.memory import MemorySampler
from pentatron.monitor.recorder import AppendedFile, Recorder
from pentatron.monitor.report import LogLines
from pentatron.optim.build import AnyOptimizer, build_optimizer
from pentatron.parallel.collectives import (
    broadcast_object,
    earliest_over_ranks,
    run_on_all_ranks,
    run_on_some_ranks,
)
from pentatron.parallel.timers import Timers
from pentatron.parallel.world import World
from pentatron.settings.resolve import Resolved, notices_of_device
from pentatron.settings.run_config import RunConfig
from pentatron.settings.settings import Start, how_to_resume, start_of
from pentatron.supervise.attempts import FIRST_ATTEMPT, Attempt
from pentatron.supervise.signals import StopRequest, handle_signals
from pentatron.train.checkpoints import Checkpoints, seed_generators
from pentatron.train.lr_schedule import update_schedule
from pentatron.train.model import CONFIGURED, ParallelModel, Program, build_parallel_model, model_dtype
from pentatron.train.open_folders import FolderLocks, check_disk_space, open_folders
from pentatron.train.output import Output, open_recorders, refuse_pipes
from pentatron.train.preflight import check_batch_sizes, check_start, update_environment
from pentatron.train.results import WITHOUT_IT, describe_pipeline, describe_run, print_summary, write_loss_svg
from pentatron.train.resume import StartPoint, StartPointLoader, record_data, require_same_data
from pentatron.train.run_folder import AppMetrics, ErrorMessage, RunFolder, error_message, log_failure
from pentatron.train.run_header import log_run_header
from pentatron.train.step_hooks import StepHooks
from pentatron.train.stop import StopConditions, StopReason
from pentatron.train.trainer import Trainer

T = TypeVar("T")


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended. `ending`: why it stopped before its last step, if it did; equal on all ranks."""

    folder: RunFolder
    ending: StopReason | None


class SessionOptions(TypedDict, total=False):
    """Options of a run with defaults.

    `launcher`: process ID of the launcher; the run stops if it dies. `started`: start time of this process,
    in seconds since the epoch. `sentence`: returns the log message for an error that ends the run. `attempt`:
    which start of its job this is.
    """

    launcher: int | None
    program: Program
    started: float | None
    sentence: ErrorMessage
    attempt: Attempt


def run_training(
    resolved: Resolved, world: World, resumes: bool, **options: Unpack[SessionOptions]
) -> RunOutcome:
    """Runs the configured training on this rank.

    `resumes`: whether the command resumes the run in its folder by default.
    """
    with open_session(resolved, world, resumes, **options) as session:
        session.set_up()
        return session.conclude(session.trainer.run())


@contextlib.contextmanager
def open_session(
    resolved: Resolved, world: World, resumes: bool, **options: Unpack[SessionOptions]
) -> "Iterator[Session]":
    """Opens a run and holds the locks of its folders until the end of the block. See `run_training`."""
    config, given_load = resolved.config, resolved.given("load")
    program, attempt = options.get("program", CONFIGURED), options.get("attempt", FIRST_ATTEMPT)
    folder = RunFolder(Path(config.run.run_dir))
    # Broadcast from the first rank: launchers on other machines may count restarts differently.
    start = start_of(config.settings, given_load, resumes or attempt.restarted)
    start = Start(broadcast_object(start.value, world.all_ranks))
    display: Display = SilentDisplay()
    if world.is_first:
        display = open_display(config.log.progress_bar, shows_steps=config.log.console_lines == "short")
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(display.close)
        stop = StopRequest(options.get("launcher"), prints_notice=world.is_first)
        cleanup.enter_context(handle_signals(stop))
        stop.is_starting = True
        open_and_lock = partial(open_folders, config, folder, start, attempt, display, cleanup)
        folders = run_on_some_ranks(world.is_first, open_and_lock, world.all_ranks) or FolderLocks()
        world.status.run_folder_locked()
        started = earliest_over_ranks(options.get("started") or time.time(), world.all_ranks)
        try:
            resolved = resolve_epochs(resolved, world, folder.data, display, not program.reads_named_data)
            cleanup.enter_context(program.running(resolved, world, display))
            session = Session(
                resolved, world, folder, display, stop, started, cleanup, program, start, folders, attempt
            )
            session.repeated_start = start_of(config.settings, given_load, resumes)
            yield session
            session.on_exit()
        except BaseException as error:
            stop.is_starting = False
            if folders.are_held():
                log_failure(folder, world, error, options.get("sentence", error_message))
            raise


@dataclass(eq=False)
class Session:
    """A run on this rank. Call `set_up`, or its three steps, run the trainer, then `conclude`.

    `repeated_start`: how the same command starts if it is repeated after this run. `on_exit` is called at the
    end of the `open_session` block.
    """

    resolved: Resolved
    world: World
    folder: RunFolder
    display: Display
    stop: StopRequest
    started: float
    cleanup: contextlib.ExitStack
    program: Program
    start: Start
    folders: FolderLocks
    attempt: Attempt
    repeated_start: Start = field(init=False)
    data: OpenedData | None = None
    start_point: StartPoint | None = None
    on_exit: Callable[[], None] = lambda: None
    model: ParallelModel = field(init=False)
    optimizer: AnyOptimizer = field(init=False)
    trainer: Trainer = field(init=False)

    def __post_init__(self) -> None:
        self.config, self.initialized = self.resolved.config, time.time()
        self.app_metrics = AppMetrics(self.started)
        began = time.monotonic() - (self.initialized - self.started)
        self.job_started = began if self.attempt.began is None else self.attempt.began
        # Timers of the setup. The loop has its own.
        self.timers = Timers(0, self.config.loop.timing_log_option, self.world.device)
        for notice in self.resolved.notices:
            self.display.say(f"note: {notice}")
        check_start(self.resolved, self.world)
        seed_generators(self.config.run.seed + self.world.all_ranks.rank)

    def set_up(self) -> None:
        """Opens the data, builds model and optimizer, and prepares the loop."""
        self.open_data()
        self.build()
        self.prepare()

    def open_data(self) -> None:
        """Opens the data: before the model is built, or after it if the program names its data only then."""
        self.world.status.phase = "opening the data"
        given = (self.config, self.world, self.folder.data, self.display)
        self.data = data = run_on_all_ranks(partial(self.program.open_data, *given), self.world.all_ranks)
        if (begin := self.start_point) is None:
            return
        if (origin := begin.resumed_from) is None:
            record_data(begin.state, data)
        else:
            compare = partial(require_same_data, begin.state, data, origin, self.config.checkpoint)
            begin.notes.extend(run_on_all_ranks(compare, self.world.all_ranks))

    def build(self) -> None:
        """Builds model and optimizer, and loads the state that the run starts from."""
        config, world = self.config, self.world
        world.status.phase = "building the model"
        with self.timers("model-and-optimizer-setup", 0):
            self.app_metrics.mark("model_init_start")
            self.model = build_parallel_model(config, world, self.program)
            self.program.set_timers(self.model.timers)
            self.app_metrics.mark("model_init_finish")
            self.app_metrics.mark("build_optimizer_start")
            options, dtype = self.model.decisions.optimizer, model_dtype(config)
            self.optimizer = build_optimizer(self.model.stages, world, config.optim, options, dtype)
            self.app_metrics.mark("build_optimizer_finish")
            self.store = create_store(config)
            self.store.guard = self.folders.require
            loader = StartPointLoader(
                self.resolved, world, self.model, self.optimizer, self.store, self.data, self.start
            )
            self.start_point = loader.load()
            self.state, notes = self.start_point.state, self.start_point.notes
            check_batch_sizes(config, self.state)
            notes += update_schedule(config, self.state)
            notes += update_environment(world, self.state)
            notes += check_disk_space(self.model, self.optimizer, self.store, self.state)
            self.program.begins(self.state)

    def prepare(self) -> None:
        """Builds the datasets, opens the output, logs the head of the run, and creates the trainer."""
        config, world, data, start_point = self.config, self.world, self.data, self.start_point
        assert data is not None and start_point is not None, "opened and built before"
        parameters = self.model.count_parameters()
        self.app_metrics.mark("build_dataiters_start")
        with self.timers("train/valid/test-data-iterators-setup", 0):
            given = (config, world, self.state, self.folder.data, self.display)
            datasets = run_on_all_ranks(partial(build_datasets, data, *given), self.world.all_ranks)
        self.app_metrics.mark("build_dataiters_finish")
        open_output = partial(self._open_output, parameters, start_point)
        self.output = output = run_on_all_ranks(open_output, world.all_ranks)
        output.note(f"time to initialize (seconds): {self.initialized - self.started:.3f}")
        log_run_header(self.model, output)
        output.say(describe_run(config, world, parameters))
        if pipeline := describe_pipeline(config):
            output.say(pipeline)
        notes = [*notices_of_device(self.resolved, self.model.decisions), *_profile_notes(config, self.state)]
        for note in (*notes, *start_point.notes):
            output.say(f"note: {note}")
        for remark in start_point.remarks:
            output.note(remark)
        _log_position(config, start_point, output)
        model, optimizer, state = self.model, self.optimizer, self.state
        hooks = StepHooks(config, model.decisions, world, optimizer, self.folder.path, output)
        self.cleanup.callback(hooks.close)
        endings = StopConditions(config, world, self.stop, self.job_started)
        saved = state.step if start_point.is_saved else None
        checkpoints = Checkpoints(model, optimizer, self.store, state, output, saved)
        self.trainer = Trainer(model, optimizer, datasets, state, output, endings, hooks, checkpoints)
        self.on_exit = self.trainer.checkpoints.finish_on_exit
        self.stop.is_starting = False
        output.note("done with setup ...")
        output.note(self.timers.block(world.all_ranks) or "")

    def conclude(self, ending: StopReason | None) -> RunOutcome:
        """Writes loss curve, summary and sample after the last step of this process."""
        self.world.status.phase = "ending"
        self.app_metrics.mark("train_loop_finish")
        datasets, output = self.trainer.datasets, self.output
        if len(datasets.names) > 1:
            drawn = ", ".join(f"{count} from {name}" for name, count in self.state.drawn.items())
            output.say(f"samples so far: {drawn}")
        if self.world.is_first:
            if not self.config.train.skip_train:
                output.attempt("loss.svg", lambda: write_loss_svg(self.folder), WITHOUT_IT)
            if ending is not None:
                output.note(ending.line)
                output.say(_farewell(ending, self.state, self.config, self.repeated_start))
            elif not self.config.train.skip_train:
                print_summary(self.config, self.folder, datasets, output)
            self.app_metrics.mark("finish")
            if not self.config.train.skip_train:
                write = partial(self.app_metrics.write, self.folder.app_metrics)
                output.attempt("app_metrics.json", write, WITHOUT_IT)
        return RunOutcome(self.folder, ending)

    def _open_output(self, parameters: int, start_point: StartPoint) -> Output:
        config, world, folder, display = self.config, self.world, self.folder, self.display
        if config.log.monitor_memory_continuously:
            samples = folder.path / "memory" / f"rank-{world.all_ranks.rank:05d}.csv"
            interval = config.log.memory_monitor_interval
            self.cleanup.callback(MemorySampler(samples, world.device, interval, display.say).close)
        if not world.is_first:
            return Output(display)
        refuse_pipes(folder.log, folder.metrics)
        # If the log is deleted during the run, the warning goes to the terminal and to the new log.
        log = AppendedFile(folder.log, lambda text: output.say(text))
        echoes = config.log.console_lines == "megatron"
        recorders: list[Recorder] = []
        lines = LogLines(config.log.log_interval, config.log.log_throughput)
        output = Output(display, log, recorders, lines, echoes, may_write=self.folders.are_held)
        self.cleanup.callback(output.close)
        if config.train.skip_train:
            # An evaluation does not change the configuration and the metrics of the run.
            return output
        if start_point.replaces_training:
            folder.set_metrics_aside()
        elif start_point.state.step == 0 and folder.holds_metrics_of_another(self.resolved):
            display.say(
                f"note: another run was in {folder.path} and left no checkpoint to resume from; its metrics were moved to "
                f"{folder.set_metrics_aside()}, and this run appends to its log; use another --run-dir to keep runs separate"
            )
        folder.write_config(self.resolved)
        # One by one, so that the open ones are closed if a later one fails.
        for recorder in open_recorders(config, world, folder, self.state, parameters, output.say):
            recorders.append(recorder)
        return output


def _profile_notes(config: RunConfig, state: TrainState) -> list[str]:
    if not config.log.profile or state.step <= config.log.profile_step_start:
        return []
    return [
        f"--profile: the run resumes after step {state.step}, beyond --profile-step-start {config.log.profile_step_start}, so nothing is "
        f"profiled"
    ]


def _log_position(config: RunConfig, start_point: StartPoint, output: Output) -> None:
    """Logs from which step the run resumes, or that no steps are left."""
    state = start_point.state
    if config.train.skip_train:
        return
    last = config.train.train_iters
    if last == 0:
        output.say("--train-iters 0: no training; the loaded weights are saved")
    elif state.step >= last:
        either = "--epochs or --train-iters, whichever ended it,"
        limit = "--train-iters" if config.train.epochs is None else either
        output.say(
            f"this run has finished its {state.step} steps: nothing is left to train. Raise {limit} to continue, "
            f"give --fresh to start over, or --run-dir for another run"
            if start_point.is_saved
            else f"{config.checkpoint.load} is at step {state.step} and --train-iters is {last}: nothing is left to train. "
            f"Raise {limit} to continue, or load the weights alone and begin at step 0 with --finetune"
        )
    elif state.step:
        output.say(f"resuming at step {state.step} of {last}")


def _farewell(ending: StopReason, state: TrainState, config: RunConfig, repeated_start: Start) -> str:
    if config.train.skip_train:
        return f"{ending.reason} before the evaluation was done"
    if state.step == 0:
        return f"{ending.reason} before the first step; nothing was trained yet"
    saved = f"its checkpoint is saved, {how_to_resume(repeated_start, config.checkpoint.save)}"
    outcome = saved if config.checkpoint.save_checkpoints else "nothing is saved"
    return f"{ending.reason} after step {state.step}; {outcome}"

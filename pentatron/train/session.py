"""A run from its first line to its last: folder, data, model, loop, results."""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pentatron.checkpoint.state import TrainState
from pentatron.data.datasets import OpenedData, arrange, settle_epochs
from pentatron.interchange.store import store_for
from pentatron.monitor.display import Display, Silent, open_display
from pentatron.monitor.memory import MemorySampler
from pentatron.monitor.recorder import AppendedFile, Recorder
from pentatron.monitor.report import LogLines
from pentatron.optim.build import AnyOptimizer, build_optimizer
from pentatron.parallel.collectives import broadcast_object, earliest, on_some_ranks
from pentatron.parallel.timers import Timers
from pentatron.parallel.world import World
from pentatron.settings.resolve import Resolved, notices_of_device
from pentatron.settings.run import RunConfig
from pentatron.settings.settings import Start, how_to_go_on, start_of
from pentatron.supervise.attempts import FIRST, Attempt
from pentatron.supervise.signals import StopRequest, stop_on_signals
from pentatron.train.checkpoints import seed_generators
from pentatron.train.introduction import introduce
from pentatron.train.model import CONFIGURED, ParallelModel, Program, build_parallel_model, model_dtype
from pentatron.train.open_folders import OpenFolders, disk_notes, leave_to_earlier_runs, open_folders
from pentatron.train.output import Output, open_recorders, refuse_pipes
from pentatron.train.preflight import require_fitting_batches, require_fitting_start, settle_environment
from pentatron.train.results import WITHOUT_IT, describe, describe_pipeline, draw_curve, finish
from pentatron.train.resume import Beginning, first_data, starting_point, take_data
from pentatron.train.run_folder import Moments, RunFolder, Sentence, sentence_of, write_last_words
from pentatron.train.schedules import settle
from pentatron.train.step_hooks import BesideTheSteps
from pentatron.train.stop import Ending
from pentatron.train.trainer import Trainer

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `ending` is what ended it early, the same on every rank."""

    folder: RunFolder
    ending: Ending | None

    @property
    def stopped_by(self) -> signal.Signals | None:
        return None if self.ending is None else self.ending.signal


def run_training(
    resolved: Resolved,
    world: World,
    resumes: bool,
    launcher: int | None = None,
    program: Program = CONFIGURED,
    started: float | None = None,
    sentence: Sentence = sentence_of,
    attempt: Attempt = FIRST,
) -> Outcome:
    """Trains as configured on this rank of the world; `launcher` is the process that must live while we do.

    `resumes`: the program goes on by itself from what the run's folder holds. `started`: when this process
    began, in seconds since the epoch. `sentence`: what the log says of an error that ends the run. `attempt`:
    which start of its job this is.
    """
    with open_session(resolved, world, resumes, launcher, program, started, sentence, attempt) as session:
        session.open_data()
        session.build()
        session.prepare()
        return session.train()


@contextlib.contextmanager
def open_session(
    resolved: Resolved,
    world: World,
    resumes: bool,
    launcher: int | None,
    program: Program,
    started: float | None = None,
    sentence: Sentence = sentence_of,
    attempt: Attempt = FIRST,
) -> "Iterator[Session]":
    """A run whose folders are ours until the end of the block."""
    config = resolved.config
    folder = RunFolder(Path(config.run.run_dir))
    # The first rank decides, as a launcher may tell each machine something else.
    start = start_of(config.settings, resolved.given("load"), resumes or attempt.restarted)
    start = Start(broadcast_object(start.value, world.everyone))
    own_lines = config.log.console_lines == "short"
    display = open_display(config.log.progress_bar, shows_steps=own_lines) if world.is_first else Silent()
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(display.close)
        stop = cleanup.enter_context(stop_on_signals(launcher, tells=world.is_first))
        stop.is_starting = True

        def open_ours() -> OpenFolders:
            opened = open_folders(config, folder, start, attempt, display, cleanup)
            if start is Start.IN_PLACE and not config.train.skip_train:
                leave_to_earlier_runs(config)
            return opened

        held = on_some_ranks(world.is_first, open_ours, world.everyone) or OpenFolders()
        world.whereabouts.folder_is_ours()
        first = earliest(time.time() if started is None else started, world.everyone)
        try:
            resolved = settle_epochs(resolved, world, folder.data, display, not program.reads_named_data)
            cleanup.enter_context(program.running(resolved, world, display))
            session = Session(resolved, world, folder, display, stop, first, cleanup, program, start, held)
            if attempt.began is not None:
                session.job_began = attempt.began
            session.typed_again = start_of(config.settings, resolved.given("load"), resumes)
            yield session
            session.leave()
        except BaseException as error:
            stop.is_starting = False
            if held.are_ours():
                write_last_words(folder, world, error, sentence)
            raise


class Session:
    """A run in its parts, one after the other: what it reads, what it computes with, what it tells, and the loop."""

    model: ParallelModel
    optimizer: AnyOptimizer
    trainer: Trainer

    def __init__(
        self,
        resolved: Resolved,
        world: World,
        folder: RunFolder,
        display: Display,
        stop: StopRequest,
        started: float,
        cleanup: contextlib.ExitStack,
        program: Program,
        start: Start,
        held: OpenFolders,
    ) -> None:
        self.held = held
        self.resolved, self.config, self.world = resolved, resolved.config, world
        self.start = self.typed_again = start
        self.folder, self.display, self.stop, self.started = folder, display, stop, started
        self.cleanup, self.program = cleanup, program
        self.data: OpenedData | None = None
        self.began: Beginning | None = None
        self.leave: Callable[[], None] = lambda: None
        self.initialized, self.moments = time.time(), Moments(started)
        self.job_began = time.monotonic() - (self.initialized - started)
        # Of the start; the loop has its own.
        self.timers = Timers(0, self.config.loop.timing_log_option, world.device)
        for notice in resolved.notices:
            display.say(f"note: {notice}")
        require_fitting_start(resolved, world)
        seed_generators(self.config.run.seed + world.everyone.rank)

    def open_data(self) -> None:
        """Before the model is built; or after it, where the program names its data only then."""
        self.world.whereabouts.phase = "opening the data"
        self.data = data = self._on_every_rank(
            lambda: self.program.open_data(self.config, self.world, self.folder.data, self.display)
        )
        began, chosen = self.began, self.config.checkpoint
        if began is None:
            return
        origin = began.goes_on_from
        if origin is None:
            first_data(began.state, data)
        else:
            notes = self._on_every_rank(lambda: take_data(began.state, data, origin, chosen))
            self.began = dataclasses.replace(began, notes=[*began.notes, *notes])

    def build(self) -> None:
        """The model and the optimizer, with the state that the run goes on from."""
        self.world.whereabouts.phase = "building the model"
        with self.timers("model-and-optimizer-setup", 0):
            self._build()

    def _build(self) -> None:
        config, world = self.config, self.world
        self.moments.mark("model_init_start")
        self.model = build_parallel_model(config, world, self.program)
        self.program.timed_by(self.model.timers)
        self.moments.mark("model_init_finish")
        self.moments.mark("build_optimizer_start")
        self.optimizer = build_optimizer(
            self.model.stages, world, config.optim, self.model.decisions.optimizer, model_dtype(config)
        )
        self.moments.mark("build_optimizer_finish")
        self.store = store_for(config)
        self.store.guard = self.held.require
        began = starting_point(
            self.resolved, world, self.model, self.optimizer, self.store, self.data, self.start
        )
        require_fitting_batches(config, began.state)
        notes = [
            *began.notes,
            *settle(config, began.state),
            *settle_environment(world, began.state),
            *disk_notes(config, world, self.model, self.optimizer, self.store, began.state),
        ]
        self.began = dataclasses.replace(began, notes=notes)
        self.state = self.began.state
        self.program.begins(self.state)

    def prepare(self) -> None:
        """The samples in their order, the files that are written, and the loop, ready to go."""
        config, world, data, began = self.config, self.world, self.data, self.began
        assert data is not None and began is not None, "opened and built before"
        parameters = self.model.count_parameters()
        self.moments.mark("build_dataiters_start")
        with self.timers("train/valid/test-data-iterators-setup", 0):
            datasets = self._on_every_rank(
                lambda: arrange(data, config, world, self.state, self.folder.data, self.display)
            )
        self.moments.mark("build_dataiters_finish")
        self.output = output = self._on_every_rank(lambda: self._open_output(parameters, began))
        output.note(f"time to initialize (seconds): {self.initialized - self.started:.3f}")
        introduce(config, world, self.model, output)
        output.say(describe(config, world, parameters))
        if pipeline := describe_pipeline(config):
            output.say(pipeline)
        notes = [
            *notices_of_device(self.resolved, self.model.decisions),
            *_behind(config, self.state),
            *began.notes,
        ]
        for note in notes:
            output.say(f"note: {note}")
        for remark in began.remarks:
            output.note(remark)
        _say_where_it_stands(config, began, output)
        beside = BesideTheSteps(config, self.model.decisions, world, self.optimizer, self.folder.path, output)
        self.cleanup.callback(beside.close)
        self.trainer = Trainer(
            config,
            world,
            self.model,
            self.optimizer,
            datasets,
            self.store,
            self.state,
            output,
            self.stop,
            began.is_saved,
            self.job_began,
            beside,
        )
        self.leave = self.trainer.checkpoints.leave
        self.stop.is_starting = False
        output.note("done with setup ...")
        output.note(self.timers.block(world.everyone) or "")

    def train(self) -> Outcome:
        """The loop to its end, with what is evaluated after it."""
        return self.conclude(self.trainer.run())

    def conclude(self, ending: Ending | None) -> Outcome:
        """What is made of the results, after the last step of this process."""
        self.world.whereabouts.phase = "ending"
        self.moments.mark("train_loop_finish")
        datasets, output = self.trainer.datasets, self.output
        if len(datasets.names) > 1:
            drawn = ", ".join(f"{count} from {name}" for name, count in self.state.drawn.items())
            output.say(f"samples so far: {drawn}")
        if self.world.is_first:
            if not self.config.train.skip_train:
                output.attempt("loss.svg", lambda: draw_curve(self.folder), WITHOUT_IT)
            if ending is not None:
                output.note(ending.line)
                output.say(_farewell(ending, self.state, self.config, self.typed_again))
            elif not self.config.train.skip_train:
                finish(self.config, self.folder, datasets, output)
            self.moments.mark("finish")
            if not self.config.train.skip_train:
                output.attempt(
                    "app_metrics.json", lambda: self.moments.write(self.folder.app_metrics), WITHOUT_IT
                )
        return Outcome(self.folder, ending)

    def _on_every_rank(self, action: Callable[[], T]) -> T:
        made = on_some_ranks(True, action, self.world.everyone)
        assert made is not None
        return made

    def _open_output(self, parameters: int, began: Beginning) -> Output:
        return _open_output(
            self.resolved, self.world, self.folder, self.display, began, self.cleanup, parameters, self.held
        )


def _behind(config: RunConfig, state: TrainState) -> list[str]:
    """What should have begun before the step that the run goes on from."""
    if not config.log.profile or state.step <= config.log.profile_step_start:
        return []
    return [
        f"--profile: the run goes on after step {state.step}, beyond --profile-step-start {config.log.profile_step_start}, so nothing is "
        f"profiled"
    ]


def _open_output(
    resolved: Resolved,
    world: World,
    folder: RunFolder,
    display: Display,
    began: Beginning,
    cleanup: contextlib.ExitStack,
    parameters: int,
    held: OpenFolders,
) -> Output:
    config = resolved.config
    if config.log.monitor_memory_continuously:
        samples = folder.path / "memory" / f"rank-{world.everyone.rank:05d}.csv"
        interval = config.log.memory_monitor_interval
        sampler = MemorySampler(samples, world.device, interval, display.say)
        cleanup.callback(sampler.close)
    if not world.is_first:
        return Output(display)
    refuse_pipes(folder.log, folder.metrics)
    # The line on a log that was deleted goes into the new one too.
    log = AppendedFile(folder.log, lambda text: output.say(text))
    echoes = config.log.console_lines == "megatron"
    if config.train.skip_train:
        # Who only looks changes nothing of what a run has left.
        output = Output(display, log, echoes=echoes, may_write=held.are_ours)
        cleanup.callback(output.close)
        return output
    if began.replaces_training:
        folder.set_metrics_aside()
    elif began.state.step == 0 and folder.holds_metrics_of_another(resolved):
        display.say(
            f"note: another run was in {folder.path} and left no checkpoint to go on from; its metrics are {folder.set_metrics_aside()} "
            f"now, and its log goes on with this run's; a --run-dir of its own keeps a run apart"
        )
    folder.write_config(resolved)
    recorders: list[Recorder] = []
    lines = LogLines(config.log.log_interval, config.log.log_throughput)
    output = Output(display, log, recorders, lines, echoes, may_write=held.are_ours)
    cleanup.callback(output.close)
    for recorder in open_recorders(config, world, folder, began.state, parameters, output.say):
        recorders.append(recorder)
    return output


def _say_where_it_stands(config: RunConfig, began: Beginning, output: Output) -> None:
    state = began.state
    if config.train.skip_train:
        return
    if config.train.train_iters == 0:
        output.say("no steps are asked for (--train-iters 0): the weights are saved as they are")
    elif state.step >= config.train.train_iters:
        limit = (
            "--train-iters"
            if config.train.epochs is None
            else "--epochs or --train-iters, whichever ended it,"
        )
        output.say(
            f"this run has finished its {state.step} steps: nothing is left to train. Raise {limit} to go on, "
            f"give --fresh to start anew, or --run-dir for another run"
            if began.is_saved
            else f"{config.checkpoint.load} is at step {state.step} and --train-iters is {config.train.train_iters}: nothing is "
            f"left to train. Raise {limit} to go on, or take the weights alone and begin at step 0 with --finetune"
        )
    elif state.step:
        output.say(f"resuming at step {state.step} of {config.train.train_iters}")


def _farewell(ending: Ending, state: TrainState, config: RunConfig, typed_again: Start) -> str:
    if config.train.skip_train:
        return f"{ending.reason} before the evaluation was done"
    if state.step == 0:
        return f"{ending.reason} before the first step; nothing was trained yet"
    saved = f"its checkpoint is saved, {how_to_go_on(typed_again, config.checkpoint.save)}"
    kept = saved if config.checkpoint.save_checkpoints else "nothing is saved"
    return f"{ending.reason} after step {state.step}; {kept}"

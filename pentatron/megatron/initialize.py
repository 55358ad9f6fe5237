"""`initialize_megatron()`, and the state of a run whose steps the program calls itself."""

import atexit
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch import Tensor

from pentatron.cli.configure import prepare
from pentatron.cli.environment import RankInfo
from pentatron.cli.main import run_guarded
from pentatron.cli.options import entry_help
from pentatron.cli.output import say
from pentatron.cli.train import check_spec, joined_process_group, launch_workers, launcher_pid, needs_launcher
from pentatron.cli.worker import current_worker
from pentatron.cli.worker_errors import failure_log_message, report_error
from pentatron.data.loader import Batch
from pentatron.errors import UserError
from pentatron.megatron import arguments
from pentatron.megatron.program import UserProgram, as_dictionary
from pentatron.megatron.state import current_run, is_running, script_command
from pentatron.monitor.terminal import ignore_output_errors
from pentatron.parallel.process_group import destroy_process_group
from pentatron.settings.run_config import RunConfig
from pentatron.train.batches import micro_batches
from pentatron.train.run_folder import log_failure
from pentatron.train.session import Session, SessionOptions, open_session

# The sets of samples, and what the datasets of a session call them.
SETS = {"train": "train", "validation": "valid", "test": "test"}


@dataclass(eq=False)
class Stepwise:
    """A run whose steps the program calls itself: its session, and which parts of it have been set up."""

    session: Session
    program: UserProgram
    has_model: bool = False
    has_data: bool = False


class DataIterator(Iterator[dict[str, Tensor]]):
    """Iterates over this rank's micro-batches of one of the sets; `batches` have whole sequences."""

    def __init__(self, stepwise: Stepwise, name: str) -> None:
        self.stepwise, self.name = stepwise, name
        self.batches = self._batches()

    def _batches(self) -> Iterator[Batch]:
        # At the first call, because training continues behind the samples that were consumed up to then.
        session = self.stepwise.session
        samples: Any = getattr(session.trainer.datasets, SETS[self.name])
        consumed = session.state.consumed_samples if self.name == "train" else 0
        yield from micro_batches(session.config, session.world, samples, consumed)

    def __next__(self) -> dict[str, Tensor]:
        return as_dictionary(next(self.batches))


class RateSchedule:
    """`opt_param_scheduler`: the learning rate of the next step. The training loop advances it."""

    def get_lr(self, param_group: Any = None) -> float:
        trainer = current_stepwise(data=True).session.trainer
        return trainer.schedule.learning_rate(trainer.state.scheduled_samples)


def current_stepwise(model: bool = False, data: bool = False) -> Stepwise:
    """Returns the run that `initialize_megatron()` opened; raises if a required part is not set up."""
    if (stepwise := current_run().stepwise) is None:
        raise UserError("pretrain() runs all steps; to call them one by one begin with initialize_megatron()")
    if model and not stepwise.has_model:
        raise UserError("there is no model yet; call setup_model_and_optimizer() first")
    if data and not stepwise.has_data:
        raise UserError("there is no data yet; call build_train_valid_test_data_iterators() first")
    return stepwise


def initialize_megatron(
    extra_args_provider: arguments.ExtraArguments | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    get_embedding_ranks: Any = None,
    get_position_embedding_ranks: Any = None,
    **others: Any,
) -> None:
    """Reads the command line, joins the other processes and opens the run folder. The run ends at process
    exit.

    If the layout needs several processes and no launcher started this one, starts the workers and exits with
    their exit code.
    """
    if others:
        raise UserError(f"initialize_megatron: {next(iter(others))} is not available; leave it out")
    notes = arguments.notes_without_effect(
        get_embedding_ranks=get_embedding_ranks, get_position_embedding_ranks=get_position_embedding_ranks
    )
    code = run_guarded(lambda: _begin(extra_args_provider, args_defaults or {}, notes), ends_process=False)
    if code or not is_running():
        sys.exit(code)


def _begin(provider: arguments.ExtraArguments | None, defaults: Mapping[str, Any], notes: list[str]) -> int:
    entry, extra = arguments.script_entry_point(defaults)
    typed = sys.argv[1:]
    if "--help" in typed or "-h" in typed:
        say(entry_help(entry, None))
        return 0
    words, added = arguments.take_extra_arguments(typed, provider, entry)
    # The program names its data later, so the data flags are not checked here.
    prepared = prepare(words, entry, own_data=True)
    check_spec(prepared.resolved)
    if prepared.worker is None and needs_launcher(prepared):
        return launch_workers(prepared, [*(script_command() or (sys.argv[0],)), *typed])
    worker = prepared.worker or RankInfo(0, 1, 0, 1, "none")
    program = UserProgram(None, _not_given, _not_given, {**extra, **added}, notes)
    program.reads_named_data = False
    config = prepared.resolved.config
    ignore_output_errors()
    try:
        with ExitStack() as opening:
            world, resolved = opening.enter_context(joined_process_group(prepared, worker))
            options = SessionOptions(launcher=launcher_pid(), program=program, attempt=prepared.attempt)
            session = opening.enter_context(open_session(resolved, world, entry.resumes, **options))
            current_run().stepwise = Stepwise(session, program)
            # Last, so that an exception above closes what was opened.
            atexit.register(_end, opening.pop_all())
    except Exception as error:
        code = report_error(error, config, worker)
        if code is None:
            raise
        return code
    sys.excepthook = _excepthook(sys.excepthook, config, worker)
    return 0


def _end(opened: ExitStack) -> None:
    """Closes the run at process exit. The exit code tells the launcher whether it failed."""
    opened.close()
    if (launched := current_worker()) is not None:
        launched.record_finished()


def _not_given(*args: Any, **named: Any) -> Any:
    """Placeholder for the functions that the program passes with its first steps."""
    raise UserError("no model_provider or forward_step was given yet")


def _excepthook(previous: Callable[..., Any], config: RunConfig, worker: RankInfo) -> Callable[..., Any]:
    """Returns an excepthook that reports exceptions as `pretrain()` does, with the same exit codes."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if is_running() and (stepwise := current_run().stepwise) is not None:
            folder, world = stepwise.session.folder, current_run().world
            log_failure(folder, world, error, lambda e: failure_log_message(e, config, worker.rank))
        # The process groups are abandoned, because closing them at exit would wait for the other ranks.
        if worker.world_size > 1:
            destroy_process_group(failed=True)
        code = report_error(error, config, worker)
        if code is None and (launched := current_worker()) is not None:
            launched.record_failure(error)
        elif code is None:
            previous(kind, error, trace)
        else:
            # Otherwise Python exits with 1 after the hook.
            raise SystemExit(code)

    return hook

"""The beginning of a run whose steps the program calls itself."""

import atexit
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from pentatron.cli.configure import prepare
from pentatron.cli.environment import Worker
from pentatron.cli.main import guarded
from pentatron.cli.options import entry_help
from pentatron.cli.output import say
from pentatron.cli.train import check_spec, joined_run, launch_workers, launching_agent, needs_launcher
from pentatron.cli.worker import this_worker
from pentatron.cli.worker_errors import explain, last_words
from pentatron.errors import UserError
from pentatron.megatron.flow import Flow
from pentatron.megatron.program import UserProgram
from pentatron.megatron.state import current, is_running, started_as
from pentatron.megatron.training.arguments import ExtraArguments, take_extra_arguments
from pentatron.megatron.training.entry import entry_of, notes_of
from pentatron.monitor.terminal import outlive_output
from pentatron.parallel.process_group import leave
from pentatron.settings.run import RunConfig
from pentatron.train.run_folder import write_last_words
from pentatron.train.session import open_session


def initialize_megatron(
    extra_args_provider: ExtraArguments | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    get_embedding_ranks: Any = None,
    get_position_embedding_ranks: Any = None,
    **others: Any,
) -> None:
    """Reads the command line, joins the other processes and opens the run's folder; the run ends with the process.

    Where the program was started alone and asks for several processes, this starts them and ends with their exit code.
    """
    if others:
        raise UserError(f"initialize_megatron: {next(iter(others))} is not available; leave it out")
    notes = notes_of(
        get_embedding_ranks=get_embedding_ranks, get_position_embedding_ranks=get_position_embedding_ranks
    )
    code = guarded(lambda: _begin(extra_args_provider, args_defaults or {}, notes), is_all=False)
    if code or not is_running():
        sys.exit(code)


def _begin(provider: ExtraArguments | None, args_defaults: Mapping[str, Any], notes: list[str]) -> int:
    entry, extra = entry_of(args_defaults)
    typed = sys.argv[1:]
    if "--help" in typed or "-h" in typed:
        say(entry_help(entry, None))
        return 0
    words, added = take_extra_arguments(typed, provider, entry)
    # Which data it is, the program says later.
    prepared = prepare(words, entry, own_data=True)
    check_spec(prepared.resolved)
    if prepared.worker is None and needs_launcher(prepared):
        return launch_workers(prepared, [*(started_as() or (sys.argv[0],)), *typed])
    worker = prepared.worker or Worker(0, 1, 0, 1, "none")
    program = UserProgram(
        None, _missing("model_provider"), _missing("forward_step"), {**extra, **added}, notes
    )
    program.reads_named_data = False
    config = prepared.resolved.config
    outlive_output()
    try:
        with ExitStack() as opening:
            world, resolved = opening.enter_context(joined_run(prepared, worker))
            session = opening.enter_context(
                open_session(
                    resolved, world, entry.resumes, launching_agent(), program, attempt=prepared.attempt
                )
            )
            current().flow = Flow(session, program)
            # Only now: what failed so far was closed again.
            atexit.register(_end, opening.pop_all())
    except Exception as error:
        code = explain(error, config, worker)
        if code is None:
            raise
        return code
    sys.excepthook = _sentence(sys.excepthook, config, worker)
    return 0


def _end(opened: ExitStack) -> None:
    """At the end of the program. Its exit code tells whether it failed."""
    opened.close()
    if (place := this_worker()) is not None:
        place.finished()


def _missing(name: str) -> Callable[..., Any]:
    def fail(*args: Any, **named: Any) -> Any:
        raise UserError(f"no {name} was given yet")

    return fail


def _sentence(before: Callable[..., Any], config: RunConfig, worker: Worker) -> Callable[..., Any]:
    """For errors that nobody catches, in whichever step: what `pretrain()` says of them, and its exit codes."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if is_running() and (flow := current().flow) is not None:
            write_last_words(
                flow.session.folder, current().world, error, lambda e: last_words(e, config, worker.rank)
            )
        # What is closed when the process ends would wait for the others.
        if worker.world_size > 1:
            leave(failed=True)
        code = explain(error, config, worker)
        if code is None and (place := this_worker()) is not None:
            place.failed(error)
        elif code is None:
            before(kind, error, trace)
        else:
            # Python ends with 1 after a hook, unless the hook itself asks for an end.
            raise SystemExit(code)

    return hook


def set_jit_fusion_options() -> None:
    """Nothing: torch fuses what it can by itself."""

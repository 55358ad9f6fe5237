"""The `pentatron` command: dispatches to subcommands, and turns exceptions into messages and exit codes."""

import errno
import gc
import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from pentatron.cli.output import print_error, say
from pentatron.cli.worker import SupervisedWorker, clear_inherited_worker_variables, current_worker
from pentatron.errors import AgreedError, UserError, describe_os_error
from pentatron.monitor.terminal import OutputLost, replace_streams, require_complete_output
from pentatron.settings.command_line import did_you_mean
from pentatron.settings.entry_points import TRAIN, EntryPoint
from pentatron.supervise.processes import SAFE_PATH
from pentatron.supervise.signals import StoppedEarly

if TYPE_CHECKING:
    from pentatron.train.model import Program

Command = Callable[[Sequence[str]], int]
# By name: the module in this package with the function `NAME_command`, and the line in the help.
_COMMANDS = {
    "prepare": ("prepare", "tokenize text into the .bin/.idx files that training reads"),
    "data": ("data", "show, describe, verify, merge and seal .bin/.idx files"),
    "train": ("main", "train a model; without flags: a small demo model"),
    "generate": ("generate", "generate text with a trained model"),
    "import": ("convert", "convert a Hugging Face folder or hub model to a checkpoint"),
    "export": ("convert", "write a checkpoint as a Hugging Face folder"),
    "checkpoint": ("checkpoint", "inspect, verify, compare, reshard and prune checkpoints"),
    "config": ("config", "print the resolved settings of a training command with their origins"),
    "layout": ("layout", "show ranks, process groups and stages, and draw the pipeline schedule"),
    "plan": ("plan", "estimate memory and time of a model on N GPUs, and list layouts that fit"),
    "verify": ("verify", "check that a layout computes the same numbers as one process, on a small model"),
    "presets": ("config", "list the presets and the shapes of their models"),
    "launch": ("launch", "write a training script for several machines, for Slurm or torchrun"),
    "bench": ("bench", "measure the speed of every layout of N processes"),
    "monitor": ("monitor", "watch a run, or review a finished one"),
    "doctor": ("doctor", "check this machine for training, and list what is missing and how to fix it"),
}


def run_function(function: str, words: Sequence[str]) -> int:
    """Runs `module.function` of this package, imported only now, which keeps `pentatron --help` fast."""
    module, _, name = function.partition(".")
    code: int = getattr(importlib.import_module(f"pentatron.cli.{module}"), name)(words)
    return code


COMMANDS: dict[str, Command] = {
    name: partial(run_function, f"{module}.{name}_command") for name, (module, _) in _COMMANDS.items()
}
_LINES = "\n".join(f"  {name:<10} {line}" for name, (_, line) in _COMMANDS.items())
USAGE = f"""usage: pentatron COMMAND [...]

Trains large language models with five-way parallelism, on a laptop or a cluster. Every layout computes the same numbers.

{_LINES}

  pentatron train --help      list all settings by group
  pentatron --version
"""


def main(words: Sequence[str] | None = None, command: Command | None = None) -> int:
    words = list(sys.argv[1:] if words is None else words)
    with _safe_path_for_children():
        return run_guarded(partial(command or _dispatch, words))


@contextmanager
def _safe_path_for_children() -> Iterator[None]:
    """Sets PYTHONSAFEPATH: data workers and compilers must not import from the current folder either."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        os.environ.pop(SAFE_PATH, None)
        if before is not None:
            os.environ[SAFE_PATH] = before


def run_guarded(action: Callable[[], int], ends_process: bool = True) -> int:
    """Runs a command and returns its exit code; an error that the user can fix becomes one sentence.

    `ends_process`: the process ends after the action, so a worker reports to its launcher that it has
    finished.
    """
    replace_streams()
    # Before `current_worker`, which reads the variables that this removes.
    clear_inherited_worker_variables()
    worker = current_worker()
    try:
        if worker is None:
            return _reporting_errors(action)
        worker.attach_to_launcher()
        return _as_worker(action, worker, ends_process)
    finally:
        if "torch" in sys.modules:
            # A process group in a reference cycle would be destroyed during interpreter shutdown, where its
            # threads can abort the process although all work is done.
            gc.collect()


def _as_worker(action: Callable[[], int], worker: SupervisedWorker, ends_process: bool) -> int:
    """Records an exception for the launcher, which prints only that of the rank that failed first."""
    try:
        code = _reporting_errors(action)
        if code == 0 and ends_process:
            worker.record_finished()
        return code
    except Exception as error:
        worker.record_failure(error)
        return 1
    finally:
        worker.remove_orphaned_folder()


def _reporting_errors(action: Callable[[], int]) -> int:
    # All ranks end with the same error, so only rank 0 prints it.
    is_first_rank = os.environ.get("RANK", "0") == "0"
    try:
        with require_complete_output():
            return action()
    except UserError as error:
        if is_first_rank:
            print_error(str(error))
        elif os.environ.get("LOCAL_RANK") == "0" and not isinstance(error, AgreedError):
            # A file or tokenizer may be missing on this machine only, and then rank 0 has no error to print.
            print_error(f"rank {os.environ['RANK']}: {error}")
        return error.exit_code
    except OutputLost as error:
        if error.errno == errno.EPIPE:
            # The reader of the pipe (head, less) has exited: the exit code that a shell gives for SIGPIPE.
            return 128 + signal.SIGPIPE
        problem = f"the output cannot be written ({error.strerror}); write it to another file, or make room"
    except StoppedEarly as stopped:
        if is_first_rank:
            print_error(str(stopped))
        return 128 + stopped.number
    except KeyboardInterrupt:
        if is_first_rank:
            print_error("stopped immediately; earlier checkpoints are intact")
        return 130
    except OSError as error:
        file = _file_of_error(error) if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
        if isinstance(error, PermissionError) and error.filename is not None:
            problem = describe_os_error(error)
        elif file is None:
            raise
        else:
            # A log or a metrics file: a checkpoint that cannot be written is reported where it is saved.
            fix = "make room on its disk, or choose another place"
            intact = "earlier checkpoints are intact"
            problem = f"{file} cannot be written ({error.strerror}); {fix}; {intact}"
    print_error(problem)
    return UserError.exit_code


def _file_of_error(error: OSError) -> str | None:
    """Returns the file that could not be written.

    A failed `open` has the name in the exception. A failed write has not: the open file is a local variable
    of its caller.
    """
    if error.filename is not None:
        return str(error.filename)
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for value in frame.f_locals.values():
            if isinstance(value, io.IOBase) and isinstance(name := getattr(value, "name", None), str):
                return name
    return None


def run_entry(entry: EntryPoint) -> None:
    """Main function of a guide's training script: trains with the flag names and defaults of that guide."""
    run_command(partial(_train, entry=entry, restart=[sys.argv[0]]))


def train_program(
    take_arguments: Callable[[list[str]], tuple[list[str], "Program"]],
    entry: EntryPoint,
    restart: Sequence[str],
) -> int:
    """Trains the user's own program.

    `take_arguments` returns the words of the command line that it leaves to pentatron.
    """
    words = sys.argv[1:]

    def action() -> int:
        left, program = take_arguments(words)
        return _train(left, entry, restart, program, words)

    return run_guarded(action)


def run_command(command: Command) -> None:
    """Main function of a script that is one command."""
    sys.exit(main(command=command))


def train_command(words: Sequence[str]) -> int:
    return _train(words, TRAIN, ["-m", "pentatron", "train"])


def _train(
    words: Sequence[str],
    entry: EntryPoint,
    restart: Sequence[str],
    program: "Program | None" = None,
    typed: Sequence[str] | None = None,
) -> int:
    """Trains, or prints the help.

    `typed`: all words for the workers, if the program has consumed some of them.
    """
    if "--help" in words or "-h" in words:
        from pentatron.cli.options import entry_help
        from pentatron.settings.run_config import sections

        group = next((word for word in words if not word.startswith("-")), None)
        if group is not None and group not in sections():
            guess = did_you_mean(group, list(sections()))
            raise UserError(f"there is no group '{group}'{guess}; the groups are {', '.join(sections())}")
        say(entry_help(entry, group))
        return 0
    from pentatron.cli.train import train

    return train(words, entry, restart, program, typed)


def _dispatch(words: Sequence[str]) -> int:
    if words[:1] == ["help"] and len(words) > 1:
        return _dispatch([*words[1:], "--help"])
    if not words or words[0] in ("--help", "-h", "help"):
        say(USAGE)
        return 0
    command, rest = words[0], words[1:]
    if command in ("--version", "-V"):
        from pentatron import __version__

        say(f"pentatron {__version__}")
        return 0
    if command not in COMMANDS:
        guess = did_you_mean(command, COMMANDS)
        raise UserError(f"unknown command '{command}'{guess}; `pentatron --help` lists the commands")
    return COMMANDS[command](rest)

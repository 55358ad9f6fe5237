"""`pentatron COMMAND ...`"""

import errno
import gc
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pentatron.cli.output import complain, say
from pentatron.cli.worker import Supervised, leave_parents_job, this_worker
from pentatron.errors import AgreedError, UserError
from pentatron.monitor.terminal import OutputLost, own_streams, whole_output
from pentatron.settings.command_line import did_you_mean
from pentatron.settings.entry import TRAIN, EntryPoint
from pentatron.supervise.processes import SAFE_PATH
from pentatron.supervise.signals import StoppedEarly

if TYPE_CHECKING:
    from pentatron.train.model import Program

USAGE = """usage: pentatron COMMAND [...]

Train large language models with five-way parallelism, on a laptop or on a cluster, with the same numbers.

  prepare    turn text into the files that training reads
  data       describe, verify and merge such files
  train      train a model; with no flag at all, a small one on this machine's Python library
  generate   continue a text with a trained model
  import     make a checkpoint of a Hugging Face folder or a model of the hub
  export     write a checkpoint as a Hugging Face folder
  checkpoint look at checkpoints, verify, compare, rewrite and prune them
  config     show the settings a training command resolves to, and where each came from
  layout     show which rank does what, and draw the pipeline's schedule
  plan       say what a model needs on some GPUs, and which layouts fit
  verify     compare a layout with one process, number by number, on a small model
  presets    list the named models and their shapes
  launch     write the script that trains on several machines, for Slurm or torchrun
  bench      measure every layout of a number of processes against each other
  monitor    watch a run, or look back at a finished one
  doctor     say what this machine has for training, what is missing, and what to do

  pentatron train --help      every setting, by group
  pentatron --version
"""


def main(words: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if words is None else words)
    with _children_without_current_folder():
        return guarded(lambda: _dispatch(words))


@contextmanager
def _children_without_current_folder() -> Iterator[None]:
    """Python processes that libraries start (data workers, compilers) import nothing from the current folder either."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        os.environ.pop(SAFE_PATH, None)
        if before is not None:
            os.environ[SAFE_PATH] = before


def guarded(action: Callable[[], int], is_all: bool = True) -> int:
    """Runs a command; what the user can mend becomes one sentence and exit code 2.

    `is_all`: the process has nothing to do after the action, which is proved to its launcher then.
    """
    own_streams()
    leave_parents_job()
    place = this_worker()
    try:
        if place is None:
            return _sentences(action)
        place.follow_launcher()
        return _recorded(action, place, is_all)
    finally:
        if "torch" in sys.modules:
            # A process group caught in a reference cycle would be torn down while the interpreter dies, and its
            # threads can then abort the process after all work is done.
            gc.collect()


def _recorded(action: Callable[[], int], place: Supervised, is_all: bool) -> int:
    """In a worker of ours: its launcher tells what went wrong, once, and of the first rank."""
    try:
        code = _sentences(action)
        if code == 0 and is_all:
            place.finished()
        return code
    except Exception as error:
        place.failed(error)
        return 1
    finally:
        place.leave()


def _sentences(action: Callable[[], int]) -> int:
    try:
        with whole_output():
            return action()
    except UserError as error:
        if _speaks():
            complain(str(error))
        elif os.environ.get("LOCAL_RANK") == "0" and not isinstance(error, AgreedError):
            # What another machine lacks (a file, a tokenizer) the first rank does not know.
            complain(f"rank {os.environ['RANK']}: {error}")
        return error.exit_code
    except OutputLost as error:
        if error.errno == errno.EPIPE:
            # The reader of the output (head, less) has left; a shell says the same of a command that SIGPIPE ends.
            return 128 + signal.SIGPIPE
        complain(f"the output cannot be written ({error.strerror}); write it to another file, or make room")
        return UserError.exit_code
    except StoppedEarly as stopped:
        if _speaks():
            complain(str(stopped))
        return 128 + stopped.number
    except PermissionError as error:
        if error.filename is None:
            raise
        complain(
            f"{error.filename} cannot be opened ({error.strerror}); choose another place, or ask its owner"
        )
        return UserError.exit_code
    except KeyboardInterrupt:
        if _speaks():
            complain("stopped at once; checkpoints that were saved before are intact")
        return 130
    except OSError as error:
        file = _file_of(error) if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
        if file is None:
            raise
        # A log or a table of numbers; of a checkpoint it is told where it is saved.
        complain(
            f"{file} cannot be written ({error.strerror}); make room on its disk, or choose another place; "
            f"checkpoints that were saved before are intact"
        )
        return UserError.exit_code


def _file_of(error: OSError) -> str | None:
    """The file that could not be written: a failed open names it, a failed write does not, but its caller holds the open file."""
    if error.filename is not None:
        return str(error.filename)
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for value in frame.f_locals.values():
            if isinstance(value, io.IOBase) and isinstance(name := getattr(value, "name", None), str):
                return name
    return None


def _speaks() -> bool:
    """Whether this process speaks for the run: all ranks come to the same end, one says so."""
    return os.environ.get("RANK", "0") == "0"


def run_entry(entry: EntryPoint) -> None:
    """Body of a guide's script: the same training under that guide's names and defaults."""
    words = sys.argv[1:]
    script = sys.argv[0]
    with _children_without_current_folder():
        sys.exit(guarded(lambda: _train(words, entry, [script])))


def train_by(
    take_words: Callable[[list[str]], tuple[list[str], "Program"]], entry: EntryPoint, restart: Sequence[str]
) -> int:
    """The same for a program of the user's own, which may keep some words of the command line for itself."""
    words = sys.argv[1:]

    def action() -> int:
        left, program = take_words(words)
        return _train(left, entry, restart, program, words)

    return guarded(action)


def run_command(command: Callable[[Sequence[str]], int]) -> None:
    """Body of a script that stands for one command."""
    words = sys.argv[1:]
    with _children_without_current_folder():
        sys.exit(guarded(lambda: command(words)))


def _train(
    words: Sequence[str],
    entry: EntryPoint,
    restart: Sequence[str],
    program: "Program | None" = None,
    typed: Sequence[str] | None = None,
) -> int:
    """`typed`: all words, for the workers, where a program kept some."""
    if "--help" in words or "-h" in words:
        from pentatron.cli.options import entry_help
        from pentatron.settings.run import sections

        wanted = [w for w in words if not w.startswith("-")]
        if wanted and wanted[0] not in sections():
            guess = did_you_mean(wanted[0], list(sections()))
            raise UserError(f"there is no group '{wanted[0]}'{guess}; the groups are {', '.join(sections())}")
        say(entry_help(entry, wanted[0] if wanted else None))
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


def _train_command(words: Sequence[str]) -> int:
    return _train(words, TRAIN, ["-m", "pentatron", "train"])


def _prepare(words: Sequence[str]) -> int:
    from pentatron.cli.prepare import prepare_command

    return prepare_command(words)


def _data(words: Sequence[str]) -> int:
    from pentatron.cli.data import data_command

    return data_command(words)


def _generate(words: Sequence[str]) -> int:
    from pentatron.cli.generate import generate_command

    return generate_command(words)


def _import(words: Sequence[str]) -> int:
    from pentatron.cli.convert import import_command

    return import_command(words)


def _export(words: Sequence[str]) -> int:
    from pentatron.cli.convert import export_command

    return export_command(words)


def _checkpoint(words: Sequence[str]) -> int:
    from pentatron.cli.checkpoint import checkpoint_command

    return checkpoint_command(words)


def _config(words: Sequence[str]) -> int:
    from pentatron.cli.show import config_command

    return config_command(words)


def _layout(words: Sequence[str]) -> int:
    from pentatron.cli.layout import layout_command

    return layout_command(words)


def _plan(words: Sequence[str]) -> int:
    from pentatron.cli.plan import plan_command

    return plan_command(words)


def _verify(words: Sequence[str]) -> int:
    from pentatron.cli.verify import verify_command

    return verify_command(words)


def _presets(words: Sequence[str]) -> int:
    from pentatron.cli.show import presets_command

    return presets_command(words)


def _bench(words: Sequence[str]) -> int:
    from pentatron.cli.bench import bench_command

    return bench_command(words)


def _monitor(words: Sequence[str]) -> int:
    from pentatron.cli.monitor import monitor_command

    return monitor_command(words)


def _launch(words: Sequence[str]) -> int:
    from pentatron.cli.launch import launch_command

    return launch_command(words)


def _doctor(words: Sequence[str]) -> int:
    from pentatron.cli.doctor import doctor_command

    return doctor_command(words)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "prepare": _prepare,
    "data": _data,
    "train": _train_command,
    "generate": _generate,
    "import": _import,
    "export": _export,
    "checkpoint": _checkpoint,
    "config": _config,
    "layout": _layout,
    "plan": _plan,
    "verify": _verify,
    "presets": _presets,
    "launch": _launch,
    "bench": _bench,
    "monitor": _monitor,
    "doctor": _doctor,
}

"""`pentatron checkpoint`: looking at steps, checking, comparing, rewriting and removing them."""

import dataclasses
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pentatron.cli.convert import until_stopped
from pentatron.cli.options import (
    Options,
    flags_of,
    option,
    options_help,
    read,
    read_among,
    section_help,
    synopsis,
)
from pentatron.cli.output import file_errors_told, remark, say, say_json
from pentatron.errors import UserError
from pentatron.settings.command_line import did_you_mean, is_flag
from pentatron.settings.declaration import ONE_OR_MORE, ZERO_OR_MORE, Limit
from pentatron.text import counted, decimal_size

if TYPE_CHECKING:
    from pentatron.checkpoint.streaming import Progress
    from pentatron.checkpoint.verify import Problem
    from pentatron.checksums import Tell

# What a folder holds that is no checkpoint of ours, told by the names of its files alone: nothing is opened.


_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def foreign_kind(path: Path) -> str | None:
    """A sentence about a folder of another program, with what can be done with it; None: nothing that is known."""
    if not path.is_dir():
        return None
    steps = sorted(p.name for p in path.glob("iter_*") if p.is_dir())
    inside = path / steps[-1] if steps else path
    said = f" ({counted(len(steps), 'step')}, up to {steps[-1]})" if steps else ""
    if (inside / ".metadata").exists() or next(inside.glob("*.distcp"), None) is not None:
        return f"a checkpoint of torch.distributed, as Megatron-LM's torch_dist format has it{said}; its metadata is pickle"
    if next(inside.glob("mp_rank_*"), None) is not None:
        return f"a checkpoint of Megatron-LM in its legacy format, a pickled file for each rank{said}"
    if next(inside.glob("global_step*"), None) is not None or (path / "zero_to_fp32.py").exists():
        return "a checkpoint of DeepSpeed, in pickled files"
    if (path / "config.json").is_file():
        weights = sorted(p.name for p in path.glob("*.safetensors"))
        pickled = sorted(p.name for pattern in _PICKLED for p in path.glob(pattern))
        held = (
            counted(len(weights), "safetensors file")
            if weights
            else f"{pickled[0]} alone, which is pickle"
            if pickled
            else "no weights"
        )
        return f"a Hugging Face folder with {held}; load it with --load, or import it with: pentatron import {path} OUT"
    if next((p for pattern in _PICKLED for p in path.glob(pattern)), None) is not None:
        return "a folder with pickled files, which are not read here: reading them may run code"
    return None


_BAR = ("auto", "on", "off")


@dataclass(frozen=True)
class InspectOptions(Options):
    tensors: str | None = option(
        None, "its tensors, or those whose names match the pattern", value="PATTERN", alone="*"
    )
    stats: bool = option(False, "also the smallest, largest and mean number of each, and its norm")
    json: bool = option(False, "the same for machines")


@dataclass(frozen=True)
class VerifyOptions(Options):
    numbers: bool = option(False, "also whether every number is one")
    threads: int | None = option(None, "threads that compute checksums", limit=ZERO_OR_MORE)
    json: bool = option(False, "the same for machines")
    progress_bar: str = option("auto", "", choices=_BAR)


@dataclass(frozen=True)
class DiffOptions(Options):
    weights_only: bool = option(False, "no state of the optimizer and of the run")
    tolerance: float = option(
        0.0,
        "relative difference that is none",
        limit=Limit(lambda share: share >= 0, "a part of a number, 0 or more"),
    )
    json: bool = option(False, "the same for machines")
    progress_bar: str = option("auto", "", choices=_BAR)


@dataclass(frozen=True)
class ReshardOptions(Options):
    no_check: bool = option(False, "do not compare the checksums of STEP first")
    progress_bar: str = option("auto", "live progress bar", choices=_BAR)


@dataclass(frozen=True)
class PruneOptions(Options):
    """Two of them have the names that the trainer gives them as well."""

    keep: int = option(
        0,
        "how many of the newest stay",
        unlisted="--keep-checkpoints",
        limit=Limit(ONE_OR_MORE.holds, "1 or more, as one at least of the newest steps stays"),
        missing="say how many of the newest steps stay, one at least: pentatron checkpoint prune PATH --keep N",
    )
    keep_every: int | None = option(
        None,
        "every such step stays as well",
        value="M",
        unlisted="--save-retain-interval",
        limit=ZERO_OR_MORE,
    )
    dry_run: bool = option(False, "remove nothing")
    json: bool = option(False, "the same for machines")


USAGE = f"""usage: pentatron checkpoint COMMAND [...]

A PATH is a run, the folder of its checkpoints, or one step of them, saved in any layout. Nothing is ever unpickled.

  inspect PATH {synopsis(InspectOptions)}
                              the steps of a run; of one step, its model, layout, state, files and tensors
  verify PATH ... {synopsis(VerifyOptions)}
                              every checksum, and whether every number is one; ends with code 1 if anything is wrong
  diff A B {synopsis(DiffOptions)}
                              settings, state and tensors of two steps; ends with code 1 if they differ; either may be a
                              Hugging Face folder, then weights are compared
  reshard STEP OUT [--tensor-model-parallel-size N ...]
                              the same step in the files that another layout would have written
  prune PATH {synopsis(PruneOptions)}
                              remove old steps, by the rule of a run's own retention (--keep-checkpoints N,
                              --save-retain-interval M)

`--progress-bar auto|on|off` goes with verify, diff and reshard.
"""
RESHARD_USAGE = f"""usage: pentatron checkpoint reshard STEP OUT [--setting value ...]

Writes the files that a run in another layout would have written: more of them for many readers, or fewer. Any layout loads any
step as it is, so nothing needs this to go on training. Sizes that are not named are 1; --world-size N says how many processes
there are, if not just those of one copy. OUT is compared with STEP, bit by bit, before it appears.

{options_help(ReshardOptions)}

  pentatron checkpoint reshard runs/mine/checkpoints/step-00001000 resharded --tensor-model-parallel-size 4 --zero-stage 1

The settings of a layout:
"""
T = TypeVar("T", bound=Options)


def checkpoint_command(words: Sequence[str]) -> int:
    with file_errors_told():
        return _run(words)


def _run(words: Sequence[str]) -> int:
    asks = "--help" in words or "-h" in words
    if asks and words[0] == "reshard":
        from pentatron.compare.reshard import ENTRY

        say("\n".join([RESHARD_USAGE, *section_help(ENTRY, "parallel")]))
        return 0
    if not words or words[0] == "help" or asks:
        say(USAGE)
        return 0
    command, rest = words[0], words[1:]
    if command not in COMMANDS:
        guess = did_you_mean(command, COMMANDS)
        raise UserError(
            f"unknown command 'checkpoint {command}'{guess}; `pentatron checkpoint --help` lists the commands"
        )
    return COMMANDS[command](rest)


def read_checkpoint_options(
    cls: type[T], words: Sequence[str], least: int, most: int | None, example: str
) -> tuple[T, list[str]]:
    options, plain = read(cls, words, "pentatron checkpoint")
    if len(plain) < least or (most is not None and len(plain) > most):
        raise UserError(f"say which checkpoint: pentatron checkpoint {example}")
    return options, plain


def _inspect(words: Sequence[str]) -> int:
    from pentatron.cli.checkpoint_show import inspect

    return inspect(words)


def _verify(words: Sequence[str]) -> int:
    options, paths = read_checkpoint_options(VerifyOptions, words, 1, None, "verify PATH")
    from pentatron.checkpoint.verify import check_numbers, check_sums, open_manifest
    from pentatron.monitor.display import Silent, open_display

    folders = [folder for path in paths for folder in step_folders(Path(path))]
    threads = options.threads or min(8, os.cpu_count() or 1)
    display = Silent() if options.json else open_display(options.progress_bar)
    judged: list[dict[str, Any]] = []
    try:
        for folder in folders:
            manifest, problems = open_manifest(folder)
            if manifest is not None:
                total = sum(record.bytes for record in manifest.files.values())
                progress = _progress(display, f"verifying {folder.name}", total * (1 + options.numbers))
                problems = check_sums(folder, manifest, threads, _counting(progress))
                if options.numbers and not problems:
                    problems = check_numbers(folder, manifest, _counting(progress))
                done = f"{counted(len(manifest.files), 'file')}, {decimal_size(total)}"
                if not problems and not options.json:
                    also = ", every number finite" if options.numbers else ""
                    display.say(f"{folder}: ok ({done}, {counted(len(manifest.tensors), 'tensor')}{also})")
            if problems and not folder.exists():
                remark(f"{folder} was removed while this command ran, as a run does with old steps")
                continue
            for problem in problems if not options.json else ():
                display.say(f"{folder}: DAMAGED: {problem.sentence}")
            judged.append(_verdict(folder, problems))
    finally:
        display.close()
    if options.json:
        say_json(judged)
    return 1 if any(not one["ok"] for one in judged) else 0


def _verdict(folder: Path, problems: "Sequence[Problem]") -> dict[str, Any]:
    named = ("sentence", "file", "tensors", "expected", "found")
    return {
        "step": str(folder),
        "ok": not problems,
        "problems": [{name: getattr(problem, name) for name in named} for problem in problems],
    }


def step_folders(path: Path) -> list[Path]:
    """The steps that a path means, oldest first; what is no checkpoint of ours is named."""
    from pentatron.checkpoint.find import followed, is_step, steps_at
    from pentatron.checkpoint.retention import number_of
    from pentatron.checkpoint.store import CheckpointStore

    path = followed(path)
    if is_step(path) or (path.is_dir() and number_of(path.resolve()) is not None):
        return [path.resolve()]
    steps = steps_at(path)
    found = [] if steps is None else CheckpointStore(steps, keep=None).steps()
    if not found:
        raise nothing_at(path)
    return found


def nothing_at(path: Path) -> UserError:

    if not path.exists():
        return UserError(f"{path} does not exist; name a run, its checkpoints, or one step of them")
    kind = foreign_kind(path)
    what = f"it is {kind}" if kind else "it has no step; name a run, its checkpoints, or one step of them"
    return UserError(f"{path} holds no checkpoint of ours: {what}")


def _progress(display: Any, what: str, total: int) -> "Progress":
    from pentatron.checkpoint.streaming import Progress

    return Progress(display, what, total)


def _counting(progress: "Progress") -> "Tell":
    """Told by several threads."""
    one_at_a_time = threading.Lock()

    def tell(count: int) -> None:
        with one_at_a_time:
            progress.add(count)

    return tell


def _diff(words: Sequence[str]) -> int:
    from pentatron.cli.checkpoint_diff import diff

    return diff(words)


def _reshard(words: Sequence[str]) -> int:
    from pentatron.compare.reshard import ENTRY

    plain = list(takewhile(lambda word: not is_flag(word), words[:2]))
    entry = dataclasses.replace(ENTRY, own=flags_of(ReshardOptions))
    own, rest = read_among(ReshardOptions, words[len(plain) :], entry)
    if len(plain) < 2:
        raise UserError("say what to rewrite, and where, first: pentatron checkpoint reshard STEP OUT [...]")
    source, out = Path(plain[0]), Path(plain[1])
    return until_stopped(out, lambda: _run_reshard(source, out, rest, own))


def _run_reshard(source: Path, out: Path, words: Sequence[str], own: ReshardOptions) -> int:
    from pentatron.checkpoint.find import find_step, layout_words
    from pentatron.checkpoint.format import verify_files
    from pentatron.compare.reshard import layout_for, reshard
    from pentatron.monitor.display import open_display

    found, complaints = find_step(source, None if own.no_check else verify_files)
    config = layout_for(found, words)
    for complaint in complaints:
        say(f"note: {complaint}; {found.folder.name} is taken")
    display = open_display(own.progress_bar)
    try:
        made = reshard(found, out, config, display)
    finally:
        display.close()
    before, now = layout_words(found.manifest.config), layout_words(config.nested())
    say(
        f"{made.step}: {before} as {now}, {counted(made.tensors, 'tensor')} in {counted(made.files, 'file')}, {decimal_size(made.bytes)} in "
        f"{made.seconds:.1f} s, bit by bit what {found.folder} holds (any layout loads either)"
    )
    return 0


def _prune(words: Sequence[str]) -> int:
    from pentatron.cli.checkpoint_prune import prune

    return prune(words)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "inspect": _inspect,
    "verify": _verify,
    "diff": _diff,
    "reshard": _reshard,
    "prune": _prune,
}

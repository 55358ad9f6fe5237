"""`pentatron checkpoint`: inspects, verifies, compares, reshards and prunes checkpoint steps."""

import contextlib
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentatron.cli.convert import run_interruptible
from pentatron.cli.options import (
    Options,
    option,
    options_help,
    parse_options_and_settings,
    section_help,
    synopsis,
)
from pentatron.cli.output import print_note, say, say_json
from pentatron.cli.subcommands import parse_options_and_paths, run_subcommand
from pentatron.errors import UserError
from pentatron.settings.command_line import is_flag
from pentatron.settings.declaration import NON_NEGATIVE, ONE_OR_MORE, Limit
from pentatron.text import decimal_size, format_count

if TYPE_CHECKING:
    from pentatron.checksums import ProgressCallback

# File name patterns of pickled weights.
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_PROGRESS_BAR = ("auto", "on", "off")
_SHARE = Limit(lambda share: share >= 0, "a relative difference of 0 or more")


@dataclass(frozen=True)
class InspectOptions(Options):
    tensors: str | None = option(
        None,
        "list the tensors of the step, or those with a name that matches the pattern",
        value="PATTERN",
        alone="*",
    )
    stats: bool = option(False, "print the minimum, maximum, mean and norm of each tensor")
    json: bool = option(False, "print JSON")


@dataclass(frozen=True)
class VerifyCheckpointOptions(Options):
    numbers: bool = option(False, "also check for NaN and inf")
    threads: int | None = option(None, "threads that compute checksums", limit=NON_NEGATIVE)
    json: bool = option(False, "print JSON")
    progress_bar: str = option("auto", "", choices=_PROGRESS_BAR)


@dataclass(frozen=True)
class DiffOptions(Options):
    weights_only: bool = option(False, "compare weights only")
    tolerance: float = option(0.0, "largest relative difference that counts as equal", limit=_SHARE)
    json: bool = option(False, "print JSON")
    progress_bar: str = option("auto", "", choices=_PROGRESS_BAR)


@dataclass(frozen=True)
class ReshardOptions(Options):
    no_check: bool = option(False, "do not compare the checksums of STEP first")
    progress_bar: str = option("auto", "live progress bar", choices=_PROGRESS_BAR)


@dataclass(frozen=True)
class PruneOptions(Options):
    """Options of prune; two of them also have the names of the trainer's flags."""

    keep: int = option(
        0,
        "number of newest steps to keep",
        unlisted="--keep-checkpoints",
        limit=Limit(ONE_OR_MORE.holds, "1 or more, because at least the newest step is kept"),
        missing="give the number of newest steps to keep, at least 1: pentatron checkpoint prune PATH --keep N",
    )
    keep_every: int | None = option(
        None,
        "also keep steps that are multiples of M",
        value="M",
        unlisted="--save-retain-interval",
        limit=NON_NEGATIVE,
    )
    dry_run: bool = option(False, "print the steps that would be removed, and remove none")
    json: bool = option(False, "print JSON")


USAGE = f"""usage: pentatron checkpoint COMMAND [...]

PATH is a run folder, its checkpoint folder or one step, saved in any layout. Pickle is never read.

  inspect PATH {synopsis(InspectOptions)}
                              list the steps of a run, or show the model, layout, state, files and tensors of one step
  verify PATH ... {synopsis(VerifyCheckpointOptions)}
                              compare every checksum, with --numbers also check for NaN and inf; exit code 1 if a check fails
  diff A B {synopsis(DiffOptions)}
                              compare settings, state and tensors of two steps; exit code 1 if they differ; if one is a
                              Hugging Face folder, only weights are compared
  reshard STEP OUT [--tensor-model-parallel-size N ...]
                              write the step in the files of another layout
  prune PATH {synopsis(PruneOptions)}
                              remove old steps by the retention rule of a run (--keep-checkpoints N,
                              --save-retain-interval M)

verify, diff and reshard also take `--progress-bar auto|on|off`.
"""
RESHARD_USAGE = f"""usage: pentatron checkpoint reshard STEP OUT [--setting value ...]

Writes the files that a run in another layout would have written: more files for many readers, or fewer. Any layout loads any
step without resharding, so resuming never needs this command. Sizes that are not given are 1. --world-size N is the number of
processes, by default that of one replica. OUT is compared with STEP bit by bit before it is renamed to its final name.

{options_help(ReshardOptions)}

  pentatron checkpoint reshard runs/mine/checkpoints/step-00001000 resharded --tensor-model-parallel-size 4 --zero-stage 1

The settings of a layout:
"""
COMMANDS = {
    "inspect": "checkpoint_inspect.inspect",
    "verify": "checkpoint.verify",
    "diff": "checkpoint_diff.diff",
    "reshard": "checkpoint.reshard_step",
    "prune": "checkpoint_prune.prune",
}


def checkpoint_command(words: Sequence[str]) -> int:
    if not words or words[0] == "help" or "--help" in words or "-h" in words:
        if words[:1] == ["reshard"]:
            from pentatron.compare.reshard import ENTRY

            say("\n".join([RESHARD_USAGE, *section_help(ENTRY, "parallel")]))
        else:
            say(USAGE)
        return 0
    return run_subcommand("checkpoint", COMMANDS, words)


def verify(words: Sequence[str]) -> int:
    options, paths = parse_options_and_paths(
        VerifyCheckpointOptions, words, "checkpoint verify PATH", least=1
    )
    from pentatron.checkpoint.streaming import Progress
    from pentatron.checkpoint.verify import find_non_finite, open_manifest, verify_digests
    from pentatron.monitor.display import SilentDisplay, open_display

    folders = [folder for path in paths for folder in step_folders(Path(path))]
    threads = options.threads or min(8, os.cpu_count() or 1)
    verdicts: list[dict[str, Any]] = []
    # A silent display drops the lines as well, which JSON replaces.
    shown = SilentDisplay() if options.json else open_display(options.progress_bar)
    with contextlib.closing(shown) as display:
        for folder in folders:
            manifest, problems = open_manifest(folder)
            if manifest is not None:
                total = sum(record.bytes for record in manifest.files.values())
                progress = Progress(display, f"verifying {folder.name}", total * (1 + options.numbers))
                problems = verify_digests(folder, manifest, threads, _thread_safe(progress.add))
                if options.numbers and not problems:
                    problems = find_non_finite(folder, manifest, progress.add)
                if not problems:
                    size = f"{format_count(len(manifest.files), 'file')}, {decimal_size(total)}"
                    tensors = format_count(len(manifest.tensors), "tensor")
                    numbers = ", every number finite" if options.numbers else ""
                    display.say(f"{folder}: ok ({size}, {tensors}{numbers})")
            if problems and not folder.exists():
                print_note(f"{folder} was removed during this command, probably by a run removing old steps")
                continue
            for problem in problems:
                display.say(f"{folder}: DAMAGED: {problem.sentence}")
            found = [asdict(problem) for problem in problems]
            verdicts.append({"step": str(folder), "ok": not found, "problems": found})
    if options.json:
        say_json(verdicts)
    return 0 if all(verdict["ok"] for verdict in verdicts) else 1


def _thread_safe(function: "ProgressCallback") -> "ProgressCallback":
    lock = threading.Lock()

    def locked(count: int) -> None:
        with lock:
            function(count)

    return locked


def step_folders(path: Path) -> list[Path]:
    """Returns the steps at a path, oldest first; raises an error that names the kind of any other folder."""
    from pentatron.checkpoint.find import find_steps_folder, is_step, resolve_latest
    from pentatron.checkpoint.retention import step_number
    from pentatron.checkpoint.store import CheckpointStore

    path = resolve_latest(path)
    if is_step(path) or (path.is_dir() and step_number(path.resolve()) is not None):
        return [path.resolve()]
    steps = find_steps_folder(path)
    folders = [] if steps is None else CheckpointStore(steps, keep=None).steps()
    if not folders:
        raise no_checkpoint_error(path)
    return folders


def no_checkpoint_error(path: Path) -> UserError:
    """Returns the error of a path that has no steps."""
    if not path.exists():
        return UserError(f"{path} does not exist; name a run, its checkpoints, or one step of them")
    kind = foreign_kind(path)
    what = f"it is {kind}" if kind else "it has no step; name a run, its checkpoints, or one step of them"
    return UserError(f"{path} holds no Pentatron checkpoint: {what}")


def foreign_kind(path: Path) -> str | None:
    """Describes a checkpoint folder of another program and what can be done with it; None if the kind is
    unknown.

    Only file names are looked at; no file is opened.
    """
    if not path.is_dir():
        return None
    steps = sorted(p.name for p in path.glob("iter_*") if p.is_dir())
    inside = path / steps[-1] if steps else path
    count = f" ({format_count(len(steps), 'step')}, up to {steps[-1]})" if steps else ""
    if (inside / ".metadata").exists() or next(inside.glob("*.distcp"), None) is not None:
        return f"a checkpoint of torch.distributed, as Megatron-LM's torch_dist format has it{count}; its metadata is pickle"
    if next(inside.glob("mp_rank_*"), None) is not None:
        return f"a checkpoint of Megatron-LM in its legacy format, a pickled file for each rank{count}"
    if next(inside.glob("global_step*"), None) is not None or (path / "zero_to_fp32.py").exists():
        return "a checkpoint of DeepSpeed, in pickled files"
    pickled = sorted(p.name for pattern in _PICKLED for p in path.glob(pattern))
    if (path / "config.json").is_file():
        found = f"pickled weights only ({pickled[0]})" if pickled else "no weights"
        if weights := list(path.glob("*.safetensors")):
            found = format_count(len(weights), "safetensors file")
        return f"a Hugging Face folder with {found}; load it with --load, or import it with: pentatron import {path} OUT"
    kind = "a folder with pickled files, which are not read here: reading them may run code"
    return kind if pickled else None


def reshard_step(words: Sequence[str]) -> int:
    from pentatron.checkpoint.find import find_step, format_layout
    from pentatron.checkpoint.format import verify_files
    from pentatron.compare.reshard import ENTRY, layout_for, reshard
    from pentatron.monitor.display import open_display

    plain = list(takewhile(lambda word: not is_flag(word), words[:2]))
    options, rest = parse_options_and_settings(ReshardOptions, words[len(plain) :], ENTRY)
    if len(plain) < 2:
        raise UserError("expected the step and the output first: pentatron checkpoint reshard STEP OUT [...]")
    source, out = map(Path, plain)

    def write() -> int:
        step, complaints = find_step(source, None if options.no_check else verify_files)
        config = layout_for(step, rest)
        for complaint in complaints:
            say(f"note: {complaint}; {step.folder.name} is used")
        with contextlib.closing(open_display(options.progress_bar)) as display:
            written, amount = reshard(step, out, config, display)
        before, after = format_layout(step.manifest.config), format_layout(config.nested())
        same = f"bit by bit equal to {step.folder} (any layout loads either)"
        say(f"{written}: {before} as {after}, {amount}, {same}")
        return 0

    return run_interruptible(out, write)

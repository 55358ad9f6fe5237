"""`pentatron checkpoint`: looking at steps, checking, comparing, rewriting and removing them."""

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentatron.cli.convert import until_stopped
from pentatron.cli.file_errors import file_errors_told
from pentatron.cli.help import section_help
from pentatron.cli.options import read_options
from pentatron.cli.terminal import remark, say
from pentatron.config.flags import did_you_mean, is_flag, parse_flags
from pentatron.errors import UserError
from pentatron.text import counted, decimal_size

if TYPE_CHECKING:
    from pentatron.checkpoint.checking import Problem
    from pentatron.checksums import Tell
    from pentatron.hf.progress import Progress

USAGE = """usage: pentatron checkpoint COMMAND [...]

A PATH is a run, the folder of its checkpoints, or one step of them, saved in any layout. Nothing is ever unpickled.

  inspect PATH [--tensors [PATTERN]] [--stats] [--json]
                              the steps of a run; of one step, its model, layout, state, files and tensors
  verify PATH ... [--numbers] [--threads N] [--json]
                              every checksum, and whether every number is one; ends with code 1 if anything is wrong
  diff A B [--weights-only] [--tolerance X] [--json]
                              settings, state and tensors of two steps; ends with code 1 if they differ; either may be a
                              Hugging Face folder, then weights are compared
  reshard STEP OUT [--tensor-model-parallel-size N ...]
                              the same step in the files that another layout would have written
  prune PATH --keep N [--keep-every M] [--dry-run]
                              remove old steps, by the rule of a run's own retention (--keep-checkpoints N,
                              --save-retain-interval M)

`--progress-bar auto|on|off` goes with verify, diff and reshard.
"""
RESHARD_USAGE = """usage: pentatron checkpoint reshard STEP OUT [--setting value ...]

Writes the files that a run in another layout would have written: more of them for many readers, or fewer. Any layout loads any
step as it is, so nothing needs this to go on training. Sizes that are not named are 1; --world-size N says how many processes
there are, if not just those of one copy. OUT is compared with STEP, bit by bit, before it appears.

  --no-check        do not compare the checksums of STEP first
  --progress-bar auto|on|off

  pentatron checkpoint reshard runs/mine/checkpoints/step-00001000 resharded --tensor-model-parallel-size 4 --zero-stage 1

The settings of a layout:
"""
_PROGRESS = {"progress-bar": "auto"}


def checkpoint_command(words: Sequence[str]) -> int:
    with file_errors_told():
        return _run(words)


def _run(words: Sequence[str]) -> int:
    asks = "--help" in words or "-h" in words
    if asks and words[0] == "reshard":
        from pentatron.train.resharding import ENTRY

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
    words: Sequence[str],
    defaults: dict[str, Any],
    least: int,
    most: int | None,
    example: str,
    also: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    options, plain = read_options(words, defaults, "pentatron checkpoint", also)
    if len(plain) < least or (most is not None and len(plain) > most):
        raise UserError(f"say which checkpoint: pentatron checkpoint {example}")
    if options.get("progress-bar", "auto") not in ("auto", "on", "off"):
        raise UserError(f"--progress-bar {options['progress-bar']}: choose one of auto, on, off")
    return options, plain


def _inspect(words: Sequence[str]) -> int:
    from pentatron.cli.checkpoint_show import inspect

    return inspect(words)


def _verify(words: Sequence[str]) -> int:
    defaults = {**_PROGRESS, "numbers": False, "threads": 0, "json": False}
    options, paths = read_checkpoint_options(words, defaults, 1, None, "verify PATH")
    from pentatron.checkpoint.checking import check_numbers, check_sums, open_manifest
    from pentatron.monitor.display import Silent, open_display

    folders = [folder for path in paths for folder in step_folders(Path(path))]
    threads = options["threads"] or min(8, os.cpu_count() or 1)
    display = Silent() if options["json"] else open_display(options["progress-bar"])
    judged: list[dict[str, Any]] = []
    try:
        for folder in folders:
            manifest, problems = open_manifest(folder)
            if manifest is not None:
                total = sum(record.bytes for record in manifest.files.values())
                progress = _progress(display, f"verifying {folder.name}", total * (1 + options["numbers"]))
                problems = check_sums(folder, manifest, threads, _counting(progress))
                if options["numbers"] and not problems:
                    problems = check_numbers(folder, manifest, _counting(progress))
                done = f"{counted(len(manifest.files), 'file')}, {decimal_size(total)}"
                if not problems and not options["json"]:
                    also = ", every number finite" if options["numbers"] else ""
                    display.say(f"{folder}: ok ({done}, {counted(len(manifest.tensors), 'tensor')}{also})")
            if problems and not folder.exists():
                remark(f"{folder} was removed while this command ran, as a run does with old steps")
                continue
            for problem in problems if not options["json"] else ():
                display.say(f"{folder}: DAMAGED: {problem.sentence}")
            judged.append(_verdict(folder, problems))
    finally:
        display.close()
    if options["json"]:
        say(json.dumps(judged, indent=1))
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
    from pentatron.checkpoint.foreign import foreign_kind

    if not path.exists():
        return UserError(f"{path} does not exist; name a run, its checkpoints, or one step of them")
    kind = foreign_kind(path)
    what = f"it is {kind}" if kind else "it has no step; name a run, its checkpoints, or one step of them"
    return UserError(f"{path} holds no checkpoint of ours: {what}")


def _progress(display: Any, what: str, total: int) -> "Progress":
    from pentatron.hf.progress import Progress

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
    from pentatron.train.resharding import ENTRY

    plain = list(takewhile(lambda word: not is_flag(word), words[:2]))
    rest, own = _own_options(words[len(plain) :])
    parse_flags(rest, ENTRY)
    if len(plain) < 2:
        raise UserError("say what to rewrite, and where, first: pentatron checkpoint reshard STEP OUT [...]")
    source, out = Path(plain[0]), Path(plain[1])
    return until_stopped(out, lambda: _run_reshard(source, out, rest, own))


def _own_options(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The flags of the layout, and ours among them."""
    own: dict[str, Any] = {"no-check": False, **_PROGRESS}
    rest = list(words)
    if "--no-check" in rest:
        rest.remove("--no-check")
        own["no-check"] = True
    place = next((i for i, word in enumerate(rest) if word.startswith("--progress-bar")), None)
    if place is not None:
        taken = rest[place : place + (1 if "=" in rest[place] else 2)]
        del rest[place : place + len(taken)]
        own |= read_checkpoint_options(taken, _PROGRESS, 0, 0, "reshard STEP OUT")[0]
    return rest, own


def _run_reshard(source: Path, out: Path, words: Sequence[str], own: dict[str, Any]) -> int:
    from pentatron.checkpoint.find import find_step
    from pentatron.checkpoint.manifest import verify_files
    from pentatron.checkpoint.survey import layout_words
    from pentatron.monitor.display import open_display
    from pentatron.train.resharding import layout_for, reshard

    found, complaints = find_step(source, None if own["no-check"] else verify_files)
    config = layout_for(found, words)
    for complaint in complaints:
        say(f"note: {complaint}; {found.folder.name} is taken")
    display = open_display(own["progress-bar"])
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

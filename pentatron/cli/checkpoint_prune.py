"""`pentatron checkpoint prune`: removes old steps by the retention rule of a run, but never the newest intact
one."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pentatron.checkpoint.lock import lock_folder
from pentatron.checkpoint.retention import Retention, read_base_steps, remove_steps
from pentatron.checkpoint.store import CheckpointStore
from pentatron.checkpoint.verify import StepProblem, open_manifest, verify_digests
from pentatron.checksums import ProgressCallback
from pentatron.cli.checkpoint import PruneOptions, no_checkpoint_error
from pentatron.cli.output import show_report
from pentatron.cli.subcommands import parse_options_and_paths
from pentatron.errors import UserError
from pentatron.monitor.terminal import ignore_output_errors
from pentatron.text import decimal_size, format_count


@dataclass(frozen=True)
class Pruning:
    """The steps to remove and to keep. `verified` and `bases` are always kept; `damaged` steps newer than it
    are kept for inspection."""

    removed: list[Path]
    kept: list[Path]
    verified: Path
    bases: list[Path]
    damaged: list[StepProblem]


def plan_pruning(steps: Path, rule: Retention, threads: int, progress: ProgressCallback) -> Pruning:
    """Selects the steps to remove. Compares the checksums of the newest step, and of older ones only if it is
    damaged."""
    names = read_base_steps(steps).steps
    all_steps = CheckpointStore(steps, keep=None).steps()
    saved, bases = ([p for p in all_steps if (p.name in names) is is_base] for is_base in (False, True))
    damaged: list[StepProblem] = []
    for number in range(len(saved), 0, -1):
        step = saved[number - 1]
        manifest, problems = open_manifest(step)
        if manifest is not None:
            problems = verify_digests(step, manifest, threads, progress)
        if not problems:
            removed = rule.outdated(saved[:number], protected=[step])
            kept = [p for p in saved if p not in removed]
            return Pruning(removed, kept, step, bases, damaged)
        damaged += problems[:1]
    reason = damaged[0].sentence if damaged else "there are only base steps, which runs were started from"
    raise UserError(f"no step of {steps} is intact and could be kept ({reason}); nothing is removed")


def prune(words: Sequence[str]) -> int:
    options, paths = parse_options_and_paths(PruneOptions, words, "checkpoint prune PATH --keep N", 1, 1)
    if not options.dry_run:
        ignore_output_errors()
    from pentatron.checkpoint.find import find_steps_folder, is_step

    path = Path(paths[0])
    if is_step(path):
        raise UserError(f"{path} is one step; name the run or the folder that contains its steps")
    steps = find_steps_folder(path)
    if steps is None:
        raise no_checkpoint_error(path)
    steps = steps.resolve()
    rule = Retention(options.keep, options.keep_every or None)
    # Takes the same lock as a training job.
    with lock_folder(steps, advice="or let it remove old steps itself (--keep-checkpoints N)"):
        pruning = plan_pruning(steps, rule, min(8, os.cpu_count() or 1), lambda _: None)
        files = {step: filter(Path.is_file, step.rglob("*")) for step in pruning.removed}
        sizes = {step.name: sum(file.lstat().st_size for file in held) for step, held in files.items()}
        if not options.dry_run:
            remove_steps(steps, pruning.removed)
    word = "would remove" if options.dry_run else "removed"
    notes = [f"note: {problem.sentence}; it is kept and not counted" for problem in pruning.damaged]
    lines = [f"{word} {name}: {decimal_size(size)}" for name, size in sizes.items()]
    total, stay = sum(sizes.values()), len(pruning.bases) + len(pruning.kept)
    left = f"{stay} kept, and {pruning.verified.name} is verified"
    lines.append(f"{steps}: {word} {format_count(len(sizes), 'step')}, {decimal_size(total)}; {left}")
    kept, bases = ([step.name for step in steps] for steps in (pruning.kept, pruning.bases))
    data = {"removed": sizes, "bytes": total, "dry_run": options.dry_run, "kept": kept, "bases": bases}
    data |= {"verified": pruning.verified.name, "damaged": [problem.sentence for problem in pruning.damaged]}
    show_report(pruning, options.json, lambda _: [*notes, *lines], lambda _: data)
    return 0

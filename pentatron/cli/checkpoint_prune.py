"""`pentatron checkpoint prune`: old steps removed by hand, by the rule of a run's own retention."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentatron.cli.checkpoint import PruneOptions, nothing_at, read_checkpoint_options
from pentatron.cli.report_output import show
from pentatron.errors import UserError
from pentatron.monitor.terminal import outlive_output
from pentatron.text import counted, decimal_size

if TYPE_CHECKING:
    from pentatron.checkpoint.pruning import Pruning


def prune(words: Sequence[str]) -> int:
    options, paths = read_checkpoint_options(PruneOptions, words, 1, 1, "prune PATH --keep N")
    if not options.dry_run:
        outlive_output()
    from pentatron.checkpoint import pruning
    from pentatron.checkpoint.find import is_step, steps_at
    from pentatron.checkpoint.retention import Retention

    path = Path(paths[0])
    if is_step(path):
        raise UserError(f"{path} is one step; name the run or the folder that its steps lie in")
    steps = steps_at(path)
    if steps is None:
        raise nothing_at(path)
    steps = steps.resolve()
    rule = Retention(options.keep, options.keep_every or None)
    with pruning.exclusive_access(steps):
        planned = pruning.plan_pruning(steps, rule, min(8, os.cpu_count() or 1), lambda _: None)
        sizes = {step: _bytes(step) for step in planned.removed}
        if not options.dry_run:
            pruning.prune(steps, planned)
    report = _Pruned(steps, planned, sizes, options.dry_run)
    show(report, options.json, _as_text, _as_data)
    return 0


@dataclass(frozen=True)
class _Pruned:
    """What was removed, or would be: the bytes of every step, and what stays."""

    steps: Path
    plan: "Pruning"
    sizes: Mapping[Path, int]
    dry_run: bool

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


def _as_text(report: _Pruned) -> Iterator[str]:
    for problem in report.plan.damaged:
        yield f"note: {problem.sentence}; it is not counted, and stays"
    word = "would remove" if report.dry_run else "removed"
    for step, size in report.sizes.items():
        yield f"{word} {step.name}: {decimal_size(size)}"
    stays = [*report.plan.bases, *report.plan.kept]
    yield (
        f"{report.steps}: {word} {counted(len(report.sizes), 'step')}, {decimal_size(report.total)}; "
        f"{len(stays)} stay{'s' * (len(stays) == 1)}, and {report.plan.verified.name} is verified"
    )


def _as_data(report: _Pruned) -> dict[str, Any]:
    return {
        "removed": {step.name: size for step, size in report.sizes.items()},
        "bytes": report.total,
        "dry_run": report.dry_run,
        "kept": [step.name for step in report.plan.kept],
        "bases": [step.name for step in report.plan.bases],
        "verified": report.plan.verified.name,
        "damaged": [problem.sentence for problem in report.plan.damaged],
    }


def _bytes(step: Path) -> int:
    return sum(file.lstat().st_size for file in step.rglob("*") if file.is_file())

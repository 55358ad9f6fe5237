"""`pentatron checkpoint prune`: old steps removed by hand, by the rule of a run's own retention."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from pentatron.cli.checkpoint import nothing_at, read_checkpoint_options
from pentatron.cli.terminal import say
from pentatron.errors import UserError
from pentatron.monitor.terminal import outlive_output
from pentatron.text import counted, decimal_size

# What the trainer calls the same.
_AS_IN_A_RUN = {"keep-checkpoints": "keep", "save-retain-interval": "keep-every"}


def prune(words: Sequence[str]) -> int:
    defaults = {"keep": 0, "keep-every": 0, "dry-run": False, "json": False}
    options, paths = read_checkpoint_options(words, defaults, 1, 1, "prune PATH --keep N", _AS_IN_A_RUN)
    if not options["dry-run"]:
        outlive_output()
    if options["keep"] < 1:
        raise UserError(
            "say how many of the newest steps stay, one at least: pentatron checkpoint prune PATH --keep N"
        )
    if options["keep-every"] < 0:
        raise UserError(f"--keep-every {options['keep-every']}: it is a number of steps, 1 or more")
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
    rule = Retention(options["keep"], options["keep-every"] or None)
    with pruning.exclusive_access(steps):
        planned = pruning.plan_pruning(steps, rule, min(8, os.cpu_count() or 1), lambda _: None)
        sizes = {step: _bytes(step) for step in planned.removed}
        if not options["dry-run"]:
            pruning.prune(steps, planned)
    total = sum(sizes.values())
    if options["json"]:
        data = {
            "removed": {step.name: size for step, size in sizes.items()},
            "bytes": total,
            "dry_run": options["dry-run"],
            "kept": [step.name for step in planned.kept],
            "bases": [step.name for step in planned.bases],
            "verified": planned.verified.name,
            "damaged": [problem.sentence for problem in planned.damaged],
        }
        say(json.dumps(data, indent=1))
        return 0
    for problem in planned.damaged:
        say(f"note: {problem.sentence}; it is not counted, and stays")
    word = "would remove" if options["dry-run"] else "removed"
    for step, size in sizes.items():
        say(f"{word} {step.name}: {decimal_size(size)}")
    stays = [*planned.bases, *planned.kept]
    say(
        f"{steps}: {word} {counted(len(sizes), 'step')}, {decimal_size(total)}; {len(stays)} stay{'s' * (len(stays) == 1)}, and {planned.verified.name} is verified"
    )
    return 0


def _bytes(step: Path) -> int:
    return sum(file.lstat().st_size for file in step.rglob("*") if file.is_file())

"""Removing old steps by hand, with nobody writing them: the newest one that is whole, sums compared, always stays."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from pentatron.checkpoint.bases import read_bases
from pentatron.checkpoint.checking import Problem, check_sums, open_manifest
from pentatron.checkpoint.lock import FolderLock, folder_lock
from pentatron.checkpoint.retention import Retention, remove_steps
from pentatron.checkpoint.store import CheckpointStore
from pentatron.checksums import Tell
from pentatron.errors import UserError


@dataclass(frozen=True)
class Pruning:
    """`verified` stays whatever the rule says, as do `bases`; `damaged` are newer than it, and stay to be looked at."""

    removed: list[Path]
    kept: list[Path]
    verified: Path
    bases: list[Path]
    damaged: list[Problem]


def exclusive_access(steps: Path) -> AbstractContextManager[FolderLock]:
    """Holds the folder of steps, as a job does that saves there."""
    return folder_lock(steps, way_out="or let it remove old steps itself (--keep-checkpoints N)")


def plan_pruning(steps: Path, rule: Retention, threads: int, tell: Tell) -> Pruning:
    """What would go. Reads the newest step whole, and older ones only if it is damaged."""
    names = read_bases(steps) or frozenset()
    found = CheckpointStore(steps, keep=None).steps()
    own, bases = ([p for p in found if (p.name in names) is of] for of in (False, True))
    damaged: list[Problem] = []
    for number in range(len(own), 0, -1):
        step = own[number - 1]
        manifest, problems = open_manifest(step)
        if manifest is not None:
            problems = check_sums(step, manifest, threads, tell)
        if not problems:
            removed = rule.outdated(own[:number], protected=[step])
            kept = [p for p in own if p not in removed]
            return Pruning(removed, kept, step, bases, damaged)
        damaged += problems[:1]
    reason = damaged[0].sentence if damaged else "there are only steps that a run began from"
    raise UserError(
        f"no step of {steps} can be trusted to be the one that stays ({reason}); nothing is removed"
    )


def prune(steps: Path, pruning: Pruning) -> None:
    remove_steps(steps, pruning.removed)

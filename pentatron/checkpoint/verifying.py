"""Checksums compared by all ranks: each reads a part of the files, and all learn one verdict.

One rank alone would read a large checkpoint for as long as all of them take together, while they wait.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pentatron.checkpoint.manifest import (
    FILE_NAME,
    DamagedCheckpoint,
    Manifest,
    check_sizes,
    verify_some,
)
from pentatron.errors import UserError
from pentatron.parallel.collectives import Group, broadcast_object, gather_objects, on_some_ranks
from pentatron.parallel.values import sendable

T = TypeVar("T")
# Raises DamagedCheckpoint if the files of a step are not what its manifest says.
Check = Callable[[Path, Manifest], None]


@sendable
@dataclass(frozen=True)
class Obstacle:
    """What a rank met: damage, or else a disk or permissions that may be better tomorrow."""

    text: str
    is_damage: bool


def share_of(names: Sequence[str], rank: int, ranks: int) -> list[str]:
    """The files that one of so many ranks reads. In the layout that saved them these are the ones it will load."""
    return [name for i, name in enumerate(sorted(names)) if i * ranks // len(names) == rank]


def problem_of_share(
    folder: Path, manifest: Manifest, rank: int, ranks: int, cold: bool = False
) -> Obstacle | None:
    """What is wrong with this rank's share of a step's files."""
    try:
        if rank == 0:
            check_sizes(folder, manifest)
        verify_some(folder, manifest, share_of(list(manifest.files), rank, ranks), cold)
    except DamagedCheckpoint as damage:
        return Obstacle(str(damage), is_damage=True)
    except OSError as error:
        return Obstacle(
            f"{error.filename or folder} cannot be read ({error.strerror or error})", is_damage=False
        )
    return None


def searched_together(search: Callable[[Check], T], group: Group) -> T:
    """What rank 0 finds, on every rank, or its error; all ranks help to check what it looks at. Every rank must ask."""

    def lead() -> T:
        try:
            return search(lambda folder, manifest: _check_together(folder, manifest, group))
        finally:
            # The others stop waiting for something to check.
            broadcast_object(None, group)

    def help_the_first() -> None:
        while (asked := broadcast_object(None, group)) is not None:
            folder, manifest = asked
            _problems(folder, manifest, group)

    found = on_some_ranks(True, lead if group.rank == 0 else help_the_first, group)
    told: T = broadcast_object(found, group)
    return told


def _check_together(folder: Path, manifest: Manifest, group: Group) -> None:
    broadcast_object((folder, manifest), group)
    problems = _problems(folder, manifest, group)
    for rank, problem in problems:
        if not problem.is_damage:
            raise UserError(problem.text if group.size == 1 else f"rank {rank}: {problem.text}")
    if problems:
        raise DamagedCheckpoint(problems[0][1].text)


def _problems(folder: Path, manifest: Manifest, group: Group) -> list[tuple[int, Obstacle]]:
    """Of every rank that has one, with its number. Ranks that see the same folder divide its files; one that sees another, a copy on its own
    machine, say, checks that one."""
    seen = gather_objects(_identity(folder), group)
    alike = [rank for rank, identity in enumerate(seen) if identity == seen[group.rank]]
    if seen[group.rank] is None:
        mine: Obstacle | None = Obstacle(
            f"{folder} is not there for this rank; put the checkpoint where all machines see it, or on each of them",
            is_damage=False,
        )
    else:
        mine = problem_of_share(folder, manifest, alike.index(group.rank), len(alike))
    return [(r, problem) for r, problem in enumerate(gather_objects(mine, group)) if problem is not None]


def _identity(folder: Path) -> tuple[int, int, int] | None:
    """The same for all that see the same manifest, over a network too, and another one for a copy of it."""
    try:
        found = (folder / FILE_NAME).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns

"""Checksums compared by all ranks: each reads a part of the files, and all learn one verdict.

One rank alone would read a large checkpoint for as long as all of them take together, while they wait.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from pentatron.checkpoint.format import (
    FILE_NAME,
    DamagedCheckpoint,
    Manifest,
    check_sizes,
    read_manifest,
    verify_some,
    what_is_damaged,
)
from pentatron.checkpoint.load import StepReader
from pentatron.checkpoint.retention import number_of
from pentatron.checkpoint.tensor_file import DTYPES, blocks
from pentatron.checksums import Tell, digest_of_file
from pentatron.errors import UserError
from pentatron.parallel.collectives import Group, broadcast_object, gather_objects, on_some_ranks
from pentatron.parallel.encoding import sendable
from pentatron.parallel.shards import Shape

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


# Numbers about the tensors of a step, found a block at a time: smallest, largest, mean, norm, and what is no
# number.


@dataclass
class Statistics:
    """`least`, `most`, `mean` and `norm` are those of the numbers that are finite."""

    elements: int = 0
    nans: int = 0
    infinities: int = 0
    least: float = math.inf
    most: float = -math.inf
    first_bad: list[int] | None = None
    _sum: float = field(default=0.0, repr=False)
    _squares: float = field(default=0.0, repr=False)

    @property
    def finite(self) -> int:
        return self.elements - self.nans - self.infinities

    @property
    def mean(self) -> float:
        return self._sum / self.finite if self.finite else math.nan

    @property
    def norm(self) -> float:
        return math.sqrt(self._squares)

    def add(self, values: Tensor, start: Shape) -> None:
        """The next block; `start` is where it lies in its tensor."""
        exact = values.detach().double()
        finite = exact.isfinite()
        self.elements += exact.numel()
        if not bool(finite.all()):
            if self.first_bad is None:
                inside = (~finite).nonzero()[0].tolist()
                self.first_bad = [i + j for i, j in zip(start, inside, strict=True)]
            nans = int(exact.isnan().sum())
            self.nans += nans
            self.infinities += int((~finite).sum()) - nans
            exact = exact[finite]
        if exact.numel():
            self.least = min(self.least, float(exact.min()))
            self.most = max(self.most, float(exact.max()))
            self._sum += float(exact.sum())
            self._squares += float(exact.square().sum())


def read_blocks(reader: StepReader, name: str) -> Iterator[tuple[Shape, Tensor]]:
    """A tensor in blocks of bounded size: where each begins, and its values, in the order of memory."""
    record = reader.manifest.tensors[name]
    for start, size in blocks(record.shape, DTYPES[record.dtype].itemsize):
        yield start, reader.read(name, start, size)


@torch.no_grad()
def statistics_of(reader: StepReader, name: str) -> Statistics:
    found = Statistics()
    for start, values in read_blocks(reader, name):
        found.add(values, start)
    return found


# Everything that is wrong with a step, rather than the first thing: `newest_valid` needs to know that, people
# need to know what.


@dataclass(frozen=True)
class Problem:
    """`file`, `tensors` (those it touches), `expected` and `found` where they are known; `sentence` says it all."""

    sentence: str
    file: str = ""
    tensors: tuple[str, ...] = ()
    expected: str = ""
    found: str = ""


def open_manifest(folder: Path) -> tuple[Manifest | None, list[Problem]]:
    """The manifest of a step, if it can be trusted so far; files have their sizes, their content is not read."""
    try:
        manifest = read_manifest(folder)
    except (DamagedCheckpoint, UserError) as error:
        return None, [Problem(str(error))]
    number = number_of(folder)
    if number is not None and number != manifest.step:
        said = f"{folder} says it is step {manifest.step}"
        return None, [Problem(said, expected=str(number), found=str(manifest.step))]
    return manifest, []


def check_sums(folder: Path, manifest: Manifest, threads: int, tell: Tell) -> list[Problem]:
    """Reads every file, several at a time, and compares its sum with the manifest's."""

    def check(name: str) -> list[Problem]:
        return list(_check_sum(folder, manifest, name, tell))

    with ThreadPoolExecutor(max(1, threads)) as pool:
        return [problem for problems in pool.map(check, manifest.files) for problem in problems]


def _check_sum(folder: Path, manifest: Manifest, name: str, tell: Tell) -> Iterator[Problem]:
    record, path = manifest.files[name], folder / name
    expected = record.sha256
    try:
        found = digest_of_file(path, record.block_bytes, tell=tell)
        if found == expected:
            return
        names, said = what_is_damaged(path, manifest)
    except OSError as error:
        names = manifest.tensors_in(name)
        yield Problem(f"{path} cannot be read ({error.strerror or error})", name, tuple(names))
        return
    sentence = f"{path}: sha256 is {found[:12]}…, not {expected[:12]}…; {said}"
    yield Problem(sentence, name, tuple(names), expected, found)


def check_numbers(folder: Path, manifest: Manifest, tell: Tell) -> list[Problem]:
    """Every tensor of real numbers, for what is none. A NaN that was saved is no damage of a file: its sum is right."""
    found: list[Problem] = []
    with StepReader(folder, manifest) as reader:
        for name, record in manifest.tensors.items():
            if not DTYPES[record.dtype].is_floating_point:
                continue
            try:
                numbers = statistics_of(reader, name)
            except UserError as error:
                found.append(Problem(str(error), tensors=(name,)))
                continue
            tell(numbers.elements * DTYPES[record.dtype].itemsize)
            if numbers.finite < numbers.elements:
                said = f"{numbers.nans:,} NaN and {numbers.infinities:,} infinite"
                found.append(
                    Problem(
                        f"{folder}: {name} has {said} of {numbers.elements:,} elements, the first at {numbers.first_bad}",
                        tensors=(name,),
                        expected="finite numbers",
                        found=said,
                    )
                )
    return found

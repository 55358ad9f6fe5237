"""Verifies the files of a step on all ranks: each reads a share, and all get the same result.

Also finds all problems of a step. A single rank would need as long as all ranks together, while the others
wait.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from pentatron.checkpoint import format
from pentatron.checkpoint.format import DamagedCheckpoint, Manifest, read_manifest
from pentatron.checkpoint.load import StepReader
from pentatron.checkpoint.retention import step_number
from pentatron.checkpoint.tensor_file import DTYPES
from pentatron.checksums import ProgressCallback, digest_of_file
from pentatron.errors import UserError
from pentatron.parallel.collectives import Group, broadcast_object, gather_objects, run_on_all_ranks
from pentatron.parallel.serialization import sendable
from pentatron.parallel.sharding import Shape

T = TypeVar("T")
# Raises DamagedCheckpoint if the files of a step differ from its manifest.
Check = Callable[[Path, Manifest], None]


@sendable
@dataclass(frozen=True)
class VerificationProblem:
    """Why a rank could not verify: damage, or an I/O error or permissions that may be temporary."""

    text: str
    is_damage: bool


def files_of_rank(names: Sequence[str], rank: int, ranks: int) -> list[str]:
    """Files that one rank reads. In the layout that saved them, these are the ones it loads afterwards."""
    return [name for i, name in enumerate(sorted(names)) if i * ranks // len(names) == rank]


def verify_rank_share(
    folder: Path, manifest: Manifest, rank: int, ranks: int, cold: bool = False
) -> VerificationProblem | None:
    """Verifies this rank's share of a step's files. Returns the problem, or None."""
    try:
        if rank == 0:
            format.check_sizes(folder, manifest)
        format.verify_files(folder, manifest, files_of_rank(list(manifest.files), rank, ranks), cold)
    except DamagedCheckpoint as damage:
        return VerificationProblem(str(damage), is_damage=True)
    except OSError as error:
        return VerificationProblem(
            f"{error.filename or folder} cannot be read ({error.strerror or error})", is_damage=False
        )
    return None


def search_on_all_ranks(search: Callable[[Check], T], group: Group) -> T:
    """Runs `search` on rank 0 and returns its result, or raises its error, on all ranks. Collective.

    The check passed to `search` is distributed over all ranks.
    """

    def lead() -> T:
        try:
            return search(lambda folder, manifest: _check_on_all_ranks(folder, manifest, group))
        finally:
            # Ends `serve_checks` on the other ranks.
            broadcast_object(None, group)

    def serve_checks() -> None:
        while (request := broadcast_object(None, group)) is not None:
            folder, manifest = request
            _problems(folder, manifest, group)

    result_here = run_on_all_ranks(lead if group.rank == 0 else serve_checks, group)
    result: T = broadcast_object(result_here, group)
    return result


def _check_on_all_ranks(folder: Path, manifest: Manifest, group: Group) -> None:
    """Verifies a step on all ranks; called by rank 0, while the others serve its requests."""
    broadcast_object((folder, manifest), group)
    problems = _problems(folder, manifest, group)
    for rank, problem in problems:
        if not problem.is_damage:
            raise UserError(problem.text if group.size == 1 else f"rank {rank}: {problem.text}")
    if problems:
        raise DamagedCheckpoint(problems[0][1].text)


def _problems(folder: Path, manifest: Manifest, group: Group) -> list[tuple[int, VerificationProblem]]:
    """Returns the problems of all ranks that have one, with their ranks. Collective.

    Ranks that see the same folder share its files. A rank that sees another one, such as a copy on its own
    node, verifies that.
    """
    identities = gather_objects(_identity(folder), group)
    same_folder = [rank for rank, identity in enumerate(identities) if identity == identities[group.rank]]
    text = f"{folder} does not exist for this rank; put the checkpoint where all machines see it, or on each of them"
    problem_here: VerificationProblem | None = VerificationProblem(text, is_damage=False)
    if identities[group.rank] is not None:
        problem_here = verify_rank_share(folder, manifest, same_folder.index(group.rank), len(same_folder))
    problems = enumerate(gather_objects(problem_here, group))
    return [(rank, problem) for rank, problem in problems if problem is not None]


def _identity(folder: Path) -> tuple[int, int, int] | None:
    """Identifies a manifest file: equal on all nodes that mount it, different for a copy.

    None if it does not exist.
    """
    try:
        status = (folder / format.MANIFEST_FILE).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


# --- statistics of tensors ---


@dataclass
class TensorStatistics:
    """Statistics of a tensor. `least`, `most`, `mean` and `norm` cover its finite elements."""

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
        """Adds the next block; `start` is its position in the tensor."""
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


@torch.no_grad()
def tensor_statistics(reader: StepReader, name: str) -> TensorStatistics:
    """Returns the statistics of a tensor of a step."""
    statistics = TensorStatistics()
    for start, values in reader.read_blocks(name):
        statistics.add(values, start)
    return statistics


# --- all problems of a step, for `pentatron checkpoint verify` ---


@dataclass(frozen=True)
class StepProblem:
    """A problem of a step.

    `tensors`: those affected. `expected` and `found`: if known. `sentence`: the full message.
    """

    sentence: str
    file: str = ""
    tensors: tuple[str, ...] = ()
    expected: str = ""
    found: str = ""


def open_manifest(folder: Path) -> tuple[Manifest | None, list[StepProblem]]:
    """Reads the manifest and checks the sizes of the files, not their content."""
    try:
        manifest = read_manifest(folder)
    except (DamagedCheckpoint, UserError) as error:
        return None, [StepProblem(str(error))]
    number = step_number(folder)
    if number in (None, manifest.step):
        return manifest, []
    sentence = f"{folder} contains step {manifest.step}"
    return None, [StepProblem(sentence, expected=str(number), found=str(manifest.step))]


def verify_digests(
    folder: Path, manifest: Manifest, threads: int, tell: ProgressCallback
) -> list[StepProblem]:
    """Reads every file in parallel and compares its digest with the manifest."""

    def check(name: str) -> list[StepProblem]:
        path, expected = folder / name, manifest.files[name].sha256
        try:
            digest = digest_of_file(path, manifest.files[name].block_bytes, tell=tell)
            if digest == expected:
                return []
            names, sentence = format.locate_damage(path, manifest, digest)
        except OSError as error:
            sentence = f"{path} cannot be read ({error.strerror or error})"
            return [StepProblem(sentence, name, tuple(manifest.tensors_in(name)))]
        return [StepProblem(sentence, name, tuple(names), expected, digest)]

    with ThreadPoolExecutor(max(1, threads)) as pool:
        return [problem for problems in pool.map(check, manifest.files) for problem in problems]


def find_non_finite(folder: Path, manifest: Manifest, tell: ProgressCallback) -> list[StepProblem]:
    """Searches every floating-point tensor for NaN and inf. These are not file damage: the digests match."""
    problems: list[StepProblem] = []
    with StepReader(folder, manifest) as reader:
        for name, record in manifest.tensors.items():
            if not DTYPES[record.dtype].is_floating_point:
                continue
            try:
                statistics = tensor_statistics(reader, name)
            except UserError as error:
                problems.append(StepProblem(str(error), tensors=(name,)))
                continue
            tell(statistics.elements * DTYPES[record.dtype].itemsize)
            if statistics.finite < statistics.elements:
                counts = f"{statistics.nans:,} NaN and {statistics.infinities:,} infinite"
                sentence = f"{folder}: {name} has {counts} of {statistics.elements:,} elements, the first at {statistics.first_bad}"
                problems.append(StepProblem(sentence, "", (name,), "finite numbers", counts))
    return problems

"""Everything that is wrong with a step, rather than the first thing: `newest_valid` needs to know that, people need to know what."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pentatron.checkpoint.load import StepReader
from pentatron.checkpoint.manifest import DamagedCheckpoint, Manifest, read_manifest, what_is_damaged
from pentatron.checkpoint.retention import number_of
from pentatron.checkpoint.statistics import statistics_of
from pentatron.checkpoint.tensor_file import DTYPES
from pentatron.checksums import Tell, digest_of_file
from pentatron.errors import UserError


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

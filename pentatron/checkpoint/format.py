"""The manifest: lists the files and tensors of a checkpoint. It is written last: a folder without one is no checkpoint.

There is one format version. A manifest of another version is refused.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pentatron.checkpoint.tensor_file import DTYPES, TORCH_FILES, FileRecord, piece_sums, write_tensors
from pentatron.checkpoint.untrusted import check_types, is_inside, read_json, too_large
from pentatron.checksums import digest_of_file
from pentatron.errors import UserError
from pentatron.parallel.encoding import sendable
from pentatron.parallel.shards import Fragment, Shape

# Whether some rectangles make up a tensor exactly.


def cover_problem(whole: Shape, parts: Iterable[tuple[Shape, Shape]]) -> str | None:
    """Why the parts, each (start, size), do not hold every element of `whole` exactly once, or None.

    How often an element is held is a function that changes at the corners of the parts alone: their sum is the
    whole if, and only if, all corners but those of the whole cancel. That takes one pass, however many parts
    there are and however they lie.
    """
    signs = [-1 if sum(ends) % 2 else 1 for ends in itertools.product((0, 1), repeat=len(whole))]
    surplus: dict[Shape, int] = {}

    def add(start: Shape, stop: Shape, times: int) -> None:
        for sign, corner in zip(signs, itertools.product(*zip(start, stop, strict=True)), strict=True):
            left = surplus.pop(corner, 0) + sign * times
            if left:
                surplus[corner] = left

    for start, size in parts:
        if not len(start) == len(size) == len(whole):
            return f"a part of {list(size)} elements at {list(start)} has not the dimensions of {list(whole)}"
        stop = tuple(i + n for i, n in zip(start, size, strict=True))
        if not all(0 <= i <= j <= n for i, j, n in zip(start, stop, whole, strict=True)):
            return f"a part of {list(size)} elements at {list(start)} lies outside {list(whole)}"
        add(start, stop, 1)
    add((0,) * len(whole), whole, -1)
    if not surplus:
        return None
    # No corner lies before the first one that is left, so what is left there is what is wrong with that element.
    first = min(surplus)
    times = surplus[first] + 1
    return f"element {list(first)} of {list(whole)} is " + (f"there {times} times" if times else "missing")


FORMAT = "pentatron-checkpoint"
VERSION = 4
FILE_NAME = "manifest.json"


class DamagedCheckpoint(Exception):
    """A checkpoint that cannot be trusted; the text says which file and why."""


@sendable
@dataclass(frozen=True)
class StoredPiece:
    """One stored rectangle of a logical tensor: `shape` elements from `start` on, in `file` under `key`."""

    file: str
    key: str
    start: Shape
    shape: Shape
    # Says which of a damaged file's tensors are damaged; what decides is the sum of the file.
    crc32: str | None = None


@sendable
@dataclass(frozen=True)
class TensorRecord:
    dtype: str
    shape: Shape
    pieces: tuple[StoredPiece, ...]

    def problem(self, name: str) -> str | None:
        """Why the pieces are not this tensor, each element once and under the right key; or None."""
        if self.dtype not in DTYPES:
            return f"its type {self.dtype} is unknown"
        problem = cover_problem(self.shape, ((piece.start, piece.shape) for piece in self.pieces))
        if problem is not None:
            return problem
        for piece in self.pieces:
            if piece.file.endswith(TORCH_FILES):
                # There a key says where in the file, which has no names.
                continue
            # The key repeats where the piece lies: a start that is not the one it was saved with shows here.
            if piece.key != (expected := piece_key(name, self.shape, piece.start, piece.shape)):
                return f"the piece {piece.key} stands where {expected} should be"
        return None


def piece_key(name: str, whole: Shape, start: Shape, shape: Shape) -> str:
    """What a piece is called in its file; the whole tensor keeps its name."""
    if shape == whole:
        return name
    return f"{name}[{','.join(f'{i}:{i + n}' for i, n in zip(start, shape, strict=True))}]"


@sendable
@dataclass(frozen=True)
class Manifest:
    step: int
    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]
    run_state: dict[str, Any]
    config: dict[str, Any]

    def to_json(self) -> str:
        """One line for each file and each tensor: short enough for many pieces, and still readable."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "files": {
                n: {name: value for name, value in vars(r).items() if name != "crc32"}
                for n, r in self.files.items()
            },
            "tensors": {name: _plain(record) for name, record in self.tensors.items()},
            "run_state": self.run_state,
            "config": self.config,
        }
        signed = {**content, "sha256": _digest(content)}
        return "{\n" + ",\n".join(f"{json.dumps(k)}: {_lines(v)}" for k, v in signed.items()) + "\n}\n"

    def tensors_in(self, file: str) -> list[str]:
        return [name for name, record in self.tensors.items() if any(p.file == file for p in record.pieces)]


def _plain(record: TensorRecord) -> dict[str, Any]:
    # `asdict` copies everything deeply, which takes seconds where there are many thousand pieces.
    pieces = [{k: v for k, v in vars(piece).items() if v is not None} for piece in record.pieces]
    return {"dtype": record.dtype, "shape": record.shape, "pieces": pieces}


def _lines(value: Any) -> str:
    if not isinstance(value, Mapping) or not value:
        return json.dumps(value)
    return "{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n}"


def _digest(content: Mapping[str, Any]) -> str:
    """Over the content alone, so that reformatting the file is no damage."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder whose files have the recorded sizes; their content is not read."""
    path = folder / FILE_NAME
    try:
        content = read_json(path)
        found = content.pop("sha256")
        version, intact = content["version"], found == _digest(content)
        # A newer format may compute its checksum in another way.
        if content["format"] == FORMAT and (version > VERSION or (intact and version != VERSION)):
            other = "a newer" if version > VERSION else "an older"
            raise UserError(
                f"{path} has format version {version}, this program knows {VERSION}; use {other} Pentatron"
            )
        if content["format"] != FORMAT or not intact:
            raise DamagedCheckpoint(f"{path} does not match its own checksum")
        check_types(content)
        manifest = Manifest(
            step=content["step"],
            files={name: FileRecord(**record) for name, record in content["files"].items()},
            tensors={name: _tensor(record) for name, record in content["tensors"].items()},
            run_state=content["run_state"],
            config=content["config"],
        )
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing") from None
    except OSError as error:
        # Not damage: the disk or the permissions may be better tomorrow.
        raise UserError(f"{path} cannot be read ({error.strerror or error})") from None
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path} is no manifest ({type(error).__name__}: {error})") from None
    _check_tensors(folder, manifest)
    check_sizes(folder, manifest)
    return manifest


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """The files are those that are listed, no more and no fewer, and have the recorded sizes."""
    for name, record in manifest.files.items():
        _check_file(folder, name, record)
    for path in sorted(path for kind in ("*.safetensors", "*.distcp") for path in folder.glob(kind)):
        # Somebody has put it there: who mixes steps may have taken others away.
        if path.name not in manifest.files:
            raise DamagedCheckpoint(f"{path} is not listed in {FILE_NAME}")


def _tensor(record: Mapping[str, Any]) -> TensorRecord:
    pieces = tuple(
        StoredPiece(p["file"], p["key"], _shape(p["start"]), _shape(p["shape"]), p.get("crc32"))
        for p in record["pieces"]
    )
    return TensorRecord(record["dtype"], _shape(record["shape"]), pieces)


def _shape(numbers: list[Any]) -> Shape:
    if not all(type(n) is int for n in numbers):
        raise ValueError(f"{numbers} is no shape")
    return tuple(numbers)


def _check_tensors(folder: Path, manifest: Manifest) -> None:
    for name, record in manifest.tensors.items():
        problem = record.problem(name)
        if problem is not None:
            raise DamagedCheckpoint(f"{folder / FILE_NAME}: {name}: {problem}")
        if not all(piece.file in manifest.files for piece in record.pieces):
            raise DamagedCheckpoint(f"{folder / FILE_NAME}: {name} lies in a file that is not listed")
    stored = dict.fromkeys(manifest.files, 0)
    for record in manifest.tensors.values():
        for piece in record.pieces:
            stored[piece.file] += math.prod(piece.shape) * DTYPES[record.dtype].itemsize
    sizes = {name: file.bytes for name, file in manifest.files.items()}
    if (file := too_large(stored, sizes)) is not None:
        raise DamagedCheckpoint(
            f"{folder / FILE_NAME} says that {file}, of {sizes[file]} bytes, holds {stored[file]} bytes of tensors"
        )


def _check_file(folder: Path, name: str, record: FileRecord) -> None:
    # A name from a file is not to be trusted with a path.
    if record.name != name or Path(name).name != name:
        raise DamagedCheckpoint(
            f"{folder / FILE_NAME} lists {name} under another name or outside its folder: {record.name}"
        )
    path = folder / name
    if not path.is_file():
        raise DamagedCheckpoint(f"{path} is missing")
    if not is_inside(path, folder):
        raise DamagedCheckpoint(f"{path} is a link that leads out of its step, which is not followed")
    if path.stat().st_size != record.bytes:
        raise DamagedCheckpoint(f"{path} has {path.stat().st_size} bytes, not {record.bytes}")


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Reads every file and compares its checksum."""
    verify_some(folder, manifest, list(manifest.files))


def verify_some(folder: Path, manifest: Manifest, names: Sequence[str], cold: bool = False) -> None:
    """The same for these files, as many at a time as this process has threads. `cold`: as the disk has them, not as memory does."""
    if not names:
        return
    count = torch.get_num_threads()
    of_each = max(1, count // len(names))

    def sum_of(name: str) -> str:
        record = manifest.files[name]
        return digest_of_file(folder / name, record.block_bytes, of_each, cold)

    with ThreadPoolExecutor(max(1, min(len(names), count))) as threads:
        sums = list(threads.map(sum_of, names))
    bad = [(name, found) for name, found in zip(names, sums) if found != manifest.files[name].sha256]
    if bad:
        name, found = bad[0]
        more = f" (and {len(bad) - 1} more files are damaged)" if len(bad) > 1 else ""
        raise DamagedCheckpoint(
            f"{folder / name}: sha256 is {found[:12]}…, not {manifest.files[name].sha256[:12]}…; "
            f"{what_is_damaged(folder / name, manifest)[1]}{more}"
        )


def what_is_damaged(path: Path, manifest: Manifest) -> tuple[list[str], str]:
    """Of a file whose sum is wrong, the tensors that are, as far as their own sums tell; and that as the end of a sentence."""
    pieces = {
        piece.key: (name, piece)
        for name, record in manifest.tensors.items()
        for piece in record.pieces
        if piece.file == path.name
    }
    names = manifest.tensors_in(path.name)
    if not pieces or any(piece.crc32 is None for _, piece in pieces.values()):
        return names, f"it holds {len(names)} tensors, from {names[0] if names else 'none'} on"
    try:
        found = piece_sums(path)
    except (ValueError, TypeError) as error:
        return names, f"its header is damaged ({error}), and with it all {len(pieces)} tensors"
    damaged = [key for key, (_, piece) in pieces.items() if found.get(key) != piece.crc32]
    if not damaged:
        return [], f"its header is damaged, and none of its {len(pieces)} tensors"
    more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
    sentence = f"of its {len(pieces)} tensors {damaged[0]}{more} {'are' if more else 'is'} damaged"
    return list(dict.fromkeys(pieces[key][0] for key in damaged)), sentence


# What one rank puts into a step, and how the parts of all ranks become a manifest.


@sendable
@dataclass(frozen=True)
class Written:
    """What one rank put into the temporary folder, or why it could not: for lack of means, or by our mistake."""

    file: FileRecord | None = None
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    failure: str = ""
    mistake: str = ""


@sendable
@dataclass(frozen=True)
class Verdict:
    """What became of a save: where the step lies, or what went wrong.

    `to_check`: all ranks are to read the step once more before anything older goes. `note`: what else should be told. `lost`: why the
    folder is not the run's any more. `keeps_older`: nothing older may go, as the step may not survive a power cut.
    """

    final: str = ""
    failure: str = ""
    mistake: str = ""
    to_check: bool = False
    note: str = ""
    lost: str = ""
    keeps_older: bool = False


def own_fragments(own: Mapping[str, Tensor]) -> list[Fragment]:
    """Tensors that one rank alone has."""
    return [Fragment(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in own.items()]


def write_part(path: Path, fragments: Sequence[Fragment]) -> Written:
    """Writes one rank's file, if it has anything; errors come back as text, so that the other ranks hear of them."""
    values: dict[str, Tensor] = {}
    records: list[tuple[str, TensorRecord]] = []
    try:
        for fragment in fragments:
            record = _describe(fragment, path.name)
            for piece in record.pieces:
                if piece.key in values:
                    raise ValueError(f"{piece.key} is given twice")
                values[piece.key] = fragment.values
            records.append((fragment.tensor, record))
        if not values:
            return Written(None, _collect(records))
        file = write_tensors(path, values)
        return Written(file, with_sums(_collect(records), file.crc32))
    except OSError as error:
        return Written(failure=error.strerror or str(error))
    except ValueError as error:
        return Written(mistake=str(error))


def _describe(fragment: Fragment, file: str) -> TensorRecord:
    """The record of a fragment's tensor with this one piece; nothing is stored of an empty part."""
    dtype = str(fragment.values.dtype).removeprefix("torch.")
    whole, start, size = tuple(fragment.shape), tuple(fragment.start), tuple(fragment.values.shape)
    if not len(whole) == len(start) == len(size):
        raise ValueError(f"{fragment.tensor} of {list(whole)} has a part {list(size)} at {list(start)}")
    if dtype not in DTYPES:
        raise ValueError(f"{fragment.tensor} is {dtype}, which a checkpoint cannot hold")
    if fragment.values.numel() == 0 and size != whole:
        return TensorRecord(dtype, whole, ())
    key = piece_key(fragment.tensor, whole, start, size)
    return TensorRecord(dtype, whole, (StoredPiece(file, key, start, size),))


def _collect(records: Iterable[tuple[str, TensorRecord]]) -> dict[str, TensorRecord]:
    """One record for each tensor, with the pieces of all its records in the order in which they lie."""
    pieces: dict[str, list[StoredPiece]] = {}
    first: dict[str, TensorRecord] = {}
    for name, record in records:
        known = first.setdefault(name, record)
        if (known.dtype, known.shape) != (record.dtype, record.shape):
            raise ValueError(
                f"{name} is {known.dtype} {list(known.shape)} in one part and "
                f"{record.dtype} {list(record.shape)} in another"
            )
        pieces.setdefault(name, []).extend(record.pieces)
    return {
        name: TensorRecord(r.dtype, r.shape, tuple(sorted(pieces[name], key=lambda piece: piece.start)))
        for name, r in sorted(first.items())
    }


def with_sums(tensors: Mapping[str, TensorRecord], crc32: Mapping[str, str]) -> dict[str, TensorRecord]:
    """Records of what lies in one file, with the sums that were made of it as it was written."""
    return {
        name: replace(r, pieces=tuple(replace(piece, crc32=crc32.get(piece.key)) for piece in r.pieces))
        for name, r in tensors.items()
    }


def whole_tensors(records: Iterable[tuple[str, TensorRecord]]) -> dict[str, TensorRecord]:
    """Every tensor with all its pieces; ValueError unless they make it up exactly."""
    tensors = _collect(records)
    for name, record in tensors.items():
        problem = record.problem(name)
        if problem is not None:
            raise ValueError(f"{name}: {problem}")
    return tensors


def manifest_of(
    step: int, everyone: Sequence[Written], run_state: Mapping[str, Any], config: Mapping[str, Any]
) -> Manifest:
    """What all ranks wrote, once it is sure that the pieces make up every tensor exactly."""
    files = {written.file.name: written.file for written in everyone if written.file is not None}
    tensors = whole_tensors(record for written in everyone for record in written.tensors.items())
    return Manifest(step, files, tensors, dict(run_state), dict(config))

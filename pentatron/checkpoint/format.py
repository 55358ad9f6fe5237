"""The checkpoint manifest: lists the files and tensors of one step.

It is written last; a folder without a manifest is not a checkpoint. There is one format version. Manifests of
other versions are refused.
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

from pentatron.checkpoint.manifest_checks import check_types, read_json
from pentatron.checkpoint.tensor_file import DTYPES, TORCH_FILES, FileRecord, tensor_checksums, write_tensors
from pentatron.checksums import digest_of_file
from pentatron.errors import UserError
from pentatron.parallel.serialization import sendable
from pentatron.parallel.sharding import Fragment, Shape

FORMAT = "pentatron-checkpoint"
VERSION = 4
MANIFEST_FILE = "manifest.json"


class DamagedCheckpoint(Exception):
    """A checkpoint failed its checks. The text names the file and the reason."""


@sendable
@dataclass(frozen=True)
class StoredPiece:
    """A stored rectangle of a logical tensor: `shape` elements from `start`, in `file` under `key`."""

    file: str
    key: str
    start: Shape
    shape: Shape
    # Only locates damage within a file; validity is decided by the file's own digest.
    crc32: str | None = None


@sendable
@dataclass(frozen=True)
class TensorRecord:
    """A logical tensor and the pieces it is stored in."""

    dtype: str
    shape: Shape
    pieces: tuple[StoredPiece, ...]

    def problem(self, name: str) -> str | None:
        """Returns why the pieces do not cover this tensor exactly once under the right keys, or None."""
        if self.dtype not in DTYPES:
            return f"its type {self.dtype} is unknown"
        if problem := cover_problem(self.shape, ((piece.start, piece.shape) for piece in self.pieces)):
            return problem
        for piece in self.pieces:
            if piece.file.endswith(TORCH_FILES):
                # Keys of torch files are positions, as these files have no names.
                continue
            # The key repeats the rectangle, so a start that was changed after saving is detected.
            if piece.key != (expected := piece_key(name, self.shape, piece.start, piece.shape)):
                return f"piece {piece.key} is stored where {expected} is expected"
        return None


def piece_key(name: str, whole: Shape, start: Shape, shape: Shape) -> str:
    """Returns the key of a piece in its file; a whole tensor is stored under its own name."""
    if shape == whole:
        return name
    return f"{name}[{','.join(f'{i}:{i + n}' for i, n in zip(start, shape, strict=True))}]"


@sendable
@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint step."""

    step: int
    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]
    run_state: dict[str, Any]
    config: dict[str, Any]

    def to_json(self) -> str:
        """Returns JSON with one line per file and tensor: compact for many pieces, and still readable."""
        tensors = {}
        for name, record in self.tensors.items():
            # `dataclasses.asdict` copies deeply, which takes seconds for many thousand pieces.
            pieces = [{k: v for k, v in vars(piece).items() if v is not None} for piece in record.pieces]
            tensors[name] = {**vars(record), "pieces": pieces}
        files = {name: {k: v for k, v in vars(f).items() if k != "crc32"} for name, f in self.files.items()}
        content = {"format": FORMAT, "version": VERSION, **vars(self), "files": files, "tensors": tensors}
        signed = {**content, "sha256": _digest(content)}
        return "{\n" + ",\n".join(f"{json.dumps(k)}: {_json_lines(v)}" for k, v in signed.items()) + "\n}\n"

    def tensors_in(self, file: str) -> list[str]:
        """Returns the names of the tensors with a piece in this file."""
        return [name for name, record in self.tensors.items() if any(p.file == file for p in record.pieces)]


def _json_lines(value: Any) -> str:
    if not isinstance(value, Mapping) or not value:
        return json.dumps(value)
    return "{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n}"


def _digest(content: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of the parsed content, so that reformatting the file is not damage."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# --- exact cover ---


def cover_problem(whole: Shape, parts: Iterable[tuple[Shape, Shape]]) -> str | None:
    """Returns why the parts, each (start, size), do not cover every element of `whole` exactly once, or None.

    The coverage count is a function that changes only at the corners of the parts, so the parts sum to the
    whole if and only if all corners cancel except those of the whole. This takes one pass, independent of the
    number and arrangement of the parts.
    """
    signs = [-1 if sum(ends) % 2 else 1 for ends in itertools.product((0, 1), repeat=len(whole))]
    surplus: dict[Shape, int] = {}

    def add(start: Shape, stop: Shape, count: int) -> None:
        for sign, corner in zip(signs, itertools.product(*zip(start, stop, strict=True)), strict=True):
            remainder = surplus.pop(corner, 0) + sign * count
            if remainder:
                surplus[corner] = remainder

    for start, size in parts:
        if not len(start) == len(size) == len(whole):
            return f"a part of {list(size)} elements at {list(start)} has other dimensions than {list(whole)}"
        stop = tuple(i + n for i, n in zip(start, size, strict=True))
        if not all(0 <= i <= j <= n for i, j, n in zip(start, stop, whole, strict=True)):
            return f"a part of {list(size)} elements at {list(start)} lies outside {list(whole)}"
        add(start, stop, 1)
    add((0,) * len(whole), whole, -1)
    if not surplus:
        return None
    # No corner precedes the first one left, so its surplus is the error in the count of that element.
    first = min(surplus)
    count = surplus[first] + 1
    return f"element {list(first)} of {list(whole)} is " + (f"covered {count} times" if count else "missing")


# --- reading and verification ---


def read_manifest(folder: Path) -> Manifest:
    """Reads a step's manifest and checks the sizes of its files; does not read their content."""
    path = folder / MANIFEST_FILE
    try:
        content = read_json(path)
        digest = content.pop("sha256")
        version, intact = content["version"], digest == _digest(content)
        # A newer version may compute its digest differently, so its version is reported before its digest is
        # checked.
        if content["format"] == FORMAT and (version > VERSION or (intact and version != VERSION)):
            other = "a newer" if version > VERSION else "an older"
            raise UserError(
                f"{path} has format version {version}, but this program supports version {VERSION}; use {other} Pentatron"
            )
        if content["format"] != FORMAT or not intact:
            raise DamagedCheckpoint(f"{path} does not match its own checksum")
        check_types(content)
        files = {name: FileRecord(**record) for name, record in content["files"].items()}
        tensors = {name: _tensor_record(record) for name, record in content["tensors"].items()}
        manifest = Manifest(content["step"], files, tensors, content["run_state"], content["config"])
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing") from None
    except OSError as error:
        # Not damage: the disk or its permissions may recover.
        raise UserError(f"{path} cannot be read ({error.strerror or error})") from None
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path} is not a manifest ({type(error).__name__}: {error})") from None
    _check_tensors(folder, manifest)
    check_sizes(folder, manifest)
    return manifest


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Checks that the folder contains exactly the listed files, with the recorded sizes."""
    for name, record in manifest.files.items():
        # Untrusted: a name from a file must not contain a path.
        if record.name != name or Path(name).name != name:
            raise DamagedCheckpoint(
                f"{folder / MANIFEST_FILE} lists {name} under another name or outside its folder: {record.name}"
            )
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpoint(f"{path} is missing")
        if path.resolve().parent != folder.resolve():
            raise DamagedCheckpoint(f"{path} is a symbolic link out of its step; such links are not followed")
        if path.stat().st_size != record.bytes:
            raise DamagedCheckpoint(f"{path} has {path.stat().st_size} bytes, not {record.bytes}")
    for path in sorted(path for kind in ("*.safetensors", "*.distcp") for path in folder.glob(kind)):
        # An unlisted file means that steps were mixed by hand, so listed ones may be from another step.
        if path.name not in manifest.files:
            raise DamagedCheckpoint(f"{path} is not listed in {MANIFEST_FILE}")


def _tensor_record(record: Mapping[str, Any]) -> TensorRecord:
    pieces = tuple(
        StoredPiece(p["file"], p["key"], tuple(p["start"]), tuple(p["shape"]), p.get("crc32"))
        for p in record["pieces"]
    )
    return TensorRecord(record["dtype"], tuple(record["shape"]), pieces)


def _check_tensors(folder: Path, manifest: Manifest) -> None:
    for name, record in manifest.tensors.items():
        if (problem := record.problem(name)) is not None:
            raise DamagedCheckpoint(f"{folder / MANIFEST_FILE}: {name}: {problem}")
        if not all(piece.file in manifest.files for piece in record.pieces):
            raise DamagedCheckpoint(f"{folder / MANIFEST_FILE}: {name} lies in a file that is not listed")
    stored = dict.fromkeys(manifest.files, 0)
    for record in manifest.tensors.values():
        for piece in record.pieces:
            stored[piece.file] += math.prod(piece.shape) * DTYPES[record.dtype].itemsize
    for file, claimed in stored.items():
        if claimed > (size := manifest.files[file].bytes):
            raise DamagedCheckpoint(
                f"{folder / MANIFEST_FILE} lists {claimed} bytes of tensors in {file}, which has {size} bytes"
            )


def verify_files(
    folder: Path, manifest: Manifest, names: Sequence[str] | None = None, cold: bool = False
) -> None:
    """Reads files (default: all) in parallel and compares their digests.

    `cold`: from disk rather than the page cache.
    """
    names = list(manifest.files) if names is None else names
    if not names:
        return
    count = torch.get_num_threads()
    threads_per_file = max(1, count // len(names))

    def digest_of(name: str) -> str:
        record = manifest.files[name]
        return digest_of_file(folder / name, record.block_bytes, threads_per_file, cold)

    with ThreadPoolExecutor(max(1, min(len(names), count))) as threads:
        digests = list(threads.map(digest_of, names))
    bad = [(name, digest) for name, digest in zip(names, digests) if digest != manifest.files[name].sha256]
    if bad:
        name, digest = bad[0]
        more = f" (and {len(bad) - 1} more files are damaged)" if len(bad) > 1 else ""
        raise DamagedCheckpoint(f"{locate_damage(folder / name, manifest, digest)[1]}{more}")


def locate_damage(path: Path, manifest: Manifest, digest: str) -> tuple[list[str], str]:
    """Returns the damaged tensors of a file whose digest is wrong, and a sentence about the damage.

    Tensors are located by their own CRC-32; without these, all tensors of the file are returned.
    """
    names = manifest.tensors_in(path.name)
    pieces = {p.key: (n, p) for n in names for p in manifest.tensors[n].pieces if p.file == path.name}
    wrong = f"{path}: sha256 is {digest[:12]}…, not {manifest.files[path.name].sha256[:12]}…;"
    if not pieces or any(piece.crc32 is None for _, piece in pieces.values()):
        return names, f"{wrong} it holds {len(names)} tensors, from {names[0] if names else 'none'} on"
    try:
        sums = tensor_checksums(path)
    except (ValueError, TypeError) as error:
        return names, f"{wrong} its header is damaged ({error}), and with it all {len(pieces)} tensors"
    damaged = [key for key, (_, piece) in pieces.items() if sums.get(key) != piece.crc32]
    if not damaged:
        return [], f"{wrong} its header is damaged, and none of its {len(pieces)} tensors"
    more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
    sentence = f"{wrong} of its {len(pieces)} tensors {damaged[0]}{more} {'are' if more else 'is'} damaged"
    return list(dict.fromkeys(pieces[key][0] for key in damaged)), sentence


# --- writing: one rank's file, and the manifest of all ranks ---


@sendable
@dataclass(frozen=True)
class RankWriteResult:
    """What one rank wrote, or why it could not.

    `failure`: an I/O error. `mistake`: a bug in the caller.
    """

    files: tuple[FileRecord, ...] = ()
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    failure: str = ""
    mistake: str = ""


@sendable
@dataclass(frozen=True)
class SaveResult:
    """Outcome of a save, decided by rank 0: the folder of the step, or what went wrong.

    `to_check`: all ranks must read the step back before older ones are removed. `note`: an additional
    message. `lost`: why the folder no longer belongs to the run. `keeps_older`: do not remove older steps, as
    this one may not survive a power failure.
    """

    final: str = ""
    failure: str = ""
    mistake: str = ""
    to_check: bool = False
    note: str = ""
    lost: str = ""
    keeps_older: bool = False


def rank_local_fragments(rank_local: Mapping[str, Tensor]) -> list[Fragment]:
    """Returns tensors that exist only on this rank as fragments that cover them."""
    return [Fragment(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in rank_local.items()]


def write_rank_file(path: Path, fragments: Sequence[Fragment]) -> RankWriteResult:
    """Writes one rank's file, if it has any tensors.

    Errors are returned as text, to be gathered on all ranks.
    """
    values: dict[str, Tensor] = {}
    records: list[tuple[str, TensorRecord]] = []
    try:
        for fragment in fragments:
            record = describe_fragment(fragment, path.name)
            for piece in record.pieces:
                if piece.key in values:
                    raise ValueError(f"{piece.key} is given twice")
                values[piece.key] = fragment.values
            records.append((fragment.tensor, record))
        files = (write_tensors(path, values),) if values else ()
        crc32 = files[0].crc32 if files else {}
        tensors = {
            name: replace(r, pieces=tuple(replace(piece, crc32=crc32.get(piece.key)) for piece in r.pieces))
            for name, r in collect_tensor_records(records).items()
        }
        return RankWriteResult(files, tensors)
    except OSError as error:
        return RankWriteResult(failure=error.strerror or str(error))
    except ValueError as error:
        return RankWriteResult(mistake=str(error))


def describe_fragment(fragment: Fragment, file: str) -> TensorRecord:
    """Returns the record of a fragment's tensor with this one piece; an empty part has no piece."""
    dtype = str(fragment.values.dtype).removeprefix("torch.")
    whole, start, size = tuple(fragment.shape), tuple(fragment.start), tuple(fragment.values.shape)
    if not len(whole) == len(start) == len(size):
        raise ValueError(f"{fragment.tensor} of {list(whole)} has a part {list(size)} at {list(start)}")
    if dtype not in DTYPES:
        raise ValueError(f"{fragment.tensor} is {dtype}, which a checkpoint cannot store")
    if fragment.values.numel() == 0 and size != whole:
        return TensorRecord(dtype, whole, ())
    key = piece_key(fragment.tensor, whole, start, size)
    return TensorRecord(dtype, whole, (StoredPiece(file, key, start, size),))


def collect_tensor_records(records: Iterable[tuple[str, TensorRecord]]) -> dict[str, TensorRecord]:
    """Merges records of the same tensor, with its pieces in order of their start."""
    pieces: dict[str, list[StoredPiece]] = {}
    tensors: dict[str, TensorRecord] = {}
    for name, record in records:
        first_record = tensors.setdefault(name, record)
        if (first_record.dtype, first_record.shape) != (record.dtype, record.shape):
            raise ValueError(
                f"{name} is {first_record.dtype} {list(first_record.shape)} in one part and "
                f"{record.dtype} {list(record.shape)} in another"
            )
        pieces.setdefault(name, []).extend(record.pieces)
    return {
        name: TensorRecord(r.dtype, r.shape, tuple(sorted(pieces[name], key=lambda piece: piece.start)))
        for name, r in sorted(tensors.items())
    }


def merge_tensor_records(records: Iterable[tuple[str, TensorRecord]]) -> dict[str, TensorRecord]:
    """Merges the records of all ranks. Raises ValueError unless the pieces cover every tensor exactly."""
    tensors = collect_tensor_records(records)
    for name, record in tensors.items():
        if (problem := record.problem(name)) is not None:
            raise ValueError(f"{name}: {problem}")
    return tensors

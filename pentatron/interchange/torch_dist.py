"""Reads the metadata of torch_dist checkpoints, without loading tensors, and writes their files."""

import contextlib
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from pentatron.checkpoint.tensor_file import DTYPES, FileRecord
from pentatron.checkpoint.torch_file import torch_save_position
from pentatron.checksums import SHA256, ChecksummedFile
from pentatron.errors import UserError
from pentatron.files import fsync
from pentatron.interchange.index import (
    MegatronCheckpoint,
    MegatronTensor,
    StoredRectangle,
    without_unreadable_optimizer,
)
from pentatron.parallel.serialization import sendable
from pentatron.parallel.sharding import Shape

# --- the sandboxed unpickler ---


_PROGRAM = Path(__file__).with_name("unpickle_sandbox.py")
# CPU time limit of the unpickler: a base, and the minimum rate in bytes per second.
_SECONDS, _BYTES_PER_SECOND = 30, 2**20
# Wall time limit as a multiple of the CPU time: the disk may be slow, and the machine busy.
_PATIENCE = 10


def unpickle_in_sandbox(path: Path, seconds: int = _SECONDS) -> Any:
    """Unpickles a file of Megatron-LM in a sandboxed process that executes nothing of it.

    `seconds`: CPU time limit, extended for large files.
    """
    try:
        with path.open("rb") as file:
            seconds += os.fstat(file.fileno()).st_size // _BYTES_PER_SECOND
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); name another one") from None
    # -I and -S: isolated from the environment and from installed packages.
    program = [sys.executable, "-I", "-S", str(_PROGRAM), str(path.resolve()), str(seconds)]
    limit = seconds * _PATIENCE
    try:
        done = subprocess.run(program, capture_output=True, env={}, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        raise _timeout_error(path, f"{limit} seconds") from None
    if done.returncode == -signal.SIGXCPU:
        raise _timeout_error(path, f"{seconds} seconds of a core")
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise UserError(
            f"{path} could not be read: its reader ended with status {done.returncode} {last}; the file is damaged or not a checkpoint"
        ) from None
    if "refused" in answer:
        raise UserError(
            f"{path} refers to {answer['refused']}, which no checkpoint needs, so it was not read and nothing of it ran; do not use this "
            f"file unless you know who made it"
        )
    if "error" in answer:
        raise UserError(f"{path} is not a file of Megatron-LM's checkpoints, or damaged ({answer['error']})")
    return answer["found"]


def _timeout_error(path: Path, limit: str) -> UserError:
    return UserError(
        f"{path} takes longer than {limit} to read, so its reader was stopped; the file is damaged, or was made to run forever: "
        f"name another checkpoint"
    )


# --- reading ---

INDEX_NAME, COMMON_NAME, FORMAT = ".metadata", "common.pt", "metadata.json"
_SUFFIX = ".distcp"


def open_torch_dist(folder: Path) -> MegatronCheckpoint:
    """Reads the metadata of a checkpoint; pickled files are read in the sandbox."""
    try:
        backend = json.loads((folder / FORMAT).read_text(encoding="utf-8"))["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / FORMAT} cannot be read ({type(error).__name__}: {error})") from None
    if backend != "torch_dist":
        raise UserError(
            f"{folder} is in Megatron-LM's format {backend}, which is not supported; let Megatron-LM save it again as torch_dist"
        )
    index, common = unpickle_in_sandbox(folder / INDEX_NAME), unpickle_in_sandbox(folder / COMMON_NAME)
    if not isinstance(common, Mapping) or not isinstance(index, Mapping) or "places" not in index:
        raise UserError(
            f"{folder} is not a checkpoint of Megatron-LM: its {COMMON_NAME} or {INDEX_NAME} contains something else"
        )
    tensors = _tensors(folder, index)
    arguments = common.get("args") or {}
    contents = MegatronCheckpoint(folder, int(common.get("iteration") or 0), tensors, arguments, common)
    return without_unreadable_optimizer(contents, index["others"])


def _tensors(folder: Path, index: Mapping[str, Any]) -> dict[str, MegatronTensor]:
    """Returns the tensors of the index with the position of their pieces."""
    stored = index["tensors"]
    sizes = {(name, tuple(start)): tuple(size) for name in stored for start, size in stored[name]["pieces"]}
    pieces: dict[str, list[StoredRectangle]] = {name: [] for name in stored}
    for name, start, file, offset, length, transformed in index["places"]:
        if start is None or name not in pieces:
            continue
        if Path(file).name != file or not file.endswith(_SUFFIX) or min(offset, length) < 0:
            # Untrusted: a name from a file must not contain a path.
            raise UserError(
                f"{folder / INDEX_NAME} lists {name} in {file}, which is not a {_SUFFIX} file of this folder"
            )
        if transformed:
            raise UserError(f"{folder} contains {name} compressed or encrypted, which is not supported")
        if (size := sizes.get((name, tuple(start)))) is None:
            raise UserError(f"{folder / INDEX_NAME} contradicts itself about {name} at {start}")
        pieces[name].append(StoredRectangle(tuple(start), size, file, torch_save_position(offset, length)))
    return {
        name: MegatronTensor(record["dtype"], tuple(record["shape"]), tuple(pieces[name]))
        for name, record in stored.items()
    }


# --- writing ---
#
# The format of `torch.distributed.checkpoint` and megatron-core: a rank's `.distcp` file is a sequence of
# torch.save archives; `.metadata` maps each to a rectangle of a tensor.


_FORMAT_TEXT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@sendable
@dataclass(frozen=True)
class WrittenRectangle:
    """Position of a rectangle of a tensor of theirs in a file, or of an object (`start` is None)."""

    theirs: str
    start: Shape | None
    size: Shape
    dtype: str
    file: str
    offset: int
    length: int


class HashedFile(ChecksummedFile):
    """A new file that is hashed while it is written, and synced when it is finished."""

    def __init__(self, path: Path) -> None:
        self.path, self._digest = path, hashlib.sha256()
        self._failure: OSError | None = None
        super().__init__(path.open("xb"), self._digest)

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self._failure = error
            raise

    def flush(self) -> None:
        """Does nothing, as writes are not buffered; torch calls it after each tensor."""

    def save(self, value: Any) -> tuple[int, int]:
        """Appends torch.save of a value. Returns (first byte, size)."""
        offset = self.bytes
        try:
            torch.save(value, self)  # type: ignore[arg-type]
        except RuntimeError as error:
            # torch reports an unexpected position instead of the I/O error of the write.
            raise (self._failure or error) from None
        return offset, self.bytes - offset

    def finish(self) -> FileRecord:
        """Syncs and closes the file; returns its record."""
        fsync(self.file)
        self.file.close()
        return FileRecord(self.path.name, self.bytes, self._digest.hexdigest(), 0, SHA256)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Closing an unfinished file flushes its buffer, which may fail again.
        with contextlib.suppress(OSError):
            self.file.close()


def write_hashed_file(path: Path, content: bytes) -> FileRecord:
    """Writes and syncs a whole file."""
    with HashedFile(path) as file:
        file.write(content)
        return file.finish()


def write_index(
    folder: Path, shapes: Mapping[str, Shape], places: Iterable[WrittenRectangle]
) -> list[FileRecord]:
    """Writes `.metadata`, the index of the folder's `.distcp` files, and `metadata.json`."""
    from torch.distributed.checkpoint import filesystem, metadata

    described: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    for place in places:
        info = filesystem._StorageInfo(place.file, place.offset, place.length)
        if place.start is None:
            described[place.theirs] = metadata.BytesStorageMetadata()
            stored[metadata.MetadataIndex(place.theirs)] = info
            continue
        if place.theirs not in described:
            properties = metadata.TensorProperties(dtype=DTYPES[place.dtype])
            size = torch.Size(shapes[place.theirs])
            described[place.theirs] = metadata.TensorStorageMetadata(properties, size, [])
        chunks = described[place.theirs].chunks
        stored[metadata.MetadataIndex(place.theirs, place.start, len(chunks))] = info
        chunks.append(metadata.ChunkStorageMetadata(torch.Size(place.start), torch.Size(place.size)))
    index = metadata.Metadata(described, planner_data=None, storage_data=stored)
    # Pickle protocol 2, as in torch's own writer.
    files = {INDEX_NAME: pickle.dumps(index, protocol=2), FORMAT: json.dumps(_FORMAT_TEXT).encode()}
    return [write_hashed_file(folder / name, content) for name, content in files.items()]


def write_common(folder: Path, common: Mapping[str, Any], arguments: Mapping[str, Any]) -> FileRecord:
    """Writes `common.pt`: the state common to all ranks and Megatron-LM's arguments."""
    with HashedFile(folder / COMMON_NAME) as file:
        file.save({"args": Namespace(**arguments), **common})
        return file.finish()

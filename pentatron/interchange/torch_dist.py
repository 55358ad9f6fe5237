"""A checkpoint in the format torch_dist, as it lies in a folder: what it holds, without a tensor being read."""

import contextlib
import hashlib
import io
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
from typing import Any

import torch
from torch import Tensor

from pentatron.checkpoint.tensor_file import DTYPES, FileRecord
from pentatron.checkpoint.torch_file import saved_place
from pentatron.checksums import SHA256, SummedFile
from pentatron.errors import UserError
from pentatron.files import sync
from pentatron.interchange.index import KEPT, STATE, Contents, Piece, Stored, prefix_of
from pentatron.parallel.encoding import sendable
from pentatron.parallel.shards import Shape

# Starts the program that reads pickled files, and understands what it says.


_PROGRAM = Path(__file__).with_name("unpickle_sandbox.py")
# CPU time of the reader: a base, and what each second must read at least.
_SECONDS, _BYTES_A_SECOND = 30, 2**20
# By the clock, for each of those: a file may lie on a slow disk, and the machine may be busy.
_PATIENCE = 10


def read_apart(path: Path, seconds: int = _SECONDS) -> Any:
    """What a pickled file of Megatron-LM holds, read by a process that can run nothing of it.

    `seconds` of a core are enough for any small file; larger ones have more, by their size.
    """
    try:
        with path.open("rb") as file:
            seconds += os.fstat(file.fileno()).st_size // _BYTES_A_SECOND
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror or error}); name another checkpoint"
        ) from None
    # -I and -S: neither the environment nor installed packages have a say in it.
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(_PROGRAM), str(path.resolve()), str(seconds)],
            capture_output=True,
            env={},
            check=False,
            timeout=seconds * _PATIENCE,
        )
    except subprocess.TimeoutExpired:
        raise _endless(path, f"{seconds * _PATIENCE} seconds") from None
    if done.returncode == -signal.SIGXCPU:
        raise _endless(path, f"{seconds} seconds of a core")
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise UserError(
            f"{path} could not be read: its reader ended with status {done.returncode} {last}; the file is damaged or not a checkpoint"
        ) from None
    if "refused" in answer:
        raise UserError(
            f"{path} asks for {answer['refused']}, which no checkpoint needs, so it was not read and nothing of it ran; do not use this "
            f"file unless you know who made it"
        )
    if "error" in answer:
        raise UserError(f"{path} is not a file of Megatron-LM's checkpoints, or damaged ({answer['error']})")
    return answer["found"]


def _endless(path: Path, limit: str) -> UserError:
    return UserError(
        f"{path} takes longer than {limit} to read, so its reader was stopped; the file is damaged, or was made to run without end: "
        f"name another checkpoint"
    )


INDEX, COMMON, FORMAT = ".metadata", "common.pt", "metadata.json"
_ENDING = ".distcp"


def is_torch_dist(folder: Path) -> bool:
    return (folder / INDEX).is_file() and (folder / FORMAT).is_file()


def open_torch_dist(folder: Path) -> Contents:
    """What the folder says of itself; its pickled files are read apart."""
    _check_backend(folder)
    index, common = read_apart(folder / INDEX), read_apart(folder / COMMON)
    if not isinstance(common, Mapping) or not isinstance(index, Mapping) or "places" not in index:
        raise UserError(
            f"{folder} is no checkpoint of Megatron-LM: its {COMMON} or {INDEX} holds something else"
        )
    tensors = _tensors(folder, index)
    arguments = common.get("args") or {}
    contents = Contents(folder, int(common.get("iteration") or 0), tensors, arguments, common)
    return _with_remark_on_optimizer(contents, index["others"])


def _check_backend(folder: Path) -> None:
    try:
        backend = json.loads((folder / FORMAT).read_text(encoding="utf-8"))["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / FORMAT} cannot be read ({type(error).__name__}: {error})") from None
    if backend != "torch_dist":
        raise UserError(
            f"{folder} is in Megatron-LM's format {backend}, which is not read here; let Megatron-LM save it again as torch_dist"
        )


def _tensors(folder: Path, index: Mapping[str, Any]) -> dict[str, Stored]:
    sizes = {
        (name, tuple(start)): tuple(size)
        for name, record in index["tensors"].items()
        for start, size in record["pieces"]
    }
    pieces: dict[str, list[Piece]] = {name: [] for name in index["tensors"]}
    for name, start, file, offset, length, transformed in index["places"]:
        if start is None or name not in pieces:
            continue
        if Path(file).name != file or not file.endswith(_ENDING) or min(offset, length) < 0:
            # A name from a file is not to be trusted with a path.
            raise UserError(
                f"{folder / INDEX} says that {name} lies in {file}, which is no file of this folder's kind"
            )
        if transformed:
            raise UserError(f"{folder} holds {name} compressed or encrypted, which is not read here")
        size = sizes.get((name, tuple(start)))
        if size is None:
            raise UserError(f"{folder / INDEX} contradicts itself about {name} at {start}")
        pieces[name].append(Piece(tuple(start), size, file, saved_place(offset, length)))
    return {
        name: Stored(record["dtype"], tuple(record["shape"]), tuple(pieces[name]))
        for name, record in index["tensors"].items()
    }


def _with_remark_on_optimizer(contents: Contents, others: list[str]) -> Contents:
    """Says so where there is an optimizer's state that is cut in a way only the saving layout understands."""
    prefix = prefix_of(contents.tensors, contents.folder)
    anchor = f"{prefix}embedding.word_embeddings.weight"
    readable = any(
        contents.tensors.get(f"{STATE}{kept}.{anchor}", contents.tensors[anchor]).shape
        == contents.tensors[anchor].shape
        and f"{STATE}{kept}.{anchor}" in contents.tensors
        for kept in KEPT
    )
    held = any(name.startswith(("optimizer.", "chained_")) for name in (*contents.tensors, *others))
    if readable or not held:
        return contents
    tensors = {name: stored for name, stored in contents.tensors.items() if not name.startswith("optimizer.")}
    remark = (
        f"{contents.folder} has its optimizer's state in the order of the layout that saved it, so weights alone are taken (Megatron-LM "
        f"writes it for any layout with --dist-ckpt-optim-fully-reshardable)"
    )
    return Contents(
        contents.folder, contents.iteration, tensors, contents.arguments, contents.common, (remark,)
    )


# Files of the format torch_dist, as `torch.distributed.checkpoint` and megatron-core lay them out.
#
# A rank's `.distcp` file is one torch.save after the other; `.metadata` says which tensor each of them is a
# rectangle of.


_FORMAT_TEXT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@sendable
@dataclass(frozen=True)
class Place:
    """A rectangle of a tensor of theirs, or an object (no `start`), in a file."""

    theirs: str
    start: Shape | None
    size: Shape
    dtype: str
    file: str
    offset: int
    length: int


class HashedFile:
    """A new file that is hashed while it is written, and on the disk when it is closed."""

    def __init__(self, path: Path) -> None:
        self.path, self._digest = path, hashlib.sha256()
        self._failure: OSError | None = None
        self._file = path.open("xb")
        self._summed = SummedFile(self._file, self._digest)

    def write(self, data: Any) -> int:
        try:
            return self._summed.write(data)
        except OSError as error:
            self._failure = error
            raise

    def flush(self) -> None:
        """Nothing is kept back here; torch asks for it after each tensor."""

    def save(self, value: Any) -> tuple[int, int]:
        """Adds what torch.save makes of a value: (first byte, bytes)."""
        before = self._summed.bytes
        try:
            torch.save(value, self)  # type: ignore[arg-type]
        except RuntimeError:
            # Torch says that a position is not what it expected, and not that the disk is full.
            if self._failure is not None:
                raise self._failure from None
            raise
        return before, self._summed.bytes - before

    def finish(self) -> FileRecord:
        sync(self._file)
        self._file.close()
        return FileRecord(self.path.name, self._summed.bytes, self._digest.hexdigest(), 0, SHA256)

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(self, *_: object) -> None:
        # Of a file that is not finished, something may be left to write, which fails once more where it has failed before.
        with contextlib.suppress(OSError):
            self._file.close()


def own_copy(values: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in memory of its own: torch.save would write all of the memory that a view belongs to."""
    return values.detach().to("cpu", dtype, copy=True).contiguous()


def write_whole(path: Path, write: bytes) -> FileRecord:
    with HashedFile(path) as file:
        file.write(write)
        return file.finish()


def write_index(folder: Path, shapes: Mapping[str, Shape], places: Iterable[Place]) -> list[FileRecord]:
    """`.metadata`, of everything that lies in the folder's `.distcp` files, and `metadata.json`."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    described: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    for place in places:
        info = _StorageInfo(place.file, place.offset, place.length)
        if place.start is None:
            described[place.theirs] = BytesStorageMetadata()
            stored[MetadataIndex(place.theirs)] = info
            continue
        record = described.get(place.theirs)
        if record is None:
            properties = TensorProperties(dtype=DTYPES[place.dtype])
            record = TensorStorageMetadata(properties, torch.Size(shapes[place.theirs]), [])
            described[place.theirs] = record
        index = len(record.chunks)
        record.chunks.append(ChunkStorageMetadata(torch.Size(place.start), torch.Size(place.size)))
        stored[MetadataIndex(place.theirs, place.start, index)] = info
    metadata = Metadata(described, planner_data=None, storage_data=stored)
    # Protocol 2, as torch's own writer of these files has it.
    return [
        write_whole(folder / INDEX, pickle.dumps(metadata, protocol=2)),
        write_whole(folder / FORMAT, json.dumps(_FORMAT_TEXT).encode()),
    ]


def write_common(folder: Path, common: Mapping[str, Any], arguments: Mapping[str, Any]) -> FileRecord:
    """`common.pt`: what is the same for all ranks, with the arguments as Megatron-LM has them."""
    buffer = io.BytesIO()
    torch.save({"args": Namespace(**arguments), **common}, buffer)
    return write_whole(folder / COMMON, buffer.getvalue())

"""Files of the format torch_dist, as `torch.distributed.checkpoint` and megatron-core lay them out.

A rank's `.distcp` file is one torch.save after the other; `.metadata` says which tensor each of them is a rectangle of.
"""

import contextlib
import hashlib
import io
import json
import pickle
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pentatron.checkpoint.tensor_file import DTYPES, FileRecord
from pentatron.checksums import SHA256, SummedFile
from pentatron.files import sync
from pentatron.interchange.torch_dist import COMMON, FORMAT, INDEX
from pentatron.parallel.pieces import Shape
from pentatron.parallel.values import sendable

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

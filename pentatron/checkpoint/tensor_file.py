"""Safetensors files, hashed while they are written.

The `safetensors` library writes a whole file in one call and neither hashes nor flushes it to disk; a checkpoint
needs both, and one pass over the bytes. Reading goes through the library.
"""

import collections
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from pentatron.parallel.pieces import Shape, region

# At most so much is copied at a time, whatever the size of a tensor. Larger blocks are slower: each is new memory, which the
# kernel clears page by page, where smaller ones are used again.
BLOCK_BYTES = 16 * 2**20
# Steps of writing and hashing that may wait while the next block is fetched.
_BLOCKS_AHEAD = 4
# What is written goes to the disk in portions of about this size.
_FLUSH_BYTES = 128 * 2**20

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

# The types a checkpoint can hold, by the names it uses for them.
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPE_NAMES}

# The types a weight may have, by safetensors' names.
WEIGHT_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items() if dtype.is_floating_point}

# Files that torch has written; `torch_file.py` reads them.
TORCH_FILES = (".distcp", ".pt")

# What can hold every value of a type, beside the type itself.
_WIDER = {
    torch.float16: (torch.float32, torch.float64),
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}


def holds(kept: torch.dtype, stored: torch.dtype) -> bool:
    """Whether every value of one type is a value of the other."""
    return kept == stored or kept in _WIDER.get(stored, ())


@dataclass(frozen=True)
class FileRecord:
    """What a manifest says about one file."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Outline:
    """A tensor before it is there."""

    dtype: torch.dtype
    shape: Shape

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# Gives the rectangle (start, size) of the tensor of that name.
Read = Callable[[str, Shape, Shape], Tensor]


class _Writer:
    """Writes and hashes in two threads, as both can go on while the next block is fetched.

    A third one sends to the disk what was written, so that little is left to wait for in the end.
    """

    def __init__(self, file: BinaryIO, hashed: bool) -> None:
        self.file, self.digest, self.bytes = file, hashlib.sha256() if hashed else None, 0
        self._writing, self._hashing, self._flushing = (ThreadPoolExecutor(1) for _ in range(3))
        self._pending: collections.deque[Future[Any]] = collections.deque()
        self._flush: Future[None] | None = None
        self._unflushed = 0

    def write(self, data: bytes | memoryview) -> None:
        self._wait(_BLOCKS_AHEAD)
        self._pending.append(self._writing.submit(self._put, data))
        if self.digest is not None:
            self._pending.append(self._hashing.submit(self.digest.update, data))
        self.bytes += len(data)

    def _put(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        self._unflushed += len(data)
        if self._unflushed >= _FLUSH_BYTES and (self._flush is None or self._flush.done()):
            self._check_flush()
            self._flush, self._unflushed = self._flushing.submit(os.fsync, self.file.fileno()), 0

    def _check_flush(self) -> None:
        if self._flush is not None:
            self._flush.result()

    def _wait(self, left: int) -> None:
        while len(self._pending) > left:
            self._pending.popleft().result()

    def finish(self) -> str:
        """Waits until everything is written; the sum of it, if there is to be one."""
        self._wait(0)
        self._check_flush()
        return self.digest.hexdigest() if self.digest is not None else ""

    def close(self) -> None:
        for threads in (self._writing, self._hashing, self._flushing):
            threads.shutdown(cancel_futures=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Writes a safetensors file, block by block, and flushes it to disk."""
    outlines = {name: Outline(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}

    def read(name: str, start: Shape, size: Shape) -> Tensor:
        return region(tensors[name].detach(), start, size)

    return write_blocks(path, outlines, read)


def write_blocks(
    path: Path,
    outlines: Mapping[str, Outline],
    read: Read,
    metadata: Mapping[str, str] | None = None,
    hashed: bool = True,
) -> FileRecord:
    """The same for tensors that are not in memory: each block is asked for when its turn has come."""
    # Wide elements first, so that all of them lie at multiples of their own width.
    ordered = dict(sorted(outlines.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    with path.open("xb") as file:
        writer = _Writer(file, hashed)
        try:
            header = _header(ordered, metadata)
            writer.write(len(header).to_bytes(8, "little"))
            writer.write(header)
            for name, outline in ordered.items():
                for start, size in blocks(outline.shape, outline.dtype.itemsize):
                    writer.write(_raw(read(name, start, size)))
            digest = writer.finish()
        finally:
            writer.close()
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(path.name, writer.bytes, digest)


def _header(outlines: Mapping[str, Outline], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    start = 0
    for name, outline in outlines.items():
        stop = start + outline.bytes
        entries[name] = {
            "dtype": _DTYPE_NAMES[outline.dtype],
            "shape": list(outline.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries).encode()
    # The format wants the data to start at a multiple of eight.
    return text + b" " * (-len(text) % 8)


def blocks(shape: Shape, element_bytes: int) -> Iterator[tuple[Shape, Shape]]:
    """Cuts a row-major tensor into blocks of at most BLOCK_BYTES: (start, size) of each, in the order of memory."""
    if math.prod(shape) == 0:
        return
    row = math.prod(shape[1:]) * element_bytes
    if not shape or row * shape[0] <= BLOCK_BYTES:
        yield (0,) * len(shape), shape
    elif row > BLOCK_BYTES:
        for i in range(shape[0]):
            for start, size in blocks(shape[1:], element_bytes):
                yield (i, *start), (1, *size)
    else:
        rows = BLOCK_BYTES // row
        for i in range(0, shape[0], rows):
            yield (i, *(0 for _ in shape[1:])), (min(rows, shape[0] - i), *shape[1:])


def _raw(tensor: Tensor) -> memoryview:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: Path, text: str) -> None:
    """Writes a new file and flushes it to disk."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())

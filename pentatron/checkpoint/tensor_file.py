"""Safetensors files, hashed while they are written.

The `safetensors` library writes a whole file in one call and neither hashes nor flushes it to disk; a checkpoint
needs both, and one pass over the bytes. Reading goes through the library.
"""

import collections
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pentatron.checksums import CRC32, ThreadedBlockSums, crc32_of_range
from pentatron.files import sync, sync_data
from pentatron.parallel.encoding import sendable
from pentatron.parallel.shards import Shape, region
from pentatron.text import parse_json

# At most so much is copied at a time, whatever the size of a tensor. Larger blocks are slower: each is new memory, which the
# kernel clears page by page, where smaller ones are used again.
BLOCK_BYTES = 16 * 2**20
# Steps of writing and hashing that may wait while the next block is fetched.
_BLOCKS_AHEAD = 6
# Smaller tensors are written together, until they come to so much or are so many.
_BATCH_BYTES = 8 * 2**20
_BATCH_PARTS = 512
# A file's digest is SHA-256 over the CRC-32 of blocks of this size, each computed by one thread.
_SUM_BLOCK_BYTES = 16 * 2**20
# What the safetensors library accepts.
_LARGEST_HEADER = 100_000_000
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


@sendable
@dataclass(frozen=True)
class FileRecord:
    """What a manifest says about one file.

    `block_sums`: what `sha256` is computed of, all bytes (SHA256) or the CRC-32 of each block of `block_bytes` (CRC32).
    """

    name: str
    bytes: int
    sha256: str
    block_bytes: int
    block_sums: str
    # CRC-32 of each tensor by its name in the file; a manifest has them where it lists the pieces.
    crc32: Mapping[str, str] = field(default_factory=dict, compare=False)


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
    """Writes and takes sums in threads of their own, as all can go on while the next block is fetched.

    One more sends to the disk what was written, so that little is left to wait for in the end.
    """

    def __init__(self, file: FileIO, hashed: bool) -> None:
        self.file, self.bytes = file, 0
        self.blocks = ThreadedBlockSums(_SUM_BLOCK_BYTES, torch.get_num_threads()) if hashed else None
        self._writing, self._flushing = (ThreadPoolExecutor(1) for _ in range(2))
        self._pending: collections.deque[Future[Any]] = collections.deque()
        self._batch: list[tuple[str, bytes | memoryview]] = []
        self._batched = 0
        self._flush: Future[None] | None = None
        self._unflushed = 0

    def write(self, data: bytes | memoryview, tensor: str = "") -> None:
        """What is small waits for more to come: a state of many small tensors takes no longer than one of large ones."""
        self._batch.append((tensor, data))
        self._batched += len(data)
        self.bytes += len(data)
        if self._batched >= _BATCH_BYTES or len(self._batch) >= _BATCH_PARTS:
            self._send()

    def _send(self) -> None:
        self._wait(_BLOCKS_AHEAD)
        batch, self._batch, self._batched = self._batch, [], 0
        self._pending.append(self._writing.submit(self._put, [data for _, data in batch]))
        if self.blocks is not None:
            for tensor, data in batch:
                self._pending.extend(self.blocks.add(data, tensor))

    def _put(self, parts: list[bytes | memoryview]) -> None:
        while parts:
            written = os.writev(self.file.fileno(), parts)
            self._unflushed += written
            # A disk that is all but full takes a part of it and then says so.
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            if written:
                parts[0] = memoryview(parts[0])[written:]
        if self._unflushed >= _FLUSH_BYTES and (self._flush is None or self._flush.done()):
            self._check_flush()
            self._flush, self._unflushed = self._flushing.submit(sync_data, self.file.fileno()), 0

    def _check_flush(self) -> None:
        if self._flush is not None:
            self._flush.result()

    def _wait(self, left: int) -> None:
        while len(self._pending) > left:
            self._pending.popleft().result()

    def finish(self) -> str:
        """Waits until everything is written; the sum of it, if there is to be one."""
        self._send()
        self._wait(0)
        self._check_flush()
        return self.blocks.finish() if self.blocks is not None else ""

    def close(self) -> None:
        for threads in (self._writing, self._flushing):
            threads.shutdown(cancel_futures=True)
        if self.blocks is not None:
            self.blocks.close()


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
    with path.open("xb", buffering=0) as file:
        writer = _Writer(file, hashed)
        try:
            header = _header(ordered, metadata)
            writer.write(len(header).to_bytes(8, "little"))
            writer.write(header)
            for name, outline in ordered.items():
                for start, size in blocks(outline.shape, outline.dtype.itemsize):
                    writer.write(_raw(read(name, start, size)), name)
            digest = writer.finish()
        finally:
            writer.close()
        sync(file)
    # Of each tensor, so that damage can be named more exactly than by the file.
    found = {} if writer.blocks is None else writer.blocks.tensors
    sums = {name: f"{found.get(name, 0):08x}" for name in ordered} if hashed else {}
    return FileRecord(path.name, writer.bytes, digest, _SUM_BLOCK_BYTES, CRC32, sums)


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


def piece_sums(path: Path) -> dict[str, str]:
    """CRC-32 of every tensor of a file, by its name there; ValueError if the header makes no sense."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_LARGEST_HEADER, path.stat().st_size):
            raise ValueError(f"it would be {length} bytes long")
        entries = parse_json(file.read(length))
        found = {}
        for name, entry in entries.items() if isinstance(entries, dict) else ():
            if name != "__metadata__" and isinstance(entry, dict):
                first, last = map(int, entry.get("data_offsets", (0, 0)))
                start = max(0, 8 + length + first)
                found[name] = f"{crc32_of_range(file.fileno(), start, last - first):08x}"
        return found

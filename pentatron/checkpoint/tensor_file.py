"""Writes safetensors files in blocks and computes their checksums in the same pass.

The `safetensors` library writes a whole file in one call, without checksums or fsync. Reading uses the
library.
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

from pentatron.checksums import CRC32, ThreadedBlockChecksums, crc32_of_range
from pentatron.files import fdatasync, fsync
from pentatron.parallel.serialization import sendable
from pentatron.parallel.sharding import Shape, region
from pentatron.text import parse_json

# Block size of copies from the device. Larger blocks are slower: the allocator returns them to the kernel,
# which then clears every page of the next one, while smaller blocks are reused.
BLOCK_BYTES = 16 * 2**20
# Maximum number of pending writes and checksums while the next block is fetched.
_MAX_PENDING = 6
# Small tensors are written together in one writev call, up to these limits.
_BATCH_BYTES = 8 * 2**20
_BATCH_PARTS = 512
# Block size of the digest: SHA-256 over the CRC-32 of the blocks, each computed by one thread.
_SUM_BLOCK_BYTES = 16 * 2**20
# Limit of the safetensors library.
_LARGEST_HEADER = 100_000_000
# Written data is flushed to disk in portions of about this size.
_FLUSH_BYTES = 128 * 2**20

# By dtype: its name in safetensors, and the storage class that torch pickles.
_DTYPE_NAMES = {
    torch.float64: ("F64", "DoubleStorage"),
    torch.float32: ("F32", "FloatStorage"),
    torch.bfloat16: ("BF16", "BFloat16Storage"),
    torch.float16: ("F16", "HalfStorage"),
    torch.int64: ("I64", "LongStorage"),
    torch.int32: ("I32", "IntStorage"),
    torch.uint8: ("U8", "ByteStorage"),
    torch.bool: ("BOOL", "BoolStorage"),
}

# Dtypes a checkpoint can store, by their names in the manifest.
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPE_NAMES}

# The same by their storage classes.
STORAGES = {storage: dtype for dtype, (_, storage) in _DTYPE_NAMES.items()}

# Dtypes a weight may have, by their safetensors names.
WEIGHT_DTYPES = {name: dtype for dtype, (name, _) in _DTYPE_NAMES.items() if dtype.is_floating_point}

# Suffixes of files written by torch, which `torch_file.py` reads.
TORCH_FILES = (".distcp", ".pt")


def represents_exactly(kept: torch.dtype, stored: torch.dtype) -> bool:
    """Whether the dtype `kept` represents every value of the dtype `stored`."""
    if not (kept.is_floating_point and stored.is_floating_point):
        return kept == stored
    wide, narrow = torch.finfo(kept), torch.finfo(stored)
    return wide.eps <= narrow.eps and wide.max >= narrow.max


@sendable
@dataclass(frozen=True)
class FileRecord:
    """Manifest entry of a file.

    `block_sums`: kind of `sha256`, over all bytes (SHA256) or over the CRC-32 of each block of `block_bytes`
    (CRC32).
    """

    name: str
    bytes: int
    sha256: str
    block_bytes: int
    block_sums: str
    # CRC-32 of each tensor by its key in the file. The manifest stores them with the pieces.
    crc32: Mapping[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class TensorSpec:
    """Dtype and shape of a tensor that is not in memory yet."""

    dtype: torch.dtype
    shape: Shape

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# Returns the rectangle (start, size) of a tensor by name.
ReadRectangle = Callable[[str, Shape, Shape], Tensor]


class _Writer:
    """Writes and checksums data in background threads while the next block is fetched.

    A third thread calls fdatasync as data accumulates, so that the final fsync has little left to wait for.
    """

    def __init__(self, file: FileIO, hashed: bool) -> None:
        self.file, self.bytes = file, 0
        self.blocks = ThreadedBlockChecksums(_SUM_BLOCK_BYTES, torch.get_num_threads()) if hashed else None
        self._writing, self._flushing = (ThreadPoolExecutor(1) for _ in range(2))
        self._pending: collections.deque[Future[Any]] = collections.deque()
        self._batch: list[tuple[str, bytes | memoryview]] = []
        self._batched = 0
        self._flush: Future[None] | None = None
        self._unflushed = 0

    def write(self, data: bytes | memoryview, tensor: str = "") -> None:
        """Queues data. Small writes are batched, so many small tensors are as fast as a few large ones."""
        self._batch.append((tensor, data))
        self._batched += len(data)
        self.bytes += len(data)
        if self._batched >= _BATCH_BYTES or len(self._batch) >= _BATCH_PARTS:
            self._submit_batch()

    def _submit_batch(self) -> None:
        self._wait(_MAX_PENDING)
        batch, self._batch, self._batched = self._batch, [], 0
        self._pending.append(self._writing.submit(self._write_batch, [data for _, data in batch]))
        if self.blocks is not None:
            for tensor, data in batch:
                self._pending.extend(self.blocks.add(data, tensor))

    def _write_batch(self, parts: list[bytes | memoryview]) -> None:
        while parts:
            written = os.writev(self.file.fileno(), parts)
            self._unflushed += written
            # writev may write only a part, such as on an almost full disk; the next call then fails with
            # ENOSPC.
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            if written:
                parts[0] = memoryview(parts[0])[written:]
        if self._unflushed >= _FLUSH_BYTES and (self._flush is None or self._flush.done()):
            if self._flush is not None:
                # Raises the error of the previous fdatasync.
                self._flush.result()
            self._flush, self._unflushed = self._flushing.submit(fdatasync, self.file.fileno()), 0

    def _wait(self, limit: int) -> None:
        """Waits until at most `limit` operations are pending; raises their errors."""
        while len(self._pending) > limit:
            self._pending.popleft().result()

    def finish(self) -> str:
        """Waits for all writes; returns the digest, or an empty string if not hashed."""
        self._submit_batch()
        self._wait(0)
        if self._flush is not None:
            self._flush.result()
        return self.blocks.finish() if self.blocks is not None else ""

    def close(self) -> None:
        for threads in (self._writing, self._flushing):
            threads.shutdown(cancel_futures=True)
        if self.blocks is not None:
            self.blocks.close()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Writes tensors to a safetensors file in blocks, and syncs it."""
    outlines = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return write_blocks(path, outlines, lambda name, start, size: region(tensors[name].detach(), start, size))


def write_blocks(
    path: Path,
    outlines: Mapping[str, TensorSpec],
    read: ReadRectangle,
    metadata: Mapping[str, str] | None = None,
    hashed: bool = True,
) -> FileRecord:
    """Writes tensors that are not in memory: calls `read` for each block in turn."""
    # Sorted by descending element size, so that every tensor is aligned to its elements.
    ordered = dict(sorted(outlines.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    with path.open("xb", buffering=0) as file:
        writer = _Writer(file, hashed)
        try:
            header = _header(ordered, metadata)
            writer.write(len(header).to_bytes(8, "little"))
            writer.write(header)
            for name, outline in ordered.items():
                for start, size in blocks(outline.shape, outline.dtype.itemsize):
                    writer.write(_host_bytes(read(name, start, size)), name)
            digest = writer.finish()
        finally:
            writer.close()
        fsync(file)
    # Sums per tensor, to locate damage within the file.
    crcs = {} if writer.blocks is None else writer.blocks.tensors
    sums = {name: f"{crcs.get(name, 0):08x}" for name in ordered} if hashed else {}
    return FileRecord(path.name, writer.bytes, digest, _SUM_BLOCK_BYTES, CRC32, sums)


def _header(outlines: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    start = 0
    for name, outline in outlines.items():
        stop = start + outline.bytes
        described = {"dtype": _DTYPE_NAMES[outline.dtype][0], "shape": list(outline.shape)}
        entries[name] = described | {"data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries).encode()
    # safetensors requires the data to be aligned to eight bytes.
    return text + b" " * (-len(text) % 8)


def blocks(shape: Shape, element_bytes: int) -> Iterator[tuple[Shape, Shape]]:
    """Splits a row-major tensor into blocks of at most BLOCK_BYTES: (start, size) of each in memory order."""
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


def _host_bytes(tensor: Tensor) -> memoryview:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def tensor_checksums(path: Path) -> dict[str, str]:
    """Returns the CRC-32 of every tensor of a file by key. Raises ValueError if the header is invalid."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_LARGEST_HEADER, path.stat().st_size):
            raise ValueError(f"it would be {length} bytes long")
        entries = parse_json(file.read(length))
        sums = {}
        for name, entry in entries.items() if isinstance(entries, dict) else ():
            if name != "__metadata__" and isinstance(entry, dict):
                first, last = map(int, entry.get("data_offsets", (0, 0)))
                start = max(0, 8 + length + first)
                sums[name] = f"{crc32_of_range(file.fileno(), start, last - first):08x}"
        return sums

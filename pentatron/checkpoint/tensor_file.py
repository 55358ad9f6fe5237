"""Safetensors files, hashed while they are written.

The `safetensors` library writes a whole file in one call and neither hashes nor flushes it to disk; a checkpoint
needs both, and one pass over the bytes. Reading goes through the library.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from pentatron.parallel.pieces import Shape, region

# At most so much is copied at a time, whatever the size of a tensor.
BLOCK_BYTES = 64 * 2**20

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


@dataclass(frozen=True)
class FileRecord:
    """What a manifest says about one file."""

    name: str
    bytes: int
    sha256: str


class _HashingWriter:
    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        self.digest.update(data)
        self.bytes += len(data)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Writes a safetensors file, block by block, and flushes it to disk."""
    # Wide elements first, so that all of them lie at multiples of their own width.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    with path.open("xb") as file:
        writer = _HashingWriter(file)
        header = _header(ordered)
        writer.write(len(header).to_bytes(8, "little"))
        writer.write(header)
        for tensor in ordered.values():
            for start, size in blocks(tuple(tensor.shape), tensor.element_size()):
                writer.write(_raw(region(tensor.detach(), start, size)))
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(path.name, writer.bytes, writer.digest.hexdigest())


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries, start = {}, 0
    for name, tensor in tensors.items():
        stop = start + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
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


def sync_folder(path: Path) -> None:
    """Makes renames inside a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

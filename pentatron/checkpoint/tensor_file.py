"""Safetensors files, hashed while they are written.

The `safetensors` library writes a whole file in one call and neither hashes nor flushes it to disk; a checkpoint
needs both, and one pass over the bytes. Reading goes through the library.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

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
    """Writes a safetensors file, tensor by tensor, and flushes it to disk."""
    with path.open("xb") as file:
        writer = _HashingWriter(file)
        header = _header(tensors)
        writer.write(len(header).to_bytes(8, "little"))
        writer.write(header)
        for tensor in tensors.values():
            writer.write(_raw(tensor))
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


def _raw(tensor: Tensor) -> memoryview:
    on_cpu = tensor.detach().contiguous().cpu()
    return on_cpu.reshape(-1).view(torch.uint8).numpy().data


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

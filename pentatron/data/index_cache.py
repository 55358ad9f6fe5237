"""Orders of samples kept as files: built once on a machine, mapped by all its processes, good without a shared file system.

A file is named after a hash of everything that determines it, so a changed corpus, seed or number finds another file. It appears
whole or not at all, carries a checksum, and is never needed: whoever cannot read or write it builds the same arrays in memory.

    magic (8 bytes) · length of the header (uint32) and its crc32 · header (JSON: arrays, bytes, crc32) · arrays, each at a multiple of 64
"""

import hashlib
import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pentatron.checksums import crc32
from pentatron.config.parsing import parse_json
from pentatron.files import replaced, shared_suffix

Arrays = dict[str, npt.NDArray[Any]]

MAGIC = b"PTORDER1"
ENDING = ".order"
_OF_HEADER = struct.Struct("<II")
_ALIGNMENT = 64


class DamagedIndex(Exception):
    """What is wrong with a file, as the end of a sentence."""


@dataclass(frozen=True)
class IndexCache:
    """A folder for orders, or none. `builds`: this process writes what is missing; the others read it afterwards.

    Orders of less than `least_entries` are built faster than they are found, so no file is made of them.
    """

    folder: Path | None = None
    builds: bool = True
    least_entries: int = 0
    say: Callable[[str], None] = lambda text: None

    def get(self, key: Mapping[str, Any], entries: int, build: Callable[[], Arrays]) -> Arrays:
        """The arrays that `key` determines, from the file or from `build`."""
        if self.folder is None or entries < self.least_entries:
            return build()
        path = self.folder / f"{digest(key)}{ENDING}"
        try:
            return read_arrays(path, verify=self.builds)
        except FileNotFoundError:
            pass
        except (DamagedIndex, OSError) as problem:
            if self.builds:
                self.say(f"the order of samples in {path} cannot be used ({problem}); it is built again")
        arrays = build()
        if self.builds:
            try:
                write_arrays(path, arrays)
            except OSError as problem:
                self.say(f"{self.folder} cannot be written ({problem.strerror}); orders are kept in memory")
        return arrays


def digest(key: Mapping[str, Any]) -> str:
    text = json.dumps({"version": MAGIC.decode(), **key}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def digest_of(array: npt.NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def write_arrays(path: Path, arrays: Arrays) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    offset, checksum, described = 0, 0, {}
    for name, array in arrays.items():
        padding = -offset % _ALIGNMENT
        offset += padding
        checksum = _crc32_of(array, crc32(bytes(padding), checksum))
        described[name] = {"type": array.dtype.str, "shape": array.shape, "at": offset}
        offset += array.nbytes
    header = json.dumps({"arrays": described, "bytes": offset, "crc32": checksum}).encode()
    header += b" " * (-(len(MAGIC) + _OF_HEADER.size + len(header)) % _ALIGNMENT)
    # Machines that share the folder may write the same file at the same time: the name must be nobody else's.
    with replaced(path, shared_suffix()) as file:
        file.write(MAGIC + _OF_HEADER.pack(len(header), crc32(header)) + header)
        written = 0
        for array in arrays.values():
            padding = -written % _ALIGNMENT
            file.write(bytes(padding))
            file.write(np.ascontiguousarray(array).data)
            written += padding + array.nbytes


def read_arrays(path: Path, verify: bool) -> Arrays:
    """Maps the arrays; with `verify` every byte is compared with the checksum first."""
    size = path.stat().st_size
    before = len(MAGIC) + _OF_HEADER.size
    with path.open("rb") as file:
        start = file.read(before)
        if len(start) < before or not start.startswith(MAGIC):
            raise DamagedIndex("it does not begin as such a file does")
        length, of_header = _OF_HEADER.unpack(start[len(MAGIC) :])
        header = file.read(min(length, size))
    if len(header) != length or crc32(header) != of_header:
        raise DamagedIndex("its header is damaged")
    try:
        said = parse_json(header)
        arrays, total, checksum = said["arrays"], int(said["bytes"]), said["crc32"]
        places = {name: _place(array) for name, array in arrays.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DamagedIndex(f"its header is damaged: {type(error).__name__}: {error}") from None
    begin = before + length
    if size != begin + total:
        raise DamagedIndex(f"it has {size} bytes where {begin + total} are expected")
    content = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)[begin:]
    if verify and _crc32_of(content, 0) != checksum:
        raise DamagedIndex("its checksum is wrong")
    if any(at + math.prod(shape) * kind.itemsize > total for shape, kind, at in places.values()):
        raise DamagedIndex("an array would reach beyond its end")
    return {name: np.ndarray(shape, kind, content, at) for name, (shape, kind, at) in places.items()}


def _place(array: Mapping[str, Any]) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape, type and offset that a header says; numbers alone, never objects, which would be addresses."""
    shape, kind, at = tuple(array["shape"]), np.dtype(array["type"]), array["at"]
    if kind.kind not in "iufb" or not all(type(n) is int and n >= 0 for n in (*shape, at)):
        raise ValueError(f"{array} is no array of numbers")
    return shape, kind, at


def _crc32_of(array: npt.NDArray[Any], before: int) -> int:
    return crc32(np.ascontiguousarray(array).data, before)

"""Checksums of a file by blocks, taken while it is written and compared when a block is first read.

CRC-32 sees every error of up to 32 bits in a row and misses other damage of a block once in four billion times; it is the fastest
checksum of the standard library (docs/decisions/0031). A block is small, so that reading one sample checks little more than the sample.
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

BLOCK_BYTES = 1 << 16
SUM = np.dtype("<u4")


class BlockSums:
    """The checksums of everything passed to `update`, in the order of writing."""

    def __init__(self, running: int = 0, filled: int = 0) -> None:
        self.finished: list[int] = []
        self.running = running
        self.filled = filled

    def update(self, data: bytes | memoryview) -> None:
        view, at = memoryview(data).cast("B"), 0
        while at < len(view):
            part = view[at : at + BLOCK_BYTES - self.filled]
            self.running = zlib.crc32(part, self.running)
            self.filled += len(part)
            at += len(part)
            if self.filled == BLOCK_BYTES:
                self.finished.append(self.running)
                self.running = self.filled = 0

    def take_finished(self) -> bytes:
        """The sums of the blocks that were filled since the last call."""
        taken = np.array(self.finished, dtype=SUM).tobytes()
        self.finished.clear()
        return taken

    def take_last(self) -> bytes:
        """What `take_finished` gives, and the sum of the block that was begun."""
        taken = self.take_finished()
        return taken + (np.array([self.running], dtype=SUM).tobytes() if self.filled else b"")


class SummedFile:
    """A file being written together with its checksums."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.sums = BlockSums()
        self.bytes = 0

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.sums.update(data)
        self.bytes += len(data)


def block_count(size: int) -> int:
    return -(-size // BLOCK_BYTES)


def first_wrong_block(
    data: npt.NDArray[Any], sums: npt.NDArray[np.uint32], blocks: range
) -> tuple[int, int] | None:
    """The first of these blocks of `data` (bytes) whose checksum is not the expected one, and its checksum."""
    for block in blocks:
        found = zlib.crc32(data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES].data)
        if found != sums[block]:
            return block, found
    return None


def sums_of_file(path: Path, report: Callable[[int], None] = lambda done: None) -> bytes:
    """The checksums of all blocks of a file that is there already."""
    sums, taken = BlockSums(), bytearray()
    with path.open("rb") as file:
        while data := file.read(64 * BLOCK_BYTES):
            sums.update(data)
            taken += sums.take_finished()
            report(len(data))
    return bytes(taken) + sums.take_last()

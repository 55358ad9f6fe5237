"""The sum of a file: SHA-256 of the CRC-32 of its blocks.

Sums are there to find what disks and networks damage, not to keep out who can write a folder and its manifest alike. One SHA-256 of all bytes is one
thread's work and takes longer than a fast disk. A CRC-32 is two to three times as fast, and a damaged block keeps its own in one case of four thousand
million. Files in the format of others have a sum of all bytes in one: a block size of 0.
"""

import hashlib
import os
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentatron.checkpoint.joined_crc32 import joined_crc32

SUM_BLOCK_BYTES = 16 * 2**20
# What a block's sum may be.
SHA256, CRC32 = "sha256", "crc32"
# At a time, where files are only looked at.
READ_BYTES = 2**20

# Told of bytes as they are read.
Tell = Callable[[int], None]


class BlockSums:
    """The sum of bytes that come in parts of any size, in order; and of each tensor that parts belong to its CRC-32.

    Every byte is looked at once: sums of parts make those of blocks and those of tensors.
    """

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(max(1, threads))
        self._parts: list[tuple[str, memoryview]] = []
        self._room = SUM_BLOCK_BYTES
        self._blocks: list[Future[list[_Part]]] = []
        self.tensors: dict[str, int] = {}

    def add(self, data: bytes | memoryview, tensor: str = "") -> list[Future[Any]]:
        """The data must stay as it is until the sums that are begun now, which are returned, and the last one are there."""
        begun, left = len(self._blocks), memoryview(data)
        while len(left):
            part, left = left[: self._room], left[self._room :]
            self._parts.append((tensor, part))
            self._room -= len(part)
            if self._room == 0:
                self._close_block()
        return list(self._blocks[begun:])

    def _close_block(self) -> None:
        self._blocks.append(self._threads.submit(_sums_of_parts, self._parts))
        self._parts, self._room = [], SUM_BLOCK_BYTES

    def finish(self) -> str:
        if self._parts:
            self._close_block()
        whole = hashlib.sha256()
        for block in self._blocks:
            of_block = 0
            for part in block.result():
                of_block = joined_crc32(of_block, part.sum, part.bytes)
                if part.tensor:
                    before = self.tensors.get(part.tensor, 0)
                    self.tensors[part.tensor] = joined_crc32(before, part.sum, part.bytes)
            whole.update(_as_bytes(of_block))
        return whole.hexdigest()

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class _Part:
    tensor: str
    bytes: int
    sum: int


def _sums_of_parts(parts: list[tuple[str, memoryview]]) -> list[_Part]:
    return [_Part(tensor, len(data), zlib.crc32(data)) for tensor, data in parts]


def _as_bytes(crc32: int) -> bytes:
    return crc32.to_bytes(4, "big")


class _Crc32:
    """As those of hashlib are used."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return _as_bytes(self._value)


def sum_of_file(
    path: Path,
    block_bytes: int,
    threads: int = 1,
    cold: bool = False,
    tell: Tell | None = None,
) -> str:
    """`cold`: of what lies on the disk, where the system still has it in memory as it was written."""
    with path.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        if cold and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(descriptor).st_size
        if block_bytes == 0:
            return _sum_of_range(descriptor, 0, size, hashlib.sha256(), tell).hex()
        starts = range(0, size, block_bytes)
        with ThreadPoolExecutor(max(1, threads)) as pool:
            sums = pool.map(
                lambda start: _sum_of_range(descriptor, start, block_bytes, _Crc32(), tell), starts
            )
            return hashlib.sha256(b"".join(sums)).hexdigest()


def _sum_of_range(descriptor: int, start: int, left: int, digest: Any, tell: Tell | None) -> bytes:
    """Of so many bytes from `start` on, or as many as there are."""
    buffer = memoryview(bytearray(min(READ_BYTES, max(1, left))))
    while left > 0 and (size := os.preadv(descriptor, [buffer[:left]], start)):
        digest.update(buffer[:size])
        start, left = start + size, left - size
        if tell is not None:
            tell(size)
    return bytes(digest.digest())

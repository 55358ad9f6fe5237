"""Checksums of files by blocks: CRC-32 of each block of a fixed size, taken as the file is written or read.

CRC-32 is the fastest checksum of the standard library. It detects every burst error of up to 32 bits and misses other damage of a block
once in four billion times (decisions 0031, 0043). Checksums detect accidents, not changes made on purpose.

Two formats are made of the same blocks. The sidecar of a data file stores the sums of all blocks, so that any block can be checked when
it is first read. The manifest of a checkpoint stores one SHA-256 over them for each file. A data file is written in one thread and may be
continued by another process, so `BlockSums` has a state that can be stored. A checkpoint is written as fast as the disk allows, so
`ThreadedBlockSums` computes blocks in threads and joins the sums of their parts.
"""

import functools
import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

# What the manifest of a checkpoint calls a file's digest: SHA-256 of all bytes, or over the CRC-32 of its blocks.
SHA256, CRC32 = "sha256", "crc32"
# Bytes of one read, where a file is only summed.
READ_BYTES = 2**20

# Called with the number of bytes after each read.
Tell = Callable[[int], None]

Data = bytes | memoryview


def crc32(data: Data, before: int = 0) -> int:
    """CRC-32 of bytes that follow those with the CRC-32 `before`."""
    return zlib.crc32(data, before)


def crc32_of_stream(file: BinaryIO) -> int:
    """CRC-32 of a file from its current position to its end."""
    running = 0
    while data := file.read(READ_BYTES):
        running = zlib.crc32(data, running)
    return running


def crc32_of_range(descriptor: int, start: int, size: int, tell: Tell | None = None) -> int:
    """CRC-32 of `size` bytes of an open file from `start` on, or of as many as there are."""
    running = 0
    for data in _reads(descriptor, start, size, tell):
        running = zlib.crc32(data, running)
    return running


def _reads(descriptor: int, start: int, left: int, tell: Tell | None) -> Iterator[memoryview]:
    """The bytes of a range; each part is overwritten by the next one."""
    buffer = memoryview(bytearray(min(READ_BYTES, max(1, left))))
    while left > 0 and (size := os.preadv(descriptor, [buffer[:left]], start)):
        yield buffer[:size]
        start, left = start + size, left - size
        if tell is not None:
            tell(size)


def _parts_in_blocks(data: Data, filled: int, block_bytes: int) -> Iterator[memoryview]:
    """Cuts data at the ends of blocks; `filled` bytes of the first block came before."""
    left = memoryview(data).cast("B")
    while len(left):
        part, left = left[: block_bytes - filled], left[block_bytes - filled :]
        yield part
        filled = (filled + len(part)) % block_bytes


class BlockSums:
    """CRC-32 of each block of a stream of bytes, computed by the caller's thread.

    `running`, `filled`: CRC-32 and size of the block that is not full yet. A new object with the same two continues the stream.
    """

    def __init__(self, block_bytes: int, running: int = 0, filled: int = 0) -> None:
        self.block_bytes, self.running, self.filled = block_bytes, running, filled
        self._finished: list[int] = []

    def update(self, data: Data) -> None:
        for part in _parts_in_blocks(data, self.filled, self.block_bytes):
            self.running = zlib.crc32(part, self.running)
            self.filled += len(part)
            if self.filled == self.block_bytes:
                self._finished.append(self.running)
                self.running = self.filled = 0

    def take_finished(self) -> list[int]:
        """The sums of the blocks that were filled since the last call."""
        taken, self._finished = self._finished, []
        return taken

    def take_last(self) -> list[int]:
        """The same at the end of the stream: with the sum of the last block, which need not be full."""
        return self.take_finished() + ([self.running] if self.filled else [])


class ThreadedBlockSums:
    """The digest of a stream of bytes (SHA-256 over the CRC-32 of its blocks), computed in threads.

    `tensors`: after `finish`, the CRC-32 of the bytes of each tensor. Every byte is read once: the sums of parts make those of blocks
    and those of tensors.
    """

    def __init__(self, block_bytes: int, threads: int) -> None:
        self.block_bytes = block_bytes
        self.tensors: dict[str, int] = {}
        self._threads = ThreadPoolExecutor(max(1, threads))
        self._parts: list[tuple[str, memoryview]] = []
        self._filled = 0
        self._blocks: list[Future[list[_Part]]] = []

    def add(self, data: Data, tensor: str = "") -> list[Future[Any]]:
        """Adds bytes of a tensor, or of none. Returns the blocks that are computed from now on.

        The data must not change until these blocks and the one that is not full yet are done.
        """
        begun = len(self._blocks)
        for part in _parts_in_blocks(data, self._filled, self.block_bytes):
            self._parts.append((tensor, part))
            self._filled += len(part)
            if self._filled == self.block_bytes:
                self._close_block()
        return list(self._blocks[begun:])

    def _close_block(self) -> None:
        self._blocks.append(self._threads.submit(_sums_of_parts, self._parts))
        self._parts, self._filled = [], 0

    def finish(self) -> str:
        """Waits for all blocks; the digest in hexadecimal."""
        if self._parts:
            self._close_block()
        return _digest(self._sum_of_block(block.result()) for block in self._blocks)

    def _sum_of_block(self, parts: "list[_Part]") -> int:
        found = 0
        for part in parts:
            found = joined_crc32(found, part.sum, part.bytes)
            if part.tensor:
                before = self.tensors.get(part.tensor, 0)
                self.tensors[part.tensor] = joined_crc32(before, part.sum, part.bytes)
        return found

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class _Part:
    tensor: str
    bytes: int
    sum: int


def _sums_of_parts(parts: list[tuple[str, memoryview]]) -> list[_Part]:
    return [_Part(tensor, len(data), zlib.crc32(data)) for tensor, data in parts]


def _digest(sums: Iterable[int]) -> str:
    return hashlib.sha256(b"".join(found.to_bytes(4, "big") for found in sums)).hexdigest()


def block_sums_of_file(
    path: Path, block_bytes: int, threads: int = 1, cold: bool = False, tell: Tell | None = None
) -> Iterator[int]:
    """CRC-32 of each block of a file. `cold`: drops the file from the page cache first, to read what is on the disk."""
    with path.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        size = _size(descriptor, cold)
        if threads > 1:
            with ThreadPoolExecutor(threads) as pool:
                yield from pool.map(
                    lambda start: crc32_of_range(descriptor, start, block_bytes, tell),
                    range(0, size, block_bytes),
                )
            return
        sums = BlockSums(block_bytes)
        for data in _reads(descriptor, 0, size, tell):
            sums.update(data)
            yield from sums.take_finished()
        yield from sums.take_last()


def digest_of_file(
    path: Path, block_bytes: int, threads: int = 1, cold: bool = False, tell: Tell | None = None
) -> str:
    """What `ThreadedBlockSums` gives for the bytes of a file; with a block size of 0, SHA-256 of all bytes."""
    if block_bytes:
        return _digest(block_sums_of_file(path, block_bytes, threads, cold, tell))
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for data in _reads(file.fileno(), 0, _size(file.fileno(), cold), tell):
            digest.update(data)
    return digest.hexdigest()


def _size(descriptor: int, cold: bool) -> int:
    """The size of an open file, which `cold` drops from the page cache."""
    if cold and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return os.fstat(descriptor).st_size


class Sums(Protocol):
    """What `SummedFile` passes bytes to: `BlockSums`, or a digest of hashlib."""

    def update(self, data: Any, /) -> object: ...


class SummedFile:
    """A file that is written together with its checksum. `bytes` and `sums` have what was written without an error."""

    def __init__(self, file: BinaryIO, sums: Sums) -> None:
        self.file, self.sums, self.bytes = file, sums, 0

    def write(self, data: Data) -> int:
        view = memoryview(data).cast("B")
        self.file.write(view)
        self.sums.update(view)
        self.bytes += len(view)
        return len(view)


# A CRC-32 is the remainder of a polynomial over two elements, its highest power in the lowest bit. Bytes that follow multiply what came
# before by x to the power of their bits; the sums of both are then added.

_ONE = 1 << 31
_DIVISOR = 0xEDB88320


def joined_crc32(first: int, second: int, second_bytes: int) -> int:
    """CRC-32 of two runs of bytes, one after the other, from that of each. zlib has it; Python's module does not expose it."""
    return _product(_shift(second_bytes), first) ^ second


@functools.cache
def _shift(count: int) -> int:
    """x to the power of the bits of `count` bytes."""
    power, square = _ONE, _ONE >> 8
    while count:
        if count & 1:
            power = _product(square, power)
        square = _product(square, square)
        count >>= 1
    return power


def _product(a: int, b: int) -> int:
    """Product of two remainders: for every power in `a`, from the lowest on, `b` times that power is added."""
    found, bit = 0, _ONE
    while a:
        if a & bit:
            found ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _DIVISOR if b & 1 else b >> 1
    return found

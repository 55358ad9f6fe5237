"""Block checksums of files: the CRC-32 of each fixed-size block, computed while the file is written or read.

CRC-32 is the fastest checksum of the standard library. It detects every burst error of up to 32 bits, and
misses other damage to a block with probability 2^-32 (decisions 0031, 0043). Checksums detect accidents, not
manipulation.

Two formats use the same blocks. The sidecar of a data file stores the CRC-32 of every block, so that a block
can be checked when it is first read. The manifest of a checkpoint stores one SHA-256 over them per file. A
data file is written by one thread and may be continued by another process, so the state of `BlockChecksums`
can be stored. A checkpoint is written at disk speed, so `ThreadedBlockChecksums` computes the blocks in a
thread pool and combines the CRCs of their parts.
"""

import functools
import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Protocol

# Digest kinds in a checkpoint's manifest: SHA-256 of all bytes, or SHA-256 over the CRC-32 of the blocks.
SHA256, CRC32 = "sha256", "crc32"
# Size of one read when a file is only checksummed.
READ_BYTES = 2**20

# Progress callback, called with the number of bytes after each read.
ProgressCallback = Callable[[int], None]

Data = bytes | memoryview
# A part of a block: the tensor it belongs to, its size and its CRC-32.
_Part = tuple[str, int, int]


def crc32(data: Data, before: int = 0) -> int:
    """Returns the CRC-32 of data that follows data with the CRC-32 `before`."""
    return zlib.crc32(data, before)


def crc32_of_stream(file: BinaryIO) -> int:
    """Returns the CRC-32 of a file from its current position to its end."""
    running = 0
    while data := file.read(READ_BYTES):
        running = zlib.crc32(data, running)
    return running


def crc32_of_range(descriptor: int, start: int, size: int, tell: ProgressCallback | None = None) -> int:
    """Returns the CRC-32 of `size` bytes of an open file from `start`, or of fewer at the end of the file."""
    running = 0
    for data in _reads(descriptor, start, size, tell):
        running = zlib.crc32(data, running)
    return running


def _reads(descriptor: int, start: int, left: int, tell: ProgressCallback | None) -> Iterator[memoryview]:
    """Yields a byte range in a buffer that is reused: each view is valid until the next one."""
    buffer = memoryview(bytearray(min(READ_BYTES, max(1, left))))
    while left > 0 and (size := os.preadv(descriptor, [buffer[:left]], start)):
        yield buffer[:size]
        start, left = start + size, left - size
        if tell is not None:
            tell(size)


def _parts_in_blocks(data: Data, filled: int, block_bytes: int) -> Iterator[memoryview]:
    """Splits data at block boundaries; the first block already has `filled` bytes."""
    left = memoryview(data).cast("B")
    while len(left):
        part, left = left[: block_bytes - filled], left[block_bytes - filled :]
        yield part
        filled = (filled + len(part)) % block_bytes


class BlockChecksums:
    """Computes the CRC-32 of each block of a byte stream, in the calling thread.

    `running` and `filled` are the CRC-32 and size of the incomplete block. A new object created with them
    continues the stream.
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
        """Returns the sums of blocks completed since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def take_last(self) -> list[int]:
        """Returns the remaining sums at the end of the stream, including that of an incomplete last block."""
        return self.take_finished() + ([self.running] if self.filled else [])


class ThreadedBlockChecksums:
    """Computes the digest of a byte stream (SHA-256 over the CRC-32 of its blocks) in a thread pool.

    `tensors` contains the CRC-32 of each tensor after `finish`. Every byte is read once: CRCs of parts are
    combined into those of blocks and those of tensors.
    """

    def __init__(self, block_bytes: int, threads: int) -> None:
        self.block_bytes = block_bytes
        self.tensors: dict[str, int] = {}
        self._threads = ThreadPoolExecutor(max(1, threads))
        self._parts: list[tuple[str, memoryview]] = []
        self._filled = 0
        self._blocks: list[Future[list[_Part]]] = []

    def add(self, data: Data, tensor: str = "") -> list[Future[Any]]:
        """Adds data of a tensor, or of none. Returns futures of the blocks this call completed.

        The data must not change until these futures and the one of the block still incomplete are done.
        """
        submitted = len(self._blocks)
        for part in _parts_in_blocks(data, self._filled, self.block_bytes):
            self._parts.append((tensor, part))
            self._filled += len(part)
            if self._filled == self.block_bytes:
                self._close_block()
        return list(self._blocks[submitted:])

    def _close_block(self) -> None:
        self._blocks.append(self._threads.submit(_sums_of_parts, self._parts))
        self._parts, self._filled = [], 0

    def finish(self) -> str:
        """Waits for all blocks and returns the digest in hexadecimal."""
        if self._parts:
            self._close_block()
        return _digest(self._sum_of_block(block.result()) for block in self._blocks)

    def _sum_of_block(self, parts: list[_Part]) -> int:
        block = 0
        for tensor, size, crc in parts:
            block = crc32_combine(block, crc, size)
            if tensor:
                self.tensors[tensor] = crc32_combine(self.tensors.get(tensor, 0), crc, size)
        return block

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


def _sums_of_parts(parts: list[tuple[str, memoryview]]) -> list[_Part]:
    return [(tensor, len(data), zlib.crc32(data)) for tensor, data in parts]


def _digest(sums: Iterable[int]) -> str:
    return hashlib.sha256(b"".join(crc.to_bytes(4, "big") for crc in sums)).hexdigest()


def block_sums_of_file(
    path: Path, block_bytes: int, threads: int = 1, cold: bool = False, tell: ProgressCallback | None = None
) -> Iterator[int]:
    """Yields the CRC-32 of each block of a file.

    `cold`: drop the file from the page cache first, to read from disk.
    """
    with path.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        size = _size(descriptor, cold)
        if threads > 1:
            sum_of = functools.partial(crc32_of_range, descriptor, size=block_bytes, tell=tell)
            with ThreadPoolExecutor(threads) as pool:
                yield from pool.map(sum_of, range(0, size, block_bytes))
            return
        sums = BlockChecksums(block_bytes)
        for data in _reads(descriptor, 0, size, tell):
            sums.update(data)
            yield from sums.take_finished()
        yield from sums.take_last()


def digest_of_file(
    path: Path, block_bytes: int, threads: int = 1, cold: bool = False, tell: ProgressCallback | None = None
) -> str:
    """Returns the digest that `ThreadedBlockChecksums` computes for the bytes of a file.

    If `block_bytes` is 0, SHA-256 of all bytes.
    """
    if block_bytes:
        return _digest(block_sums_of_file(path, block_bytes, threads, cold, tell))
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for data in _reads(file.fileno(), 0, _size(file.fileno(), cold), tell):
            digest.update(data)
    return digest.hexdigest()


def _size(descriptor: int, cold: bool) -> int:
    """Returns the size of an open file, after dropping it from the page cache if `cold`."""
    if cold and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return os.fstat(descriptor).st_size


class Checksum(Protocol):
    """Protocol of the checksums `ChecksummedFile` updates: `BlockChecksums` or a hashlib digest."""

    def update(self, data: Any, /) -> object: ...


class ChecksummedFile:
    """A file that is checksummed while it is written. `bytes` and `sums` cover only successful writes."""

    def __init__(self, file: BinaryIO, sums: Checksum) -> None:
        self.file, self.sums, self.bytes = file, sums, 0

    def write(self, data: Data) -> int:
        view = memoryview(data).cast("B")
        self.file.write(view)
        self.sums.update(view)
        self.bytes += len(view)
        return len(view)


# A CRC-32 is a polynomial over GF(2) modulo the CRC polynomial, with the highest power in the lowest bit.
# Appending n bits multiplies the CRC of the prefix by x^n; the CRC of the appended bytes is then added (XOR).

_ONE = 1 << 31
_DIVISOR = 0xEDB88320


def crc32_combine(first: int, second: int, second_bytes: int) -> int:
    """Combines the CRC-32 of two consecutive byte ranges.

    This is zlib's crc32_combine, which Python does not expose.
    """
    return _product(_shift(second_bytes), first) ^ second


@functools.cache
def _shift(count: int) -> int:
    """Returns x to the power of 8 * count modulo the CRC polynomial, by repeated squaring."""
    power, square = _ONE, _ONE >> 8
    while count:
        if count & 1:
            power = _product(square, power)
        square = _product(square, square)
        count >>= 1
    return power


def _product(a: int, b: int) -> int:
    """Multiplies two polynomials over GF(2) modulo the CRC polynomial."""
    product, bit = 0, _ONE
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _DIVISOR if b & 1 else b >> 1
    return product

"""Block checksums equal their definition, however the bytes arrive and whatever computes them."""

import hashlib
import io
import random
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

import pentatron.checksums as checksums
from pentatron.checksums import (
    BlockChecksums,
    ChecksummedFile,
    ThreadedBlockChecksums,
    block_sums_of_file,
    crc32_of_range,
    crc32_of_stream,
    digest_of_file,
)

BLOCK = 1000


def sums_by_definition(data: bytes) -> list[int]:
    return [zlib.crc32(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK)]


def digest_by_definition(data: bytes) -> str:
    return hashlib.sha256(
        b"".join(struct.pack(">I", found) for found in sums_by_definition(data))
    ).hexdigest()


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 7 * BLOCK + 13])
@pytest.mark.parametrize("threads", [1, 3])
def test_parts_of_any_size_and_a_file_have_one_sum(
    size: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "READ_BYTES", 300)
    data = random.Random(size).randbytes(size)
    adding, plain, begin = ThreadedBlockChecksums(BLOCK, threads), BlockChecksums(BLOCK), 0
    of_tensors = {"first": b"", "rest": b""}
    while begin < size:
        step = random.Random(begin).choice([1, 17, 900, 2500])
        part = data[begin : begin + step]
        adding.add(part, "first" if begin < size // 2 else "rest")
        plain.update(part)
        begin += step
        of_tensors["first" if begin - step < size // 2 else "rest"] += part
    found = adding.finish()
    adding.close()
    assert adding.tensors == {name: zlib.crc32(held) for name, held in of_tensors.items() if held}
    path, told = tmp_path / "file", []
    path.write_bytes(data)
    assert found == digest_by_definition(data) == digest_of_file(path, BLOCK, threads, tell=told.append)
    assert sum(told) == size
    assert plain.take_last() == sums_by_definition(data) == list(block_sums_of_file(path, BLOCK, threads))
    assert digest_of_file(path, 0) == digest_of_file(path, 0, cold=True) == hashlib.sha256(data).hexdigest()
    assert digest_of_file(path, BLOCK, threads, cold=True) == found


def test_a_stream_is_continued_from_its_state() -> None:
    data = random.Random(1).randbytes(4 * BLOCK + 5)
    for cut in (0, 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7, len(data)):
        first = BlockChecksums(BLOCK)
        first.update(data[:cut])
        second = BlockChecksums(BLOCK, first.running, first.filled)
        second.update(data[cut:])
        assert first.take_finished() + second.take_last() == sums_by_definition(data)
        assert first.take_finished() == []


def test_values_of_any_type_count_as_their_bytes() -> None:
    values = np.arange(600, dtype=np.uint32)
    sums = BlockChecksums(BLOCK)
    sums.update(values.data)
    assert sums.take_last() == sums_by_definition(values.tobytes())
    held = io.BytesIO()
    file = ChecksummedFile(held, hashlib.sha256())
    assert file.write(values.data) == file.bytes == values.nbytes and held.getvalue() == values.tobytes()


def test_ranges_and_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "READ_BYTES", 64)
    data = random.Random(2).randbytes(1000)
    (tmp_path / "file").write_bytes(data)
    with (tmp_path / "file").open("rb") as file:
        assert crc32_of_range(file.fileno(), 100, 333) == zlib.crc32(data[100:433])
        assert crc32_of_range(file.fileno(), 900, 500) == zlib.crc32(data[900:]), "as many as there are"
        file.seek(10)
        assert crc32_of_stream(file) == zlib.crc32(data[10:])


def test_a_write_that_fails_is_not_counted() -> None:
    class Full(io.BytesIO):
        def write(self, data: object, /) -> int:
            raise OSError(28, "No space left on device")

    digest = hashlib.sha256()
    file = ChecksummedFile(Full(), digest)
    with pytest.raises(OSError, match="No space"):
        file.write(b"lost")
    assert file.bytes == 0 and digest.hexdigest() == hashlib.sha256().hexdigest()


def test_blocks_that_change_places_change_the_sum(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(3 * BLOCK)
    path = tmp_path / "file"
    path.write_bytes(data)
    before = digest_of_file(path, BLOCK)
    path.write_bytes(data[BLOCK : 2 * BLOCK] + data[:BLOCK] + data[2 * BLOCK :])
    assert digest_of_file(path, BLOCK) != before

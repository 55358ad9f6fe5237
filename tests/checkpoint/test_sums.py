import hashlib
import random
import zlib
from pathlib import Path

import pytest

import pentatron.checkpoint.sums as sums
from pentatron.checkpoint.sums import BlockSums, sum_of_file

BLOCK = 1000


def by_definition(data: bytes) -> str:
    blocks = [data[i : i + BLOCK] for i in range(0, len(data), BLOCK)]
    return hashlib.sha256(b"".join(zlib.crc32(block).to_bytes(4, "big") for block in blocks)).hexdigest()


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 7 * BLOCK + 13])
@pytest.mark.parametrize("threads", [1, 3])
def test_parts_of_any_size_and_a_file_have_one_sum(
    size: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums, "SUM_BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(sums, "READ_BYTES", 300)
    data = random.Random(size).randbytes(size)
    adding, begin = BlockSums(threads), 0
    of_tensors = {"first": b"", "rest": b""}
    while begin < size:
        step = random.Random(begin).choice([1, 17, 900, 2500])
        adding.add(data[begin : begin + step], "first" if begin < size // 2 else "rest")
        begin += step
        of_tensors["first" if begin - step < size // 2 else "rest"] += data[begin - step : begin]
    found = adding.finish()
    adding.close()
    assert adding.tensors == {name: zlib.crc32(held) for name, held in of_tensors.items() if held}
    path, told = tmp_path / "file", []
    path.write_bytes(data)
    assert found == by_definition(data) == sum_of_file(path, BLOCK, threads, tell=told.append)
    assert sum(told) == size
    assert sum_of_file(path, 0) == hashlib.sha256(data).hexdigest()


def test_blocks_that_change_places_change_the_sum(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(3 * BLOCK)
    path = tmp_path / "file"
    path.write_bytes(data)
    before = sum_of_file(path, BLOCK)
    path.write_bytes(data[BLOCK : 2 * BLOCK] + data[:BLOCK] + data[2 * BLOCK :])
    assert sum_of_file(path, BLOCK) != before

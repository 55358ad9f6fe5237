"""Tests `.bin/.idx` pairs: bytes on disk, reading, detection of damage, atomic writes."""

import hashlib
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pentatron.data import indexed
from pentatron.data.indexed import IndexedDataset, token_dtype
from pentatron.data.indexed_writer import IndexedDatasetWriter

DOCUMENTS = [[1, 2, 3], [10, 20, 30, 40, 50], [7, 65499]]
GOLDEN_IDX = bytes.fromhex(
    "4d4d49444944580000 0100000000000000 08 0300000000000000 0400000000000000 03000000 05000000 02000000"
    "0000000000000000 0600000000000000 1000000000000000"
    "0000000000000000 0100000000000000 0200000000000000 0300000000000000"
)
GOLDEN_SHA256 = "aa2c4937b98c37ee22626f08c7a03f46b092d140edb2d7af326aa98e83716b38"


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Writes a pair whose name contains a dot."""
    path = tmp_path / "corpus.v1_text_document"
    write(path, DOCUMENTS)
    return path


def write(prefix: Path, documents: list[list[int]], dtype: str = "uint16") -> None:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)


def test_written_bytes_are_the_golden_file(prefix: Path) -> None:
    idx = Path(f"{prefix}.idx").read_bytes()
    assert idx == GOLDEN_IDX
    assert hashlib.sha256(idx).hexdigest() == GOLDEN_SHA256
    assert Path(f"{prefix}.bin").read_bytes() == struct.pack("<10H", 1, 2, 3, 10, 20, 30, 40, 50, 7, 65499)


def test_reads_back_what_was_written(prefix: Path) -> None:
    dataset = IndexedDataset(prefix)
    assert len(dataset) == 3
    assert dataset.dtype == np.uint16
    assert dataset.sequence_lengths.tolist() == [3, 5, 2]
    assert dataset.pointers.tolist() == [0, 6, 16]
    assert dataset.document_indices.tolist() == [0, 1, 2, 3]
    assert [dataset.get(i).tolist() for i in range(3)] == DOCUMENTS
    assert dataset.get(1, 2).tolist() == [30, 40, 50]
    assert dataset.get(1, 1, 3).tolist() == [20, 30, 40]
    assert dataset.get(1, 5).tolist() == []
    with pytest.raises(ValueError, match="read-only"):
        dataset.get(0)[0] = 9


@pytest.mark.parametrize(
    ("index", "offset", "length"), [(0, 0, 4), (0, 2, 2), (0, 4, None), (0, -1, 1), (3, 0, 1)]
)
def test_get_never_reads_a_neighbour(prefix: Path, index: int, offset: int, length: int | None) -> None:
    with pytest.raises(IndexError):
        IndexedDataset(prefix).get(index, offset, length)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_every_integer_type_survives(tmp_path: Path, dtype: str) -> None:
    extremes = [np.iinfo(dtype).min, 0, np.iinfo(dtype).max]
    write(tmp_path / "x", [extremes, [1]], dtype)
    dataset = IndexedDataset(tmp_path / "x")
    assert dataset.dtype == np.dtype(dtype)
    assert dataset.get(0).tolist() == extremes
    assert dataset.get(1).tolist() == [1]


def test_empty_documents_are_boundaries_without_sequences(tmp_path: Path) -> None:
    write(tmp_path / "x", [[1], [], [2, 3]])
    dataset = IndexedDataset(tmp_path / "x")
    assert dataset.sequence_lengths.tolist() == [1, 2]
    assert dataset.document_indices.tolist() == [0, 1, 1, 2]


def test_a_pair_without_documents_opens(tmp_path: Path) -> None:
    write(tmp_path / "x", [])
    assert len(IndexedDataset(tmp_path / "x")) == 0


def test_pickles_as_a_path(prefix: Path) -> None:
    data = pickle.dumps(IndexedDataset(prefix))
    assert len(data) < 500
    assert pickle.loads(data).get(1).tolist() == DOCUMENTS[1]


def test_blocks_of_the_check_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check runs in blocks: a valid file passes, and damage in a later block is detected."""
    monkeypatch.setattr(indexed, "CHECK_BLOCK", 4)
    write(tmp_path / "x", [[1] * (i % 5 + 1) for i in range(11)])
    assert len(IndexedDataset(tmp_path / "x")) == 11
    idx = tmp_path / "x.idx"
    content = bytearray(idx.read_bytes())
    at = 34 + 4 * 11 + 8 * 9
    content[at] += 2
    idx.write_bytes(content)
    with pytest.raises(ValueError, match=f"byte {at}: pointer 9"):
        IndexedDataset(tmp_path / "x")


@pytest.mark.parametrize(
    ("vocab_size", "expected"),
    [
        (None, "int32"),
        (1, "uint16"),
        (65499, "uint16"),
        (65500, "int32"),
        (65536, "int32"),
        (151936, "int32"),
    ],
)
def test_token_dtype(vocab_size: int | None, expected: str) -> None:
    assert token_dtype(vocab_size) == np.dtype(expected)


def put(offset: int, layout: str, value: int) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        patch = struct.pack(layout, value)
        return content[:offset] + patch + content[offset + len(patch) :]

    return change


IDX_DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda c: b"", r"byte 0: the header should be 34 bytes, found 0"),
    "header cut": (lambda c: c[:20], r"byte 20: the header should be 34 bytes, found 20"),
    "magic": (put(3, "<B", 0), r"byte 0: the magic should be 4d4d49444944580000, found 4d4d49004944580000"),
    "version": (put(9, "<Q", 2), r"byte 9: the version should be 1, found 2"),
    "unknown dtype": (put(17, "<B", 9), r"byte 17: .* one of \[1, 2, 3, 4, 5, 8\], found 9"),
    "float dtype": (put(17, "<B", 7), r"byte 17: .* found 7"),
    "wider dtype": (put(17, "<B", 4), r"byte 54: pointer 1 should be 12, found 6"),
    "narrower dtype": (put(17, "<B", 1), r"byte 54: pointer 1 should be 3, found 6"),
    "huge count": (put(18, "<Q", 2**60), r"byte 102: the end of 1152921504606846976 sequences"),
    "no boundaries": (put(26, "<Q", 0), r"byte 26: the number of document boundaries"),
    "cut by a byte": (lambda c: c[:-1], r"byte 101: .* should be byte 102, found byte 101"),
    "cut in half": (lambda c: c[:51], r"byte 51: .* should be byte 102, found byte 51"),
    "longer": (lambda c: c + b"\0" * 3, r"byte 102: .* should be byte 102, found byte 105"),
    "negative length": (put(38, "<i", -5), r"byte 38: length 1 should be zero or more, found -5"),
    "changed length": (put(38, "<i", 6), r"byte 62: pointer 2 should be 18, found 16"),
    "last length": (put(42, "<i", 3), r"has 20 bytes where .* expects 22"),
    "pointer out of range": (put(62, "<q", 1 << 40), r"byte 62: pointer 2 should be 16, found 1099511627776"),
    "pointer negative": (put(54, "<q", -6), r"byte 54: pointer 1 should be 6, found -6"),
    "pointer swapped": (put(46, "<q", 6), r"byte 46: pointer 0 should be 0, found 6"),
    "first boundary": (put(70, "<q", 1), r"byte 70: the first document boundary should be 0, found 1"),
    "boundary back": (put(78, "<q", 3), r"byte 86: document boundary 2 should be 3 or more, found 2"),
    "last boundary": (put(94, "<q", 4), r"byte 94: the last document boundary should be 3, found 4"),
}


@pytest.mark.parametrize("name", IDX_DAMAGE)
def test_damaged_index_is_refused_with_its_place(prefix: Path, name: str) -> None:
    change, message = IDX_DAMAGE[name]
    path = Path(f"{prefix}.idx")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=message) as caught:
        IndexedDataset(prefix)
    assert "corpus.v1_text_document.idx" in str(caught.value)
    assert "again" in str(caught.value), "the message must say what to do"


@pytest.mark.parametrize("size", [0, 10, 19, 21, 40])
def test_bin_of_another_size_is_refused(prefix: Path, size: int) -> None:
    path = Path(f"{prefix}.bin")
    path.write_bytes((path.read_bytes() * 2)[:size])
    with pytest.raises(ValueError, match=rf"text_document\.bin has {size} bytes where .*\.idx expects 20"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_file_is_named(prefix: Path, suffix: str) -> None:
    Path(f"{prefix}{suffix}").unlink()
    with pytest.raises(ValueError, match=rf"no data file .*{suffix}; give the prefix"):
        IndexedDataset(prefix)


def test_ids_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for wrong in (65536, -1):
        with pytest.raises(ValueError, match=f"token {wrong} does not fit uint16"):
            write(tmp_path / "x", [[1, wrong]])
    with pytest.raises(ValueError, match="cannot be stored as float32"):
        IndexedDatasetWriter(tmp_path / "x", "float32")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_old_pair(prefix: Path) -> None:
    before = {path.name: path.read_bytes() for path in prefix.parent.iterdir()}
    with pytest.raises(RuntimeError, match="half-way"), IndexedDatasetWriter(prefix, "uint16") as writer:
        writer.add_document([1, 2])
        raise RuntimeError("half-way")
    assert {path.name: path.read_bytes() for path in prefix.parent.iterdir()} == before


def test_a_rewrite_replaces_the_pair(prefix: Path) -> None:
    write(prefix, [[5, 6]], "int32")
    assert IndexedDataset(prefix).get(0).tolist() == [5, 6]
    assert sorted(path.suffix for path in prefix.parent.iterdir()) == [".bin", ".idx", ".meta"]


@pytest.mark.parametrize("when", ["before", "between", "last", "after"])
def test_killed_around_the_renames_never_mixes_pairs(prefix: Path, when: str) -> None:
    """After SIGKILL at each point of the commit, the prefix opens as the old pair, the new one, or not."""
    body = f"""
import os, signal
from pentatron.data import indexed_writer
real = indexed_writer.commit
def commit(temporary, target):
    moment = {{".bin": "before", ".meta": "between", ".idx": "last"}}[target.suffix]
    if moment == {when!r}:
        os.kill(os.getpid(), signal.SIGKILL)
    real(temporary, target)
    if target.suffix == ".idx":
        os.kill(os.getpid(), signal.SIGKILL)
indexed_writer.commit = commit
with indexed_writer.IndexedDatasetWriter({str(prefix)!r}, "uint16") as writer:
    # The same sizes as before: only the order of the steps can keep the two apart.
    for document in {[[9] * len(document) for document in DOCUMENTS]!r}:
        writer.add_document(document)
"""
    result = subprocess.run(
        [sys.executable, "-c", body], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert result.returncode == -signal.SIGKILL
    if when == "after":
        assert IndexedDataset(prefix).get(0).tolist() == [9, 9, 9]
    else:
        with pytest.raises(ValueError, match="no data file"):
            IndexedDataset(prefix)
    write(prefix, DOCUMENTS)
    assert IndexedDataset(prefix).get(0).tolist() == DOCUMENTS[0]


def test_a_swapped_pair_is_refused(prefix: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write(other, [[1, 2, 3, 4]])
    shutil.copy(f"{other}.bin", f"{prefix}.bin")
    with pytest.raises(ValueError, match="not a pair"):
        IndexedDataset(prefix)


@pytest.fixture
def opened(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> IndexedDataset:
    """Opens a pair without checksums that is checked for changes before every read."""
    monkeypatch.setattr(indexed, "STAMP_SECONDS", -1.0)
    return IndexedDataset(prefix, with_sidecar=False)


def rewrite_in_place(path: Path, change: Callable[[bytes], bytes]) -> None:
    with path.open("r+b") as file:
        content = change(file.read())
        file.seek(0)
        file.write(content)
        file.truncate()
    later = path.stat().st_mtime_ns + 10**6
    os.utime(path, ns=(later, later))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda old: bytes(len(old)), "its modification time is not that"),
        (lambda old: old[: len(old) // 2], r"it had \d+ bytes and has \d+"),
        (lambda old: old + old, r"it had \d+ bytes and has \d+"),
    ],
    ids=["overwritten", "truncated", "appended"],
)
def test_a_change_of_an_open_pair_ends_reading(
    prefix: Path, opened: IndexedDataset, suffix: str, change: Callable[[bytes], bytes], what: str
) -> None:
    assert opened.get(0).tolist() == DOCUMENTS[0]
    rewrite_in_place(Path(f"{prefix}{suffix}"), change)
    with pytest.raises(
        ValueError, match=rf"corpus\.v1_text_document\{suffix} changed while it was read \({what}"
    ):
        opened.get(0)


def test_a_replaced_pair_ends_reading(prefix: Path, opened: IndexedDataset) -> None:
    write(prefix, DOCUMENTS[::-1])
    with pytest.raises(ValueError, match=r"\.bin changed while it was read"):
        opened.get(0)


def test_a_removed_or_copied_pair_is_read_on(prefix: Path, opened: IndexedDataset, tmp_path: Path) -> None:
    """Neither removing the file nor replacing it with a copy changes the mapped tokens."""
    binary = Path(f"{prefix}.bin")
    shutil.copy2(binary, tmp_path / "copy")
    (tmp_path / "copy").replace(binary)
    assert opened.get(2).tolist() == DOCUMENTS[2]
    binary.unlink()
    assert opened.get(1).tolist() == DOCUMENTS[1]


def test_checksums_decide_about_a_touched_file(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "STAMP_SECONDS", -1.0)
    dataset, binary = IndexedDataset(prefix), Path(f"{prefix}.bin")
    assert dataset.get(1).tolist() == DOCUMENTS[1]
    rewrite_in_place(binary, lambda old: old)
    assert dataset.get(1).tolist() == DOCUMENTS[1]
    rewrite_in_place(binary, lambda old: bytes(len(old)))
    with pytest.raises(ValueError, match=r"\.bin is damaged between bytes 0 and"):
        dataset.get(1)

"""Tests checksums of a pair: damage is detected at open or at first read, with its position."""

import os
import struct
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pentatron.checksums import BlockChecksums
from pentatron.data.indexed import BLOCK_BYTES, IndexedDataset, TokenizerIdentity, read_sidecar, stored_sums
from pentatron.data.indexed_writer import IndexedDatasetWriter, merge
from pentatron.data.inspect import (
    describe,
    document_lengths,
    histogram_lines,
    require_same_tokenizer,
    seal,
    verify,
)
from pentatron.data.tokenizer import ByteTokenizer, NullTokenizer, identify_tokenizer
from tests.data.fuzzed_pairs import try_many

TOKENIZER = TokenizerIdentity("HFTokenizer", "ab" * 32, 60000, 0)
# Five sequences of one block each, and a little more.
LENGTH = BLOCK_BYTES // 2


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    with IndexedDatasetWriter(tmp_path / "x", "uint16", TOKENIZER) as writer:
        for number in range(5):
            writer.add_document(np.arange(LENGTH) % (50000 + number))
        writer.add_document([1, 2, 3])
    return tmp_path / "x"


def change(path: Path, at: int, value: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(value)] = value
    path.write_bytes(content)


def test_sums_do_not_depend_on_how_the_bytes_came() -> None:
    data = os.urandom(3 * BLOCK_BYTES + 17)
    expected = [zlib.crc32(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]
    for step in (1000, BLOCK_BYTES, 2 * BLOCK_BYTES + 1, len(data)):
        sums, taken = BlockChecksums(BLOCK_BYTES), b""
        for at in range(0, len(data), step):
            sums.update(data[at : at + step])
            taken += stored_sums(sums.take_finished())
        assert struct.unpack("<4I", taken + stored_sums(sums.take_last())) == tuple(expected)


def test_content_is_compared_at_first_touch_and_only_there(prefix: Path) -> None:
    change(Path(f"{prefix}.bin"), 2 * BLOCK_BYTES + 7, b"\x99\x99")
    dataset = IndexedDataset(prefix)
    for good in (0, 1, 3, 4, 5):
        assert dataset.get(good)[1] == (2 if good == 5 else 1)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"x\.bin is damaged between bytes 131072 and 196608: .* again"):
            dataset.get(2, 10, 1)


def test_a_block_is_compared_once(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = IndexedDataset._require_block

    def counting(self: IndexedDataset, *given: Any) -> None:
        seen.append(given[-2])
        real(self, *given)

    dataset = IndexedDataset(prefix)
    monkeypatch.setattr(IndexedDataset, "_require_block", counting)
    for _ in range(3):
        dataset.get(1, 5, 100)
        dataset.read(LENGTH - 1, LENGTH + 1)
    assert seen == [1, 0], "block 1 first, then block 0 for the token before it"
    dataset.get(2, 0, 0)
    assert seen == [1, 0], "nothing read, nothing compared"


def test_threads_all_refuse(prefix: Path) -> None:
    change(Path(f"{prefix}.bin"), 3 * BLOCK_BYTES, b"\xee")
    dataset = IndexedDataset(prefix)
    refused: list[int] = []

    def touch() -> None:
        for number in (0, 3, 1, 3):
            try:
                dataset.get(number)
            except ValueError:
                refused.append(number)

    threads = [threading.Thread(target=touch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused == [3] * 8


def test_damage_that_keeps_the_structure_is_found_at_open(prefix: Path) -> None:
    # A document boundary moved by one: monotone, in range, and wrong.
    at = 34 + 12 * 6 + 8 * 2
    change(Path(f"{prefix}.idx"), at, struct.pack("<q", 1))
    with pytest.raises(ValueError, match=r"x\.idx is damaged between bytes 0 and 162"):
        IndexedDataset(prefix)
    Path(f"{prefix}.meta").unlink()
    assert len(IndexedDataset(prefix)) == 6, "without a sidecar the structure is all there is to check"


def test_damaged_checksums_are_blamed_themselves(prefix: Path) -> None:
    meta = Path(f"{prefix}.meta")
    good = meta.read_bytes()
    begin = good.index(b"\n", good.index(b"\n") + 1) + 1
    change(meta, begin, b"\0\0\0\0")
    with pytest.raises(ValueError, match=rf"x\.meta is damaged at byte {begin}: the checksums"):
        IndexedDataset(prefix).get(0)
    for damaged, place in ((good[:-1], len(good) - 1), (good + b"x", len(good)), (b"", 0), (good[5:], 0)):
        meta.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"x\.meta is damaged at byte {place}: .*or delete it"):
            IndexedDataset(prefix)
    line = good[: good.index(b"\n")].replace(b"pentatron data 1", b"pentatron data 2")
    meta.write_bytes(b"%s\n%08x\n" % (line, zlib.crc32(line)))
    with pytest.raises(ValueError, match="'pentatron data 2', which this version does not read"):
        IndexedDataset(prefix)


def test_a_pair_of_the_same_shape_is_refused(prefix: Path, tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "y", "uint16") as writer:
        for _ in range(5):
            writer.add_document(np.ones(LENGTH, int))
        writer.add_document([1, 2, 3])
    Path(f"{prefix}.bin").write_bytes((tmp_path / "y.bin").read_bytes())
    with pytest.raises(ValueError, match="bytes 0 and 65536"):
        IndexedDataset(prefix).get(0)
    with pytest.raises(ValueError, match="bytes 0 and 65536"):
        verify(prefix)
    seal(prefix)
    assert IndexedDataset(prefix).get(0)[3] == 1


def test_a_vocabulary_that_is_too_small_is_refused_at_open(prefix: Path) -> None:
    largest = LENGTH - 1
    IndexedDataset(prefix, vocab_size=largest + 1)
    with pytest.raises(ValueError, match=f"holds token {largest}, outside the vocabulary of {largest}"):
        IndexedDataset(prefix, vocab_size=largest)


def test_another_tokenizer_is_refused_until_it_is_forgotten(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "x", "uint16", identify_tokenizer(ByteTokenizer())) as writer:
        writer.add_document([1, 2, 3])
    require_same_tokenizer(IndexedDataset(tmp_path / "x"), ByteTokenizer())
    with pytest.raises(
        ValueError,
        match=r"another tokenizer \(ByteTokenizer of 257 ids.*\(NullTokenizer of 257 ids.*data seal",
    ):
        require_same_tokenizer(IndexedDataset(tmp_path / "x"), NullTokenizer(256))
    seal(tmp_path / "x")
    require_same_tokenizer(IndexedDataset(tmp_path / "x"), NullTokenizer(256))


def test_verify_reads_everything(prefix: Path) -> None:
    assert verify(prefix) == "structure good, 7 checksums good, 163,843 tokens below 60,000"
    with pytest.raises(ValueError, match="holds token 32000 at byte 64000, outside the vocabulary of 32000"):
        verify(prefix, 32000)
    change(Path(f"{prefix}.bin"), 5 * BLOCK_BYTES, b"\x07")
    with pytest.raises(ValueError, match="between bytes 327680 and 327686"):
        verify(prefix)
    Path(f"{prefix}.meta").unlink()
    assert verify(prefix).startswith("structure good; no checksums to compare")


def test_lengths(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "x", "int32") as writer:
        for size in (0, 1, 2, 3, 4, 7, 8, 0):
            writer.add_document([5] * size)
        writer.add_document([1] * 9, [4, 5])
    lengths = document_lengths(IndexedDataset(tmp_path / "x"))
    assert lengths.powers == (2, 1, 2, 2, 2)
    assert (lengths.documents, lengths.tokens, lengths.shortest, lengths.longest) == (9, 34, 0, 9)
    assert histogram_lines(lengths.powers)[3] == f"   4 to 7 tokens             2  {'█' * 40}"
    said = describe(tmp_path / "x")
    assert (said["sequences"], said["dtype"], said["tokenizer"], said["largest_token"]) == (
        8,
        "int32",
        None,
        5,
    )


def test_merging_appends_documents(prefix: Path, tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "y", "uint16", TOKENIZER) as writer:
        writer.add_document([])
        writer.add_document([7, 8, 9], [1, 2])
    metadata = merge([tmp_path / "y", prefix, tmp_path / "y"], tmp_path / "z")
    merged, first = IndexedDataset(tmp_path / "z"), IndexedDataset(prefix)
    assert metadata == merged.metadata and metadata.tokenizer == TOKENIZER
    assert merged.document_indices.tolist() == [0, 0, 2, 3, 4, 5, 6, 7, 8, 8, 10]
    assert [merged.get(at).tolist() for at in (0, 1, 7, 8, 9)] == [[7], [8, 9], [1, 2, 3], [7], [8, 9]]
    assert np.array_equal(merged.get(4), first.get(2))
    verify(tmp_path / "z")
    with pytest.raises(ValueError, match=r"z\.idx exists already; add --overwrite"):
        merge([prefix], tmp_path / "z")


def test_mismatched_or_damaged_pairs_are_not_merged(prefix: Path, tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "wide", "int32") as writer:
        writer.add_document([1])
    with pytest.raises(ValueError, match=r"holds uint16 and .*wide holds int32"):
        merge([prefix, tmp_path / "wide"], tmp_path / "z")
    with IndexedDatasetWriter(tmp_path / "other", "uint16", TokenizerIdentity("B", "cd", 9, 0)) as writer:
        writer.add_document([1])
    with pytest.raises(ValueError, match=r"x and .*other were prepared with different tokenizers"):
        merge([prefix, tmp_path / "other"], tmp_path / "z")
    with IndexedDatasetWriter(tmp_path / "unknown", "uint16") as writer:
        writer.add_document([1])
    assert merge([prefix, tmp_path / "unknown"], tmp_path / "z").tokenizer is None
    change(Path(f"{prefix}.bin"), BLOCK_BYTES, b"\x77")
    with pytest.raises(ValueError, match="damaged between bytes 65536 and 131072"):
        merge([prefix], tmp_path / "new")
    assert not list(tmp_path.glob("new*")), "nothing half-written stays"


def test_sealing_is_atomic_and_complete(prefix: Path) -> None:
    written = read_sidecar(prefix)
    assert written is not None
    metadata = seal(prefix)
    sealed = read_sidecar(prefix)
    assert sealed is not None and sealed.metadata == metadata
    assert np.array_equal(written.bin_sums, sealed.bin_sums)
    assert np.array_equal(written.idx_sums, sealed.idx_sums)
    assert metadata.largest_token == written.metadata.largest_token


def test_hundreds_of_damaged_pairs(tmp_path: Path) -> None:
    """`make fuzz-data` runs more cases."""
    outcomes = try_many(0, 250, tmp_path / "case")
    assert outcomes["refused"] > 150


def test_the_damage_is_enough_to_notice_a_reader_that_does_not_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IndexedDataset, "_verify_block", lambda self, sidecar, block: None)
    with pytest.raises(AssertionError, match="wrong tokens were read in silence"):
        try_many(0, 50, tmp_path / "case")

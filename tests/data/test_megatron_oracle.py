"""Tests the file format against megatron-core, in both directions, byte for byte."""

import gc
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from pentatron.data.indexed import IndexedDataset, token_dtype
from pentatron.data.indexed_writer import merge
from pentatron.data.inspect import seal, verify
from tests.data.fuzzed_pairs import Documents, random_documents, write

with warnings.catch_warnings():
    # megatron-core warns on import about missing kernels.
    warnings.simplefilter("ignore")
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    import torch

# The import creates half a million objects, which every later garbage collection would traverse.
gc.freeze()
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
TYPES = ("uint8", "int16", "int32", "int64", "uint16")


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """Disables fsync and the garbage collection that megatron-core runs after every file."""
    with mock.patch("pentatron.files.os.fsync"), mock.patch("gc.collect"):
        yield


def write_theirs(prefix: Path, documents: Documents, dtype: str) -> None:
    """Writes by items or by documents, the two ways of megatron-core's builder."""
    builder = theirs.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(dtype).type)
    for number, document in enumerate(documents):
        if number % 2:
            for part in document:
                builder.add_item(torch.from_numpy(part.astype(np.int64)))
            builder.end_document()
        else:
            whole = np.concatenate([*document, np.empty(0, dtype)]).astype(np.int64)
            builder.add_document(torch.from_numpy(whole), [len(part) for part in document])
    builder.finalize(f"{prefix}.idx")


def check_theirs_reads(prefix: Path, documents: Documents, mmap: bool) -> None:
    found: Any = theirs.IndexedDataset(str(prefix), mmap=mmap)
    sequences = [part for document in documents for part in document]
    assert len(found) == len(sequences)
    assert found.document_indices.tolist() == np.cumsum([0, *map(len, documents)]).tolist()
    for number, part in enumerate(sequences):
        assert np.array_equal(found[number], part)
        assert np.array_equal(found.get(number, offset=len(part) // 2), part[len(part) // 2 :])


def test_both_write_the_same_bytes_and_read_each_other(tmp_path: Path) -> None:
    draw = random.Random(11)
    for case in range(60):
        dtype = draw.choice(TYPES)
        documents = random_documents(draw, dtype)
        # Separate prefixes: megatron-core does not update a sidecar, which would then be stale.
        ours, other = tmp_path / f"{case}o", tmp_path / f"{case}t"
        write(ours, documents, dtype)
        write_theirs(other, documents, dtype)
        for ending in (".bin", ".idx"):
            assert Path(f"{ours}{ending}").read_bytes() == Path(f"{other}{ending}").read_bytes(), case
        check_theirs_reads(ours, documents, mmap=bool(case % 2))
        found = IndexedDataset(other)
        sequences = [part for document in documents for part in document]
        assert [found.get(at).tolist() for at in range(len(found))] == [part.tolist() for part in sequences]


def test_merging_agrees(tmp_path: Path) -> None:
    draw = random.Random(12)
    for case in range(10):
        dtype = draw.choice(TYPES)
        parts = [tmp_path / f"{case}-{number}" for number in range(draw.randint(1, 3))]
        for part in parts:
            write_theirs(part, random_documents(draw, dtype), dtype)
        builder = theirs.IndexedDatasetBuilder(str(tmp_path / f"{case}t.bin"), dtype=np.dtype(dtype).type)
        for part in parts:
            builder.add_index(str(part))
        builder.finalize(str(tmp_path / f"{case}t.idx"))
        merge(parts, tmp_path / f"{case}o")
        for ending in (".bin", ".idx"):
            assert (tmp_path / f"{case}o{ending}").read_bytes() == (
                tmp_path / f"{case}t{ending}"
            ).read_bytes()


def test_a_foreign_pair_can_be_sealed(tmp_path: Path) -> None:
    documents = random_documents(random.Random(13), "int32")
    write_theirs(tmp_path / "x", documents, "int32")
    assert "no checksums to compare" in verify(tmp_path / "x")
    seal(tmp_path / "x")
    assert "checksums good" in verify(tmp_path / "x")
    check_theirs_reads(tmp_path / "x", documents, mmap=True)


def test_the_same_type_is_chosen() -> None:
    for size in (None, 1, 300, 65499, 65500, 65501, 65536, 151936):
        assert token_dtype(size) == np.dtype(theirs.DType.optimal_dtype(size))

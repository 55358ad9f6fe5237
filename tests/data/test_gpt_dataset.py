"""Tests samples against the concatenated documents, and the three splits of one corpus."""

from pathlib import Path

import numpy as np
import pytest

from pentatron.data.gpt_dataset import CountingSequences, GPTDataset
from pentatron.data.indexed import IndexedDataset
from pentatron.data.indexed_writer import IndexedDatasetWriter
from tests.data.splits import open_splits

VOCAB = 100


def random_documents(count: int, longest: int, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCAB, size=random.integers(1, longest + 1)) for _ in range(count)]


def write(prefix: Path, documents: list[np.ndarray]) -> None:
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for document in documents:
            writer.add_document(document)


@pytest.mark.parametrize("longest", [4, 40, 400])
def test_samples_are_slices_of_the_documents_in_order(tmp_path: Path, longest: int) -> None:
    """Samples that span many short documents, and long documents with many samples."""
    documents, length = random_documents(30, longest), 16
    write(tmp_path / "x", documents)
    dataset = GPTDataset(IndexedDataset(tmp_path / "x"), range(3, 28), 50, length, seed=5)
    assert len(dataset) >= 50
    stream = np.concatenate([documents[document] for document in dataset.parts[0].documents])
    for i in range(len(dataset)):
        start = int(dataset.parts[0].shuffle[i]) * length
        sample = dataset[i]
        np.testing.assert_array_equal(sample["tokens"], stream[start : start + length])
        np.testing.assert_array_equal(sample["labels"], stream[start + 1 : start + length + 1])


def test_shapes_and_types(tmp_path: Path) -> None:
    write(tmp_path / "x", random_documents(5, 40))
    sample = GPTDataset(IndexedDataset(tmp_path / "x"), range(5), 3, 8, seed=0)[0]
    assert {name: (part.dtype.name, part.shape) for name, part in sample.items()} == {
        "tokens": ("int64", (8,)),
        "labels": ("int64", (8,)),
        "loss_mask": ("float32", (8,)),
        "position_ids": ("int64", (8,)),
    }
    assert sample["loss_mask"].tolist() == [1.0] * 8
    assert sample["position_ids"].tolist() == list(range(8))


def test_samples_do_not_share_memory(tmp_path: Path) -> None:
    """Masking one sample in place must not reach another, nor the file."""
    write(tmp_path / "x", random_documents(5, 40))
    dataset = GPTDataset(IndexedDataset(tmp_path / "x"), range(5), 3, 8, seed=0)
    before = dataset[0]
    changed = dataset[0]
    for part in changed.values():
        part[:] = 7
    after = dataset[0]
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])


def test_every_token_is_predicted_once_per_epoch(tmp_path: Path) -> None:
    documents = random_documents(20, 50)
    write(tmp_path / "x", documents)
    dataset = GPTDataset(IndexedDataset(tmp_path / "x"), range(20), None, 10, seed=1)
    labels = np.concatenate([dataset[i]["labels"] for i in range(len(dataset))])
    stream = np.concatenate([documents[document] for document in dataset.parts[0].documents])
    np.testing.assert_array_equal(np.bincount(labels), np.bincount(stream[1 : len(labels) + 1]))
    assert len(stream) - 1 - len(labels) < 10


def test_empty_documents_are_stepped_over() -> None:
    source = CountingSequences(np.array([0, 5, 0, 0, 4, 0], dtype=np.int32), VOCAB, eod=99)
    dataset = GPTDataset(source, range(6), None, 4, seed=0)
    in_order = [dataset[i] for i in np.argsort(dataset.parts[0].shuffle).tolist()]
    seen = [int(in_order[0]["tokens"][0]), *in_order[0]["labels"].tolist(), *in_order[1]["labels"].tolist()]
    assert seen in ([1, 2, 3, 4, 99, 1, 2, 3, 99], [1, 2, 3, 99, 1, 2, 3, 4, 99])


@pytest.mark.parametrize("i", [-1, 3, 100])
def test_out_of_range(i: int) -> None:
    source = CountingSequences(np.array([13], dtype=np.int32), VOCAB, eod=99)
    dataset = GPTDataset(source, range(1), None, 4, seed=0)
    assert len(dataset) == 3
    with pytest.raises(IndexError, match=f"sample {i} of a dataset of 3"):
        dataset[i]


def test_seeds_change_the_order_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "x", random_documents(40, 40))
    source = IndexedDataset(tmp_path / "x")
    first, again, other = (GPTDataset(source, range(40), 60, 8, seed) for seed in (1, 1, 2))
    assert all((first[i]["tokens"] == again[i]["tokens"]).all() for i in range(60))
    assert sum((first[i]["tokens"] == other[i]["tokens"]).all() for i in range(60)) < 5


def test_a_token_outside_the_vocabulary_is_refused_with_its_place(tmp_path: Path) -> None:
    write(tmp_path / "x", [np.array([4, 5, 6, 7, 1, 2, 3, 500, 8])])
    dataset = GPTDataset(IndexedDataset(tmp_path / "x"), range(1), None, 4, seed=0, vocab_size=500)
    at = dataset.parts[0].shuffle.tolist().index(1)
    with pytest.raises(
        ValueError, match="token 500 at place 7 of sequence 0 is outside the vocabulary of 500"
    ):
        dataset[at]
    assert dataset[1 - at]["tokens"].tolist() == [4, 5, 6, 7]


def test_a_negative_token_is_refused(tmp_path: Path) -> None:
    """A type byte changed from uint16 to int16 keeps the structure and turns high ids negative."""
    write(tmp_path / "x", [np.array([1, 2, 40000, 4, 5])])
    content = bytearray((tmp_path / "x.idx").read_bytes())
    content[17] = 3
    (tmp_path / "x.idx").write_bytes(content)
    (tmp_path / "x.meta").unlink()
    dataset = GPTDataset(IndexedDataset(tmp_path / "x"), range(1), None, 4, seed=0, vocab_size=50000)
    with pytest.raises(ValueError, match="token -25536 at place 2"):
        dataset[0]


def test_splits_read_disjoint_documents(tmp_path: Path) -> None:
    # The token identifies its document.
    write(tmp_path / "x", [np.full(20, document) for document in range(50)])
    train, valid, test = open_splits(tmp_path / "x", "80,10,10", (100, 10, None), 8, seed=3)
    assert train is not None and valid is not None and test is not None
    seen = [
        set(np.unique([dataset[i]["labels"] for i in range(len(dataset))]))
        for dataset in (train, valid, test)
    ]
    assert seen == [set(range(40)), set(range(40, 45)), set(range(45, 50))]
    assert len(train) >= 100 and len(valid) >= 10
    assert test.parts[0].epochs == 1


def test_splits_not_asked_for_are_absent(tmp_path: Path) -> None:
    write(tmp_path / "x", random_documents(10, 40))
    train, valid, test = open_splits(tmp_path / "x", "9,1,0", (5, 0, 5), 8, seed=3)
    assert train is not None
    assert (valid, test) == (None, None)


def test_a_split_without_documents_is_an_error_that_says_so(tmp_path: Path) -> None:
    write(tmp_path / "x", random_documents(10, 40))
    with pytest.raises(
        ValueError, match=r"--split 969,30,1 leaves no document .*\(10 sequences\) to the valid set"
    ):
        open_splits(tmp_path / "x", "969,30,1", (5, 5, 5), 8, seed=3)


@pytest.mark.parametrize(
    ("documents", "sentence"),
    [
        (0, r"x has no tokens; prepare it again"),
        (
            1,
            r"\(1 sequence\) to the valid set; train on all of it with --split 1,0,0, or .* --text-documents",
        ),
        (10, r"\(10 sequences\) to the valid set; give it a larger share, or 0 to leave it empty"),
    ],
)
def test_the_way_out_of_such_a_split_is_one_that_helps(tmp_path: Path, documents: int, sentence: str) -> None:
    write(tmp_path / "x", random_documents(documents, 40))
    with pytest.raises(ValueError, match=sentence):
        open_splits(tmp_path / "x", "969,30,1", (5, 5, 5), 8, seed=3)
    if documents == 1:
        train, *others = open_splits(tmp_path / "x", "1,0,0", (5, 5, 5), 8, seed=3)
        assert train is not None and others == [None, None]

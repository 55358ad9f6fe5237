"""Tests splits and the three index arrays against published vectors and a naive implementation."""

import hashlib
import time

import numpy as np
import pytest

from pentatron.data.sample_index import SampleIndex, build_sample_index, parse_split, split_ranges

LENGTHS = np.array([7, 3, 10, 4, 6], dtype=np.int32)
# requested samples: epochs, whether the last epoch is separate, document order, sample order
GOLDEN = {
    4: (2, True, "4 0 1 2 3 3 2 1 0 4", "0 2 1 6 3 5 4"),
    7: (2, False, "2 2 4 1 0 3 4 0 1 3", "6 4 0 5 3 2 1"),
    8: (3, True, "2 2 4 1 0 3 4 0 1 3 0 4 3 2 1", "1 0 3 2 5 4 6 8 9 10 7"),
    9: (3, False, "3 1 0 2 4 2 0 2 1 4 3 4 0 1 3", "3 9 2 1 7 5 4 0 8 6 10"),
}
GOLDEN_STARTS_OF_9 = [(0, 0), (2, 1), (3, 2), (4, 0), (5, 2), (6, 0)]
GOLDEN_STARTS_OF_9 += [(7, 1), (7, 9), (9, 4), (11, 2), (12, 4), (14, 2)]


@pytest.mark.parametrize("samples", GOLDEN)
def test_golden_orders(samples: int) -> None:
    epochs, separate, documents, shuffle = GOLDEN[samples]
    index = build_sample_index(LENGTHS, range(5), samples, 8, 1234)
    assert (index.epochs, index.separate_final_epoch) == (epochs, separate)
    assert index.documents.tolist() == [int(word) for word in documents.split()]
    assert index.shuffle.tolist() == [int(word) for word in shuffle.split()]
    assert len(index) == len(index.starts) - 1 >= samples


def test_golden_starts() -> None:
    index = build_sample_index(LENGTHS, range(5), 9, 8, 1234)
    assert index.starts.tolist() == [list(row) for row in GOLDEN_STARTS_OF_9]


def walk_starts(lengths: list[int], sequence_length: int) -> list[list[int]]:
    """Finds the start of each sample token by token over concatenated documents."""
    places = [[position, offset] for position, length in enumerate(lengths) for offset in range(length)]
    return [places[token] for token in range(0, len(places), sequence_length)]


def reference_index(
    lengths: np.ndarray, documents: range, samples: int, length: int, seed: int
) -> SampleIndex:
    """A naive implementation of the sample index."""
    tokens = sum(int(lengths[document]) for document in documents)
    epochs = 1
    while epochs * tokens < samples * length + 1:
        epochs += 1
    separate, sans = False, 0
    if epochs > 1:
        sans = ((epochs - 1) * tokens - 1) // length
        separate = samples - sans < int(0.80 * ((tokens - 1) // length))
    random = np.random.RandomState(seed)
    groups = [list(documents) * (epochs - 1), list(documents)] if separate else [list(documents) * epochs]
    order: list[int] = []
    for group in groups:
        array = np.array(group, dtype=np.int32)
        random.shuffle(array)
        order += array.tolist()
    starts = walk_starts([int(lengths[document]) for document in order], length)
    total = len(starts) - 1
    shuffle: list[int] = []
    for low, high in [(0, sans), (sans, total)] if separate else [(0, total)]:
        array = np.arange(low, high, dtype=np.uint32)
        random.shuffle(array)
        shuffle += array.tolist()
    return SampleIndex(epochs, separate, np.array(order), np.array(starts), np.array(shuffle))


def test_random_cases_match_the_walker() -> None:
    random = np.random.default_rng(7)
    separated = 0
    for case in range(200):
        lengths = random.integers(1, random.integers(2, 60), size=random.integers(1, 40)).astype(np.int32)
        first = int(random.integers(0, len(lengths)))
        documents = range(first, int(random.integers(first + 1, len(lengths) + 1)))
        length, samples = int(random.integers(1, 40)), int(random.integers(1, 120))
        seed = int(random.integers(0, 2**32))
        ours = build_sample_index(lengths, documents, samples, length, seed)
        reference = reference_index(lengths, documents, samples, length, seed)
        separated += ours.separate_final_epoch
        assert ours.epochs == reference.epochs, case
        assert ours.separate_final_epoch == reference.separate_final_epoch, case
        for name in ("documents", "starts", "shuffle"):
            np.testing.assert_array_equal(
                getattr(ours, name), getattr(reference, name), f"{name} of case {case}"
            )
    assert 20 < separated < 180, "both kinds of last epoch must be among the cases"


def test_one_epoch_without_a_number() -> None:
    index = build_sample_index(LENGTHS, range(5), None, 8, 1234)
    assert index.epochs == 1
    assert sorted(index.documents.tolist()) == [0, 1, 2, 3, 4]
    assert sorted(index.shuffle.tolist()) == [0, 1, 2]


def test_only_the_documents_of_the_range_are_read() -> None:
    index = build_sample_index(LENGTHS, range(1, 4), 10, 8, 0)
    assert set(index.documents.tolist()) == {1, 2, 3}
    shorter = build_sample_index(LENGTHS[:4], range(1, 4), 10, 8, 0)
    np.testing.assert_array_equal(index.starts, shorter.starts)


def test_empty_documents_hold_no_start() -> None:
    lengths = np.array([0, 5, 0, 0, 4, 0], dtype=np.int32)
    index = build_sample_index(lengths, range(6), 6, 2, 3)
    assert (lengths[index.documents[index.starts[:, 0]]] > 0).all()


@pytest.mark.parametrize(
    ("documents", "samples", "length", "message"),
    [
        (range(2, 2), 5, 8, "hold 0 tokens where 1 are needed"),
        (range(1, 2), None, 8, "sequences 1 to 2 hold 3 tokens where 9 are needed"),
        (range(5), 0, 8, "positive length and number"),
        (range(5), 5, 0, "positive length and number"),
    ],
)
def test_impossible_requests_are_refused(
    documents: range, samples: int | None, length: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_sample_index(LENGTHS, documents, samples, length, 0)


def test_tokens_beyond_32_bits() -> None:
    """Offsets stay exact with 3 billion tokens, which do not fit into 32 bits."""
    lengths = np.full(3, 10**9, dtype=np.int32)
    index = build_sample_index(lengths, range(3), None, 10**6, 0)
    assert len(index) == (3 * 10**9 - 1) // 10**6
    assert index.starts[-1].tolist() == [2, 999 * 10**6]


def test_a_million_samples_are_quick_and_as_ever() -> None:
    """A Python loop would be many times slower; the hash fixes the order."""
    lengths = np.random.RandomState(0).randint(1, 1000, size=200_000).astype(np.int32)
    begin = time.perf_counter()
    index = build_sample_index(lengths, range(len(lengths)), 1_000_000, 128, 42)
    elapsed = time.perf_counter() - begin
    digest = hashlib.sha256()
    for part in (index.documents, index.starts, index.shuffle):
        digest.update(part.astype(np.int64).tobytes())
    assert digest.hexdigest() == "0be629fbf9edd137629e24e0bd228e4f224c5af169f3fa51e6efeaa2474bd29f"
    assert elapsed < 3


def test_parse_split() -> None:
    assert parse_split("949,50,1") == (0.949, 0.05, 0.001)
    assert parse_split("99, 1") == (0.99, 0.01, 0.0)
    assert parse_split("1,1,1") == (1 / 3, 1 / 3, 1 / 3)
    assert parse_split("100") == (1.0, 0.0, 0.0)
    assert parse_split("0.5,0.25,0.25") == (0.5, 0.25, 0.25)


@pytest.mark.parametrize("text", ["", "a,b", "0,0,0", "1,2,3,4", "1.2.3"])
def test_unreadable_splits_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--split 949,50,1"):
        parse_split(text)


def test_split_ranges() -> None:
    assert split_ranges(parse_split("949,50,1"), 1000) == (range(949), range(949, 999), range(999, 1000))
    assert split_ranges(parse_split("1,0,1"), 10) == (range(5), None, range(5, 10))
    assert split_ranges(parse_split("100"), 7) == (range(7), None, None)
    # Half rounds to even: 2.5 to 2, 7.5 to 8.
    assert split_ranges((0.25, 0.5, 0.25), 10) == (range(2), range(2, 8), range(8, 10))
    # A share can be too small for a single document.
    assert split_ranges(parse_split("969,30,1"), 10) == (range(10), range(10, 10), range(10, 10))


def test_ranges_cover_every_document_once() -> None:
    random = np.random.default_rng(1)
    for _ in range(200):
        text = ",".join(str(share) for share in random.integers(1, 1000, size=3))
        count = int(random.integers(1, 5000))
        ranges = split_ranges(parse_split(text), count)
        assert [i for part in ranges if part is not None for i in part] == list(range(count))

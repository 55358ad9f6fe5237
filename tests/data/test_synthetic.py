"""Tests synthetic data: its dependencies, that a model learns it, and mock sequences."""

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pentatron.data.gpt_dataset import ALPHABET, NOISE, GPTDataset, SyntheticDataset, mock_sequences
from pentatron.data.loader import build_loader


def best_loss(dataset: SyntheticDataset) -> float:
    """Returns the entropy of the next token given the last, the lowest possible expected loss."""
    jump = NOISE / len(dataset.cycle)
    follow = 1 - NOISE + jump
    others = (len(dataset.cycle) - 1) * jump
    return float(-follow * np.log(follow) - others * np.log(jump))


def test_a_sample_depends_on_seed_and_number_only() -> None:
    small, large = SyntheticDataset(10, 1000, 32, seed=1), SyntheticDataset(10_000, 1000, 32, seed=1)
    large[77]
    for i in (9, 0, 3):
        np.testing.assert_array_equal(small[i]["tokens"], large[i]["tokens"])
    assert len({small[i]["tokens"].tobytes() for i in range(10)}) == 10
    other = SyntheticDataset(10, 1000, 32, seed=2)
    assert not (small[0]["tokens"] == other[0]["tokens"]).all()
    assert not (small.cycle == other.cycle).all(), "another seed is another language"


def test_the_stream_is_fixed_for_good() -> None:
    """A resumed run on another machine or version must see the same samples."""
    digest = hashlib.sha256()
    for i in range(20):
        digest.update(SyntheticDataset(20, 32000, 64, seed=1234)[i]["tokens"].tobytes())
    assert digest.hexdigest() == "1d67a8ad95df2781caac0a47eb737e2114e71b12735751929163c1837a7da316"


def test_shapes_ids_and_labels() -> None:
    sample = SyntheticDataset(4, 32000, 512, seed=0)[2]
    assert {name: (part.dtype.name, part.shape) for name, part in sample.items()} == {
        "tokens": ("int64", (512,)),
        "labels": ("int64", (512,)),
        "loss_mask": ("float32", (512,)),
        "position_ids": ("int64", (512,)),
    }
    np.testing.assert_array_equal(sample["tokens"][1:], sample["labels"][:-1])
    # Every quarter of the vocabulary is used, so that every rank of a split embedding has work.
    assert set(sample["tokens"] // 8000) == {0, 1, 2, 3}


def test_transitions_follow_the_cycle_as_often_as_promised() -> None:
    dataset = SyntheticDataset(50, 32000, 1000, seed=0)
    successor = dict(zip(dataset.cycle.tolist(), np.roll(dataset.cycle, -1).tolist()))
    assert len(successor) == ALPHABET
    pairs = [
        pair for i in range(50) for pair in zip(dataset[i]["tokens"].tolist(), dataset[i]["labels"].tolist())
    ]
    followed = np.mean([successor[token] == label for token, label in pairs])
    assert followed == pytest.approx(1 - NOISE + NOISE / ALPHABET, abs=0.01)


@pytest.mark.parametrize("vocab_size", [1, 2, 7])
def test_tiny_vocabularies(vocab_size: int) -> None:
    dataset = SyntheticDataset(3, vocab_size, 200, seed=0)
    assert set(dataset[0]["tokens"].tolist()) == set(range(vocab_size))
    assert best_loss(dataset) >= 0


def test_invalid_size_or_index_is_refused() -> None:
    with pytest.raises(ValueError, match="positive sizes, found 0 samples"):
        SyntheticDataset(0, 10, 10, seed=0)
    with pytest.raises(IndexError, match="sample 5 of a dataset of 5"):
        SyntheticDataset(5, 10, 10, seed=0)[5]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Uses one thread, as synchronising threads on a busy machine is slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_the_loss_falls_in_a_few_dozen_steps() -> None:
    """A tiny model with a realistic vocabulary learns the successor of each token."""
    torch.manual_seed(0)
    dataset = SyntheticDataset(10_000, 32000, 64, seed=0)
    embedding, head = torch.nn.Embedding(32000, 16), torch.nn.Linear(16, 32000, bias=False)
    optimizer = torch.optim.Adam([*embedding.parameters(), *head.parameters()], lr=5e-2)
    losses = []
    for _, batch in zip(range(24), build_loader(dataset, 0, 2, 0, 1)):
        logits = head(embedding(batch.tokens))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 10
    final = float(np.mean(losses[-8:]))
    assert final < 0.6 * np.log(ALPHABET), "the ids in use may be known, their successors are not"
    assert final > best_loss(dataset) - 0.3, "better than possible: the labels leak"


def test_mock_sequences_are_those_of_every_mock_run() -> None:
    source = mock_sequences(1000, eod=999)
    assert len(source) == 100_000
    digest = hashlib.sha256(source.sequence_lengths.tobytes()).hexdigest()
    assert digest == "ed8f44f17361fd0c689e0af757ac685fff85bc309c50f698ffb2aac84ebd4cea"
    tokens = source.get(0)
    assert len(tokens) == 3484
    np.testing.assert_array_equal(tokens[:-1], np.arange(1, 3484) % 1000)
    assert tokens[-1] == 999
    np.testing.assert_array_equal(source.get(0, 3000), tokens[3000:])
    np.testing.assert_array_equal(source.get(0, 5, 7), tokens[5:12])
    assert source.get(0, 3484).tolist() == []
    for offset, length in [(0, 3485), (3480, 5), (-1, 2)]:
        with pytest.raises(IndexError):
            source.get(0, offset, length)


def test_mock_data_feeds_a_dataset() -> None:
    dataset = GPTDataset(mock_sequences(50, sequences=100), range(100), 20, 256, seed=1, vocab_size=50)
    sample = dataset[3]
    steps = (sample["labels"] - sample["tokens"]) % 50
    assert (steps == 1).mean() > 0.95, "nearly every token is followed by the next number"
    assert mock_sequences(50, sequences=10).eod == 49

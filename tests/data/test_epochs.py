"""Tests the infinite dataset: each epoch is a permutation that depends only on (seed, epoch)."""

import numpy as np
import pytest

from pentatron.data.loader import EpochShuffle
from pentatron.data.sample_index import Sample
from pentatron.errors import UserError


class Numbers:
    """A dataset whose sample i is the number i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        return {"tokens": np.array([index])}


def read(shuffle: EpochShuffle, indices: range) -> list[int]:
    return [int(shuffle[i]["tokens"][0]) for i in indices]


def test_every_epoch_is_another_permutation() -> None:
    shuffle = EpochShuffle(Numbers(50), seed=3)
    epochs = [read(shuffle, range(50 * epoch, 50 * epoch + 50)) for epoch in range(4)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert epochs[0] != list(range(50))


def test_the_past_does_not_matter() -> None:
    """Resuming inside epoch 7, going back, and reading from the start agree."""
    whole = read(EpochShuffle(Numbers(13), seed=1), range(200))
    resumed = EpochShuffle(Numbers(13), seed=1)
    assert read(resumed, range(95, 140)) == whole[95:140]
    assert read(resumed, range(10, 30)) == whole[10:30]
    assert read(EpochShuffle(Numbers(13), seed=2), range(200)) != whole


def test_the_order_is_fixed_for_good() -> None:
    two_epochs = read(EpochShuffle(Numbers(8), seed=1234), range(16))
    assert two_epochs == [4, 5, 3, 1, 2, 0, 6, 7, 5, 7, 1, 3, 4, 2, 0, 6]


def test_it_has_no_length_and_no_negative_numbers() -> None:
    assert not hasattr(EpochShuffle(Numbers(8), seed=0), "__len__")
    with pytest.raises(IndexError, match="sample -1"):
        EpochShuffle(Numbers(8), seed=0)[-1]
    with pytest.raises(ValueError, match="without samples"):
        EpochShuffle(Numbers(0), seed=0)


def test_an_epoch_beyond_all_seeds_is_a_sentence() -> None:
    shuffle = EpochShuffle(Numbers(50), seed=3)
    assert 0 <= shuffle[50 * (2**32 - 1)]["tokens"][0] < 50
    with pytest.raises(UserError, match="is in epoch 4294967296 of 50 samples"):
        shuffle[50 * 2**32]

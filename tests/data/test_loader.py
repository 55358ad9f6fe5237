"""Tests the loader: the same samples per step for any number of ranks, batches, the end of the data."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from pentatron.data.gpt_dataset import SyntheticDataset
from pentatron.data.indexed_writer import IndexedDatasetWriter
from pentatron.data.loader import Batch, EpochShuffle, MicroBatchSampler, build_loader
from pentatron.data.sample_index import Sample
from tests.data.splits import open_splits


class Numbered:
    """A dataset whose sample i holds the number i everywhere; every second label is masked."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        return {
            "tokens": np.full(4, index),
            "labels": np.full(4, index),
            "loss_mask": np.array([1, 0, 1, 0], dtype=np.float32),
            "position_ids": np.arange(4),
        }


def step_samples(step: int, consumed: int, global_batch: int, micro: int, ranks: int) -> list[int]:
    """Returns the samples of the step-th global batch after `consumed`."""
    accumulation = global_batch // (micro * ranks)
    samples: list[int] = []
    for rank in range(ranks):
        batches = islice(
            MicroBatchSampler(consumed, micro, rank, ranks), step * accumulation, (step + 1) * accumulation
        )
        samples += [sample for batch in batches for sample in batch]
    return samples


LAYOUTS = [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4), (3, 4), (1, 24), (24, 1)]


@pytest.mark.parametrize(("micro", "ranks"), LAYOUTS)
def test_a_step_holds_the_same_samples_in_every_layout(micro: int, ranks: int) -> None:
    for step in range(3):
        expected = list(range(24 * step, 24 * (step + 1)))
        assert sorted(step_samples(step, 0, 24, micro, ranks)) == expected


@pytest.mark.parametrize(("micro", "ranks"), LAYOUTS)
def test_resume_in_another_layout_reads_every_sample_once(micro: int, ranks: int) -> None:
    """Two steps of 12 on 3 ranks, then steps of 24 elsewhere: every sample is read exactly once."""
    before = step_samples(0, 0, 12, 4, 3) + step_samples(1, 0, 12, 4, 3)
    after = step_samples(0, len(before), 24, micro, ranks)
    assert sorted(before + after) == list(range(48))


def test_a_rank_takes_its_part_of_each_micro_step() -> None:
    assert list(islice(MicroBatchSampler(10, 2, 1, 3), 3)) == [[12, 13], [18, 19], [24, 25]]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_loaders_of_all_ranks_read_each_sample_once(tmp_path: Path, ranks: int) -> None:
    """Through real files: the tokens of a step are the same for any number of ranks."""
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(tmp_path / "x", "uint16") as writer:
        for _ in range(30):
            writer.add_document(random.integers(0, 100, size=50))
    dataset, _, _ = open_splits(tmp_path / "x", "1", (40, 0, 0), 16, seed=0)
    assert dataset is not None
    loaders = [iter(build_loader(dataset, 8, 2, rank, ranks)) for rank in range(ranks)]
    rows = [
        row for loader in loaders for _ in range(8 // (2 * ranks)) for row in next(loader).tokens.tolist()
    ]
    assert sorted(rows) == sorted(dataset[i]["tokens"].tolist() for i in range(8, 16))


def test_batches() -> None:
    batch = next(iter(build_loader(Numbered(20), 4, 3, 1, 2)))
    assert batch.tokens.tolist() == [[7] * 4, [8] * 4, [9] * 4]
    assert batch.labels.dtype == batch.tokens.dtype == batch.position_ids.dtype == torch.int64
    assert batch.loss_mask.dtype == torch.float32
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 3
    assert isinstance(batch.valid_tokens, torch.Tensor)
    assert batch.valid_tokens.item() == 6


def test_a_batch_moves_as_a_whole() -> None:
    batch = next(iter(build_loader(Numbered(20), 0, 2, 0, 1)))
    moved = batch.to("meta", non_blocking=True)
    assert isinstance(moved, Batch)
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert getattr(moved, name).device.type == "meta"
        assert getattr(moved, name).shape == (2, 4)


def test_workers_keep_the_order_and_the_end() -> None:
    """Batches and the final error are those of loading without workers, despite prefetching."""
    plain = build_loader(Numbered(23), 2, 2, 1, 2)
    workers = build_loader(Numbered(23), 2, 2, 1, 2, num_workers=2)
    read: list[list[int]] = []
    with pytest.raises(ValueError, match="has 23 samples"):
        for batch in workers:
            read.append(batch.tokens[:, 0].tolist())
    expected: list[list[int]] = []
    with pytest.raises(ValueError, match="has 23 samples"):
        for batch in plain:
            expected.append(batch.tokens[:, 0].tolist())
    assert read == expected == [[4, 5], [8, 9], [12, 13], [16, 17], [20, 21]]


def test_all_ranks_end_at_the_same_micro_step() -> None:
    """If only some ranks could read the tail, the others would hang in their next collective."""
    counts = [len(list(MicroBatchSampler(0, 2, rank, 4, total=21))) for rank in range(4)]
    assert counts == [2, 2, 2, 2]


def test_a_spent_dataset_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"has 20 samples, too few .* micro-step of 8 .*EpochShuffle"):
        build_loader(Numbered(20), 16, 2, 0, 4)


def test_epochs_make_it_endless() -> None:
    loader = build_loader(EpochShuffle(Numbered(6), seed=0), 4, 2, 0, 1)
    seen = [sample for batch in islice(loader, 10) for sample in batch.tokens[:, 0].tolist()]
    assert len(seen) == 20
    assert sorted(seen[2:8]) == sorted(seen[8:14]) == list(range(6))


def test_reading_leaves_the_global_generator_alone() -> None:
    """Otherwise dropout after a resume would differ from an uninterrupted run."""
    before = torch.get_rng_state()
    next(iter(build_loader(SyntheticDataset(10, 50, 8, seed=0), 0, 2, 0, 1)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("consumed", "micro", "rank", "ranks"),
    [(-1, 1, 0, 1), (0, 0, 0, 1), (0, 1, 2, 2), (0, 1, -1, 2), (0, 1, 0, 0)],
)
def test_impossible_layouts_are_refused(consumed: int, micro: int, rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="sizes must be positive and ranks below their number"):
        MicroBatchSampler(consumed, micro, rank, ranks)


def test_readers_and_pinned_memory_are_the_loaders_own() -> None:
    dataset = Numbered(23)
    loader = build_loader(dataset, 0, 2, 0, 1, num_workers=2, pin_memory=True, prefetch_factor=2)
    assert (loader.num_workers, loader.pin_memory, loader.prefetch_factor) == (2, True, 2)
    assert build_loader(dataset, 0, 2, 0, 1).num_workers == 0

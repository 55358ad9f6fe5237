"""Samples for next-token prediction, and which of them are asked for."""

from dataclasses import dataclass
from typing import Any

from pentatron.data.gpt_dataset import GPTDataset

# Prefixes, and the weight of each if any were given.
Blend = tuple[list[str], list[float] | None]


class MockGPTDataset(GPTDataset):
    """Counting tokens instead of a corpus: asks the builder for `--mock-data`."""


@dataclass
class GPTDatasetConfig:
    """What of a run's data a builder may be told; the rest is as the flags say."""

    random_seed: int
    sequence_length: int
    blend: Blend | None = None
    blend_per_split: list[Blend | None] | None = None
    split: str | None = None
    path_to_cache: str | None = None
    tokenizer: Any = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    create_attention_mask: bool = False
    mmap_bin_files: bool = True
    num_dataset_builder_threads: int = 1
    mid_level_dataset_surplus: float = 0.005


__all__ = ["GPTDataset", "GPTDatasetConfig", "MockGPTDataset"]

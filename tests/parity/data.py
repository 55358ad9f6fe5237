"""Samples for parity runs."""

from typing import Any

from pentatron.data.synthetic import SyntheticDataset


class UnevenMasks:
    """Samples whose number of valid tokens differs widely, so that a mean of means is not the mean."""

    def __init__(self, samples: int, vocabulary: int, length: int) -> None:
        self.source = SyntheticDataset(samples, vocabulary, length, seed=3)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = dict(self.source[index])
        mask = sample["loss_mask"].copy()
        mask[: (index * 7) % (len(mask) - 1)] = 0
        sample["loss_mask"] = mask
        return sample

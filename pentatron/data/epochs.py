"""Reading a finite dataset for ever, in another order every epoch, or once in whole batches."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from pentatron.data.boundaries import Sample
from pentatron.errors import UserError

# Seeds of NumPy are 32 bits.
_MOST_EPOCHS = 1 << 32


@runtime_checkable
class FiniteDataset(Protocol):
    """Samples with a known number of them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class EpochShuffle:
    """Sample i is sample i mod n of epoch i div n, whose order depends on (seed, epoch) only.

    It has no length, which is how a loader knows that it does not end.
    """

    def __init__(self, dataset: FiniteDataset, seed: int) -> None:
        if len(dataset) == 0:
            raise UserError("a dataset without samples cannot be repeated; use more data")
        self.dataset = dataset
        self.seed = seed
        # Reading goes forward, so the order of one epoch is enough to keep.
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def __getitem__(self, index: int) -> Sample:
        if index < 0:
            raise IndexError(f"sample {index} of an endless dataset")
        epoch, place = divmod(index, len(self.dataset))
        return self.dataset[int(self._order_of(epoch)[place])]

    def origins(self, samples: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
        """Which dataset each of these samples comes from, if the repeated one is made of several."""
        of_each = getattr(self.dataset, "origins", None)
        found = np.zeros(len(samples), dtype=np.int16)
        if of_each is None:
            return found
        epochs, places = np.divmod(samples, len(self.dataset))
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            found[here] = of_each(self._order_of(epoch)[places[here]])
        return found

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch != self._epoch:
            if epoch >= _MOST_EPOCHS:
                raise UserError(
                    f"sample {epoch * len(self.dataset)} is in epoch {epoch} of {len(self.dataset)} samples, and there are orders for "
                    f"{_MOST_EPOCHS}; take the weights of the checkpoint alone with --finetune if it has never got so far"
                )
            # RandomState, not Generator: its stream never changes between NumPy versions.
            random = np.random.RandomState([self.seed, epoch])
            self._order, self._epoch = random.permutation(len(self.dataset)), epoch
        return self._order


class Repeated:
    """A dataset that begins again after its end, in the same order; without a length, as it does not end."""

    def __init__(self, dataset: FiniteDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Sample:
        return self.dataset[index % len(self.dataset)]


class Joined:
    """Datasets one after another."""

    def __init__(self, datasets: Sequence[FiniteDataset]) -> None:
        self.datasets = tuple(datasets)
        self._ends = np.cumsum([len(dataset) for dataset in datasets])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} samples")
        number = int(np.searchsorted(self._ends, index, side="right"))
        dataset = self.datasets[number]
        return dataset[index - (int(self._ends[number]) - len(dataset))]

    def origins(self, samples: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
        """Which dataset each of these samples comes from."""
        return np.searchsorted(self._ends, samples, side="right")


class Padded:
    """A dataset and, after its end, samples without a label that counts, up to a `total`: no real one is left out of a last batch."""

    def __init__(self, dataset: FiniteDataset, total: int) -> None:
        self.dataset = dataset
        self.total = total

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> Sample:
        if index < len(self.dataset):
            return self.dataset[index]
        first = self.dataset[0]
        return {**first, "loss_mask": np.zeros_like(first["loss_mask"])}

"""Batches for one data-parallel rank.

The order of samples depends on how many were consumed, never on the number of ranks: with micro-batches of b samples
on d ranks, b × d consecutive samples make one micro-step, and rank r takes the r-th b of them.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from pentatron.data.sampling import DOCUMENT_STARTS, Sample
from pentatron.errors import UserError
from pentatron.layout.documents import DocumentStarts

TENSORS = ("tokens", "labels", "loss_mask", "position_ids")
_REMOTE_ERROR = f"{UserError.__module__}.{UserError.__qualname__}: "
_SECONDS_TO_DIE = 0.5


class SampleSource(Protocol):
    """Samples by number; a source without a length is endless."""

    def __getitem__(self, index: int) -> Sample: ...


@dataclass(frozen=True, eq=False)
class Batch:
    """One micro-batch; every tensor is [micro batch, sequence].

    `documents`: where a token is to see its own document alone, the places at which documents begin in each whole sequence. They
    stay on the host and whole, whatever part of the tokens a rank has.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    documents: DocumentStarts | None = None

    @property
    def valid_tokens(self) -> torch.Tensor:
        """How many labels count in the loss, as a tensor so that a GPU need not be waited for."""
        return self.loss_mask.sum()

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """Another batch with every tensor changed by a function."""
        changed: dict[str, Any] = {name: function(getattr(self, name)) for name in TENSORS}
        return replace(self, **changed)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Called by the loader: page-locked memory is what makes a non-blocking copy to the GPU one."""
        return self.map(torch.Tensor.pin_memory)


class MicroBatchSampler:
    """The sample numbers of one rank's micro-batches, after `consumed_samples`; endless without a `total`.

    With a total it ends before the first micro-step that some rank could not fill, so that all ranks end together.
    """

    def __init__(
        self,
        consumed_samples: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        total: int | None = None,
    ) -> None:
        if consumed_samples < 0 or micro_batch_size < 1 or not 0 <= dp_rank < dp_size:
            raise UserError(
                f"cannot read micro-batches of {micro_batch_size} samples as data-parallel rank {dp_rank} of {dp_size} "
                f"after {consumed_samples} samples; sizes must be positive and ranks below their number"
            )
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.step = micro_batch_size * dp_size
        self.total = total
        if total is not None and consumed_samples + self.step > total:
            raise self.exhausted()

    def __iter__(self) -> Iterator[list[int]]:
        start = self.consumed_samples
        while self.total is None or start + self.step <= self.total:
            first = start + self.dp_rank * self.micro_batch_size
            yield list(range(first, first + self.micro_batch_size))
            start += self.step

    def exhausted(self) -> UserError:
        return UserError(
            f"the dataset has {self.total} samples, too few for another micro-step of {self.step} (reading began at "
            f"sample {self.consumed_samples}); ask for fewer steps, build it with more samples, or repeat it with "
            "EpochShuffle"
        )


class BatchLoader(DataLoader[Batch]):
    """A DataLoader for which the end of the data is an error: a training loop must never end silently early."""

    batch_sampler: MicroBatchSampler

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        # The iterator is made here rather than in the generator, so that workers start reading at once.
        with _deaths_noticed_where_batches_are_awaited():
            batches = super().__iter__()
        return self._until_exhausted(batches)

    def _until_exhausted(self, batches: Iterator[Any]) -> Iterator[Batch]:
        try:
            yield from batches
        except UserError as error:
            # A reader process sends its whole traceback along; the sentence is its last line.
            raise UserError(str(error).strip().splitlines()[-1].removeprefix(_REMOTE_ERROR)) from None
        except (RuntimeError, OSError, EOFError):
            # torch's own sentence, or a connection that broke while a batch came through it.
            problem = _death_of_a_reader(getattr(batches, "_workers", ()))
            if problem is None:
                raise
            raise problem from None
        raise self.batch_sampler.exhausted()


@contextmanager
def _deaths_noticed_where_batches_are_awaited() -> Iterator[None]:
    """torch raises in a handler of SIGCHLD when a reader dies, wherever the program is at that moment, and from some places no
    exception comes out. Whoever waits for a batch looks after the readers as well: that is soon enough, and always the same place.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _death_of_a_reader(readers: Sequence[BaseProcess]) -> UserError | None:
    """What to tell of a reader process that has ended; None if all live."""
    for reader in readers:
        # Its end may be seen a moment after its connection is gone.
        reader.join(_SECONDS_TO_DIE)
    ends = [reader.exitcode for reader in readers if reader.exitcode is not None]
    if not ends:
        return None
    how = f"killed by {signal.Signals(-ends[0]).name}" if ends[0] < 0 else f"with exit code {ends[0]}"
    if -signal.SIGBUS in ends:
        cause = "the shared memory (/dev/shm) is too small, or a data file became shorter while it was read"
    else:
        cause = "not enough memory is the usual cause"
    return UserError(
        f"a process that reads data has died ({how}): {cause}; checkpoints are intact, and training can go on from the newest "
        "one, perhaps with fewer --num-workers"
    )


class _LeaveSignalsToTheRank:
    """In a reader process: a terminal and a scheduler send their signals to every process, and the rank that reads its batches decides.

    A reader that ended at once would take the rank with it before it could save. The rank itself ends a reader that does not
    end when told with SIGTERM, and again when it ends itself: the second one counts.
    """

    def __init__(self) -> None:
        self._asked = False

    def __call__(self, worker: int) -> None:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._terminated)

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise SystemExit(0)
        self._asked = True


def collate(samples: Sequence[Sample]) -> Batch:
    """Stack samples into one batch; beside others that have documents, a sample without is one document."""
    fields: dict[str, Any] = {
        name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in TENSORS
    }
    if any(DOCUMENT_STARTS in sample for sample in samples):
        whole = np.zeros(1, np.int64)
        fields["documents"] = tuple(tuple(s.get(DOCUMENT_STARTS, whole).tolist()) for s in samples)
    return Batch(**fields)


def build_loader(
    dataset: SampleSource,
    consumed_samples: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    num_workers: int = 0,
    pin_memory: bool = False,
    prefetch_factor: int = 2,
) -> DataLoader[Batch]:
    """The micro-batches of one rank from `consumed_samples` on, read ahead by `num_workers` processes."""
    total = len(dataset) if isinstance(dataset, Sized) else None
    return BatchLoader(
        dataset,  # type: ignore[arg-type]
        batch_sampler=MicroBatchSampler(consumed_samples, micro_batch_size, dp_rank, dp_size, total),
        num_workers=num_workers,
        collate_fn=collate,
        pin_memory=pin_memory,
        prefetch_factor=prefetch_factor if num_workers else None,
        persistent_workers=num_workers > 0,
        worker_init_fn=_LeaveSignalsToTheRank() if num_workers else None,
        # An iterator draws a seed for its workers: from here, not from the generator that dropout uses.
        generator=torch.Generator(),
    )


# Reading a finite dataset for ever, in another order every epoch, or once in whole batches.


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

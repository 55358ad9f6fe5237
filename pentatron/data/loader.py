"""Micro-batches of one data-parallel rank, and datasets that repeat, join or pad others.

The order of samples depends on the number of consumed samples, not on the number of ranks: with
micro-batches of b samples on d ranks, a micro-step consists of b × d consecutive samples, and rank r
takes the r-th b of them.
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
from torch.utils.data import ConcatDataset, DataLoader

from pentatron.data.sample_index import DOCUMENT_STARTS, Sample
from pentatron.errors import UserError
from pentatron.layout.documents import DocumentStarts

TENSORS = ("tokens", "labels", "loss_mask", "position_ids")
_REMOTE_ERROR = f"{UserError.__module__}.{UserError.__qualname__}: "
_SECONDS_TO_DIE = 0.5


class SampleSource(Protocol):
    """A map-style dataset; without a length it is infinite."""

    def __getitem__(self, index: int) -> Sample: ...


@dataclass(frozen=True, eq=False)
class Batch:
    """One micro-batch; every tensor is [micro batch, sequence].

    `documents` are the positions at which documents begin in each sequence, if attention is restricted to
    documents. They stay in host memory and describe the whole sequence, even if context parallelism
    splits the tokens.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    documents: DocumentStarts | None = None

    @property
    def valid_tokens(self) -> torch.Tensor:
        """The number of labels that count in the loss, as a tensor to avoid a host-device synchronisation."""
        return self.loss_mask.sum()

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """Returns a batch with `function` applied to every tensor."""
        return replace(self, **{name: function(getattr(self, name)) for name in TENSORS})  # type: ignore[arg-type]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Copies the tensors to pinned memory for asynchronous copies; called by the DataLoader."""
        return self.map(torch.Tensor.pin_memory)


class MicroBatchSampler:
    """Yields sample indices of one rank's micro-batches; infinite without a `total`.

    With a total it stops before the first incomplete micro-step, so that all ranks stop together.
    """

    def __init__(
        self, consumed_samples: int, micro_batch_size: int, rank: int, ranks: int, total: int | None = None
    ) -> None:
        if consumed_samples < 0 or micro_batch_size < 1 or not 0 <= rank < ranks:
            raise UserError(
                f"cannot read micro-batches of {micro_batch_size} samples as data-parallel rank {rank} of {ranks} "
                f"after {consumed_samples} samples; sizes must be positive and ranks below their number"
            )
        self.consumed_samples, self.micro_batch_size, self.rank = consumed_samples, micro_batch_size, rank
        self.step, self.total = micro_batch_size * ranks, total
        if total is not None and consumed_samples + self.step > total:
            raise self.exhausted()

    def __iter__(self) -> Iterator[list[int]]:
        start = self.consumed_samples
        while self.total is None or start + self.step <= self.total:
            first = start + self.rank * self.micro_batch_size
            yield list(range(first, first + self.micro_batch_size))
            start += self.step

    def exhausted(self) -> UserError:
        return UserError(
            f"the dataset has {self.total} samples, too few for another micro-step of {self.step} (reading began at "
            f"sample {self.consumed_samples}); ask for fewer steps, build it with more samples, or repeat it with "
            "EpochShuffle"
        )


class BatchLoader(DataLoader[Batch]):
    """A DataLoader that raises UserError at the end of the data, so that training cannot end early."""

    batch_sampler: MicroBatchSampler

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        # Created here rather than in the generator, so that workers prefetch at once.
        with _without_sigchld_handler():
            batches = super().__iter__()
        return self._until_exhausted(batches)

    def _until_exhausted(self, batches: Iterator[Any]) -> Iterator[Batch]:
        try:
            yield from batches
        except UserError as error:
            # A worker sends its whole traceback; the error message is the last line.
            raise UserError(str(error).strip().splitlines()[-1].removeprefix(_REMOTE_ERROR)) from None
        except (RuntimeError, OSError, EOFError):
            # Raised by torch for a dead worker, or by a connection that broke while a batch was received.
            if death := _worker_death(getattr(batches, "_workers", ())):
                raise death from None
            raise
        raise self.batch_sampler.exhausted()


@contextmanager
def _without_sigchld_handler() -> Iterator[None]:
    """Undoes torch's SIGCHLD handler, which raises wherever the program is when a worker dies.

    Waiting for a batch detects a dead worker as well, always at the same place.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handler)


def _worker_death(workers: Sequence[BaseProcess]) -> UserError | None:
    """Returns the error for DataLoader workers that have exited; None if all are alive."""
    for worker in workers:
        # The exit status may become visible shortly after the connection breaks.
        worker.join(_SECONDS_TO_DIE)
    codes = [worker.exitcode for worker in workers if worker.exitcode is not None]
    if not codes:
        return None
    how = f"killed by {signal.Signals(-codes[0]).name}" if codes[0] < 0 else f"with exit code {codes[0]}"
    cause = "not enough memory is the usual cause"
    if -signal.SIGBUS in codes:
        cause = "the shared memory (/dev/shm) is too small, or a data file became shorter while it was read"
    return UserError(
        f"a DataLoader worker died ({how}): {cause}; checkpoints are intact, and training can resume from the "
        "newest one, perhaps with fewer --num-workers"
    )


def _ignore_signals(worker: int) -> None:
    """Ignores signals in a worker, which terminals and schedulers send to all processes.

    A worker that exited at once would stop the rank before it can save a checkpoint. The rank terminates
    its workers with SIGTERM, at shutdown and again at exit: the second one is obeyed.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)

    def obey(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(signal.SIGTERM, obey))


def collate(samples: Sequence[Sample]) -> Batch:
    """Stacks samples into a batch; if some have document starts, the others are one document each."""
    fields: dict[str, Any] = {key: torch.from_numpy(np.stack([s[key] for s in samples])) for key in TENSORS}
    if any(DOCUMENT_STARTS in sample for sample in samples):
        one_document = np.zeros(1, np.int64)
        fields["documents"] = tuple(tuple(s.get(DOCUMENT_STARTS, one_document).tolist()) for s in samples)
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
    """Returns a loader of one rank's micro-batches, prefetched by `num_workers` processes."""
    total = len(dataset) if isinstance(dataset, Sized) else None
    return BatchLoader(
        dataset,  # type: ignore[arg-type]
        batch_sampler=MicroBatchSampler(consumed_samples, micro_batch_size, dp_rank, dp_size, total),
        num_workers=num_workers,
        collate_fn=collate,
        pin_memory=pin_memory,
        prefetch_factor=prefetch_factor if num_workers else None,
        persistent_workers=num_workers > 0,
        worker_init_fn=_ignore_signals if num_workers else None,
        # Iterators draw the base seed of their workers from it, which must not advance the default generator.
        generator=torch.Generator(),
    )


# NumPy's seeds have 32 bits.
_MOST_EPOCHS = 1 << 32


@runtime_checkable
class FiniteDataset(SampleSource, Protocol):
    """A map-style dataset with a length."""

    def __len__(self) -> int: ...


class EpochShuffle:
    """Repeats a dataset of n samples infinitely: sample i is sample i mod n of epoch i div n.

    The order of an epoch depends only on (seed, epoch). It has no length, so loaders treat it as infinite.
    """

    def __init__(self, dataset: FiniteDataset, seed: int) -> None:
        if len(dataset) == 0:
            raise UserError("a dataset without samples cannot be repeated; use more data")
        self.dataset, self.seed = dataset, seed
        # Reading is sequential, so only the order of the current epoch is kept.
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def __getitem__(self, index: int) -> Sample:
        if index < 0:
            raise IndexError(f"sample {index} of an endless dataset")
        epoch, place = divmod(index, len(self.dataset))
        return self.dataset[int(self._order_of(epoch)[place])]

    def origins(self, samples: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
        """Returns the dataset number of each of the given samples, if several datasets are repeated."""
        repeated: Any = self.dataset
        origins = np.empty(len(samples), dtype=np.int16)
        epochs, places = np.divmod(samples, len(repeated))
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            origins[in_epoch] = repeated.origins(self._order_of(epoch)[places[in_epoch]])
        return origins

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch != self._epoch:
            if epoch >= _MOST_EPOCHS:
                raise UserError(
                    f"sample {epoch * len(self.dataset)} is in epoch {epoch} of {len(self.dataset)} samples, and at most "
                    f"{_MOST_EPOCHS} epochs are supported; load only the weights with --finetune if the checkpoint cannot have got that far"
                )
            # RandomState, not Generator: its stream is stable across NumPy versions.
            random = np.random.RandomState([self.seed, epoch])
            self._order, self._epoch = random.permutation(len(self.dataset)), epoch
        return self._order


class RepeatedDataset:
    """Repeats a dataset infinitely in the same order; it has no length."""

    def __init__(self, dataset: FiniteDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Sample:
        return self.dataset[index % len(self.dataset)]


class ConcatenatedDataset(ConcatDataset[Sample]):
    """Concatenates datasets."""

    def origins(self, samples: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
        """Returns the dataset number of each of the given samples."""
        return np.searchsorted(self.cumulative_sizes, samples, side="right")


class PaddedDataset:
    """Pads a dataset to `total` samples with a zero loss mask, so that its last batch is whole."""

    def __init__(self, dataset: FiniteDataset, total: int) -> None:
        self.dataset, self.total = dataset, total

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> Sample:
        if index < len(self.dataset):
            return self.dataset[index]
        first = self.dataset[0]
        return {**first, "loss_mask": np.zeros_like(first["loss_mask"])}

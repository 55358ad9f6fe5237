"""What a rank reads for a step."""

import contextlib
import itertools
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pentatron.data.loader import Batch, build_loader
from pentatron.errors import UserError
from pentatron.parallel.collectives import largest, raise_together
from pentatron.parallel.world import World
from pentatron.settings.run import RunConfig
from pentatron.supervise.signals import StopRequest

# Micro-batches on their way to a GPU while it computes: a thread reads them, and a stream of its own copies
# them.
#
# The order is that of the reader, and an error comes where the batch would have come that it is about:
# whoever draws notices nothing but that batches are there already. What was read ahead and not drawn is read
# again by a run that goes on, which counts what it has consumed.


# How long the thread waits before it looks whether anybody still wants batches.
_PATIENCE = 0.2


class Transport(Protocol):
    """Brings a batch to where it is computed with: `start` beside everything else, `finish` for the one who computes. The thread that
    reads calls `enter` first."""

    def enter(self) -> None: ...
    def start(self, batch: Batch) -> tuple[Batch, object]: ...
    def finish(self, batch: Batch, started: object) -> Batch: ...


class ToGPU:
    """Copies from page-locked memory on a stream beside the computation's, which waits for them; the host does not."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        # With its number, also where the device was named without one.
        self.device = stream.device

    def enter(self) -> None:
        # A thread begins with the first GPU, and would take memory of it to lock pages.
        torch.cuda.set_device(self.device)

    def start(self, batch: Batch) -> tuple[Batch, object]:
        with torch.cuda.stream(self.stream):
            there = batch.map(self._copied)
            return there, self.stream.record_event()

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self.device, non_blocking=True)

    def finish(self, batch: Batch, started: object) -> Batch:
        assert isinstance(started, torch.cuda.Event)
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(started)
        # The memory belongs to the copying stream: it must not have it back before the computation is done with it.
        return batch.map(lambda tensor: _used_by(tensor, computing))


def _used_by(tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    tensor.record_stream(stream)
    return tensor


@dataclass(frozen=True)
class _Failed:
    error: Exception


class _Ended:
    """After the last batch."""


_Item = tuple[Batch, object] | _Failed | _Ended
_Ready = queue.Queue[_Item]


def read_ahead(batches: Iterator[Batch], depth: int, transport: Transport) -> "ReadAhead":
    """The same batches, `depth` of them read and on their way before they are drawn. Reading begins at once."""
    return ReadAhead(batches, depth, transport)


class ReadAhead(Iterator[Batch]):
    """Draws what a thread has read. The thread does not hold this: it ends when nobody does any more."""

    def __init__(self, batches: Iterator[Batch], depth: int, transport: Transport) -> None:
        self._transport = transport
        self._ready: _Ready = queue.Queue(max(1, depth))
        self._unwanted = threading.Event()
        read = (batches, transport, self._ready, self._unwanted)
        self._reader = threading.Thread(target=_read, args=read, name="read-ahead", daemon=True)
        self._reader.start()

    def __next__(self) -> Batch:
        if self._unwanted.is_set():
            raise StopIteration
        found = self._ready.get()
        if isinstance(found, _Ended):
            self.close()
            raise StopIteration
        if isinstance(found, _Failed):
            self.close()
            raise found.error
        return self._transport.finish(*found)

    def close(self) -> None:
        self._unwanted.set()
        # It may wait for room, or be within a slow file system; nobody waits for that.
        with contextlib.suppress(queue.Empty):
            self._ready.get_nowait()
        self._reader.join(2 * _PATIENCE)

    def __del__(self) -> None:
        self.close()


def _read(
    batches: Iterator[Batch],
    transport: Transport,
    ready: _Ready,
    unwanted: threading.Event,
) -> None:
    try:
        transport.enter()
        for batch in batches:
            if not _handed_over(transport.start(batch), ready, unwanted):
                return
        _handed_over(_Ended(), ready, unwanted)
    except Exception as error:
        _handed_over(_Failed(error), ready, unwanted)


def _handed_over(
    item: _Item,
    ready: _Ready,
    unwanted: threading.Event,
) -> bool:
    """Waits for room; False if nobody draws any more."""
    while not unwanted.is_set():
        try:
            ready.put(item, timeout=_PATIENCE)
        except queue.Full:
            continue
        return True
    return False


# Larger than any signal's number.
_BAD_DATA = 1000


def micro_batches(
    config: RunConfig, world: World, dataset: Any, consumed_samples: int, size: int | None = None
) -> Iterator[Batch]:
    """This rank's micro-batches on its device, without end, after what was consumed; `size`: not those of training."""
    size = size or config.train.micro_batch_size
    assert size
    # A step's worth: all of the next step is there when the last one ends.
    ahead = max(samples for _, samples in config.batch_plan.changes) // (size * world.data.size)
    on_gpu = world.device.type == "cuda"
    loader = build_loader(
        dataset,
        consumed_samples,
        size,
        world.data.rank,
        world.data.size,
        num_workers=config.data.num_workers,
        pin_memory=on_gpu,
        prefetch_factor=config.data.prefetch_factor,
    )
    # Made here, so that reader processes start before the thread that waits for them.
    batches = iter(loader)
    return read_ahead(batches, ahead, ToGPU(world.copies)) if on_gpu else batches


def agree_on_next_step(
    batches: Iterator[Batch],
    count: int,
    stop: StopRequest,
    world: World,
    guard: Callable[[bool], None] = lambda thorough: None,
) -> tuple[list[Batch], signal.Signals | None]:
    """This rank's micro-batches; or, if any rank was told to stop or met bad data, the same end for all.

    `guard` raises an error where the run's folder is not its own any more; that ends all ranks too.
    """
    drawn: list[Batch] = []
    problem, verdict = None, int(stop.signal or 0)
    try:
        guard(False)
        drawn = list(itertools.islice(batches, count))
    except UserError as error:
        problem, verdict = str(error), _BAD_DATA
    verdict = largest(verdict, world.everyone)
    if verdict == _BAD_DATA:
        raise_together(problem, world.everyone)
    return drawn, signal.Signals(verdict) if verdict else None

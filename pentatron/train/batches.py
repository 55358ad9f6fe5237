"""Micro-batches of a rank: prefetch, asynchronous copy to the GPU, and agreement on when to stop."""

import contextlib
import itertools
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pentatron.data.loader import Batch, build_loader
from pentatron.errors import UserError
from pentatron.parallel.collectives import largest, raise_on_all_ranks
from pentatron.parallel.world import World
from pentatron.settings.run_config import RunConfig
from pentatron.supervise.signals import StopRequest

# Seconds after which the blocked prefetch thread checks whether it was closed.
_POLL_SECONDS = 0.2
# The verdict about invalid data: larger than any signal number, so that `largest` prefers it.
_BAD_DATA = 1000


class CopyToGPU:
    """Copies batches asynchronously from page-locked memory on a separate CUDA stream.

    A thread calls `enter` and `start`, the consumer `finish`.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        # Unlike the configured device, the stream's always has an index.
        self.device = stream.device

    def enter(self) -> None:
        # The current device of a new thread is GPU 0: pinning memory would create a CUDA context there.
        torch.cuda.set_device(self.device)

    def start(self, batch: Batch) -> tuple[Batch, torch.cuda.Event]:
        def copy(tensor: torch.Tensor) -> torch.Tensor:
            pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
            return pinned.to(self.device, non_blocking=True)

        with torch.cuda.stream(self.stream):
            return batch.map(copy), self.stream.record_event()

    def finish(self, batch: Batch, started: torch.cuda.Event) -> Batch:
        compute = torch.cuda.current_stream(self.device)
        compute.wait_event(started)

        def recorded(tensor: torch.Tensor) -> torch.Tensor:
            # The allocator must not reuse memory of the copy stream while the compute stream still reads it.
            tensor.record_stream(compute)
            return tensor

        return batch.map(recorded)


# A prefetched batch with the event of its copy, or the exception that `__next__` raises.
_Item = tuple[Batch, torch.cuda.Event] | Exception


class Prefetcher(Iterator[Batch]):
    """Iterates over batches, of which a thread prefetches `depth`. It starts at once and keeps their order.

    An error of the reader is raised in place of its batch. Prefetched batches that were not consumed are read
    again when the run resumes. The thread holds no reference to this object, so that it ends once this object
    is garbage.
    """

    def __init__(self, batches: Iterator[Batch], depth: int, transport: CopyToGPU) -> None:
        self._transport = transport
        self._queue: queue.Queue[_Item] = queue.Queue(max(1, depth))
        self._closed = threading.Event()
        arguments = (batches, transport, self._queue, self._closed)
        self._thread = threading.Thread(target=_prefetch, args=arguments, name="prefetch", daemon=True)
        self._thread.start()

    def __next__(self) -> Batch:
        if self._closed.is_set():
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, Exception):
            self.close()
            raise item
        return self._transport.finish(*item)

    def close(self) -> None:
        self._closed.set()
        # Unblocks a thread that waits for room. One that is blocked in a file system is not waited for.
        with contextlib.suppress(queue.Empty):
            self._queue.get_nowait()
        self._thread.join(2 * _POLL_SECONDS)

    def __del__(self) -> None:
        self.close()


def _prefetch(
    batches: Iterator[Batch], transport: CopyToGPU, items: queue.Queue[_Item], closed: threading.Event
) -> None:
    try:
        transport.enter()
        for batch in batches:
            if not _put(transport.start(batch), items, closed):
                return
        _put(StopIteration(), items, closed)
    except Exception as error:
        _put(error, items, closed)


def _put(item: _Item, items: queue.Queue[_Item], closed: threading.Event) -> bool:
    """Blocks until the queue has room; returns False once it is closed."""
    while not closed.is_set():
        with contextlib.suppress(queue.Full):
            items.put(item, timeout=_POLL_SECONDS)
            return True
    return False


def micro_batches(
    config: RunConfig, world: World, dataset: Any, consumed_samples: int, size: int | None = None
) -> Iterator[Batch]:
    """Returns an endless iterator over this rank's micro-batches on its device.

    It starts after `consumed_samples`. `size` is the micro-batch size if it is not that of training.
    """
    size = size or config.train.micro_batch_size
    assert size
    # Prefetches a whole step: the largest global batch.
    ahead = max(samples for _, samples in config.batch_plan.changes) // (size * world.data.size)
    on_gpu, ranks = world.device.type == "cuda", world.data
    reading = (config.data.num_workers, on_gpu, config.data.prefetch_factor)
    # `iter` starts the worker processes of the loader before the prefetch thread.
    batches = iter(build_loader(dataset, consumed_samples, size, ranks.rank, ranks.size, *reading))
    return Prefetcher(batches, ahead, CopyToGPU(world.copy_stream)) if on_gpu else batches


def next_step_batches(
    batches: Iterator[Batch],
    count: int,
    stop: StopRequest,
    world: World,
    guard: Callable[[bool], None] = lambda thorough: None,
) -> tuple[list[Batch], signal.Signals | None]:
    """Returns this rank's next `count` micro-batches, and the signal to stop by if any rank has received one.

    Invalid data on one rank raises an error on all ranks. So does `guard`, which raises if the run has lost
    its folder. Collective: one all-reduce decides, so that no rank starts a step that others do not.
    """
    step_batches: list[Batch] = []
    problem, verdict = None, int(stop.signal or 0)
    try:
        guard(False)
        step_batches = list(itertools.islice(batches, count))
    except UserError as error:
        problem, verdict = str(error), _BAD_DATA
    verdict = largest(verdict, world.all_ranks)
    if verdict == _BAD_DATA:
        raise_on_all_ranks(problem, world.all_ranks)
    return step_batches, signal.Signals(verdict) if verdict else None

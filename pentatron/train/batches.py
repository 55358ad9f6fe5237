"""What a rank reads for a step."""

import itertools
import signal
from collections.abc import Callable, Iterator
from typing import Any

from pentatron.config.run import RunConfig
from pentatron.data.loader import Batch, build_loader
from pentatron.errors import UserError
from pentatron.parallel.collectives import largest, raise_together
from pentatron.parallel.world import World
from pentatron.train.ahead import ToGPU, read_ahead
from pentatron.train.interrupt import StopRequest

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

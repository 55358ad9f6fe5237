"""Whether the disk has room for the checkpoints of a run: said before its first step, rather than by a save that fails at night."""

import contextlib
import itertools
import shutil
from pathlib import Path

from pentatron.checkpoint.parts import own_fragments
from pentatron.checkpoint.store import CheckpointStore
from pentatron.config.run import RunConfig
from pentatron.errors import UserError
from pentatron.optim.build import AnyOptimizer
from pentatron.parallel.collectives import gather_objects, on_some_ranks
from pentatron.parallel.world import World
from pentatron.text import binary_size
from pentatron.train.parallel_model import ParallelModel
from pentatron.train.random_state import random_state
from pentatron.train.state import TrainState


def disk_notes(
    config: RunConfig,
    world: World,
    model: ParallelModel,
    optimizer: AnyOptimizer,
    store: CheckpointStore,
    state: TrainState,
) -> list[str]:
    """Refuses a run of which not even one checkpoint fits, and tells if those it keeps will not. Every rank must ask."""
    left = saves_left(config, state.step)
    if left == 0:
        if world.is_first and config.checkpoint.save_checkpoints and not config.train.skip_train:
            # A run that was killed after its last step: no save follows that would remove what it left.
            with contextlib.suppress(OSError):
                store.remove_leftovers()
        return []
    size = checkpoint_bytes(world, model, optimizer, store)

    def judge() -> list[str]:
        return _judge(config, store, size, left, state.step)

    return on_some_ranks(world.is_first, judge, world.everyone) or []


def checkpoint_bytes(
    world: World, model: ParallelModel, optimizer: AnyOptimizer, store: CheckpointStore
) -> int:
    """What one takes, all files of all ranks together; the manifest is not worth counting."""
    parts = itertools.chain(
        optimizer.fragments(owned_only=True),
        model.routers.fragments(owned_only=True),
        own_fragments(random_state(world)),
    )
    return sum(gather_objects(sum(map(store.bytes_of, parts)), world.everyone))


def saves_left(config: RunConfig, step: int) -> int:
    """How many checkpoints a run that stands at this step will still save."""
    last, interval = config.train.train_iters, config.checkpoint.save_interval
    if config.train.skip_train or not config.checkpoint.save_checkpoints or (step >= last > 0):
        return 0
    return last // interval - step // interval + (last % interval > 0 or last == 0)


def _judge(config: RunConfig, store: CheckpointStore, size: int, left: int, step: int) -> list[str]:
    # A save begins with that too: a run that was killed while it saved must not be refused for what it left.
    store.remove_leftovers()
    free = free_bytes(store.folder)
    if free < size:
        raise UserError(
            f"a checkpoint takes {binary_size(size)} and {store.folder} has {binary_size(free)} free, so nothing could be saved; make room, "
            f"choose another folder with --save, or train without checkpoints (--no-save-checkpoints)"
        )
    keep, retained = config.checkpoint.keep_checkpoints, _retained(config, step)
    # A new one is whole before the oldest goes.
    at_once = left if keep is None else min(left, max(1, keep + 1 - len(store.steps())) + retained)
    if free >= at_once * size:
        return []
    kept = "all are kept" if keep is None else f"--keep-checkpoints {keep}"
    kept += f", and {retained} for good" if retained else ""
    return [
        f"a checkpoint takes {binary_size(size)}, and {at_once} more will lie in {store.folder} at a time ({kept}): {binary_size(at_once * size)}, of "
        f"which {binary_size(free)} are free; keep fewer with --keep-checkpoints, or make room before a save fails"
    ]


def _retained(config: RunConfig, step: int) -> int:
    """How many will be kept for good from here on."""
    every, last = config.checkpoint.save_retain_interval, config.train.train_iters
    return 0 if every is None or last is None else last // every - step // every


def free_bytes(folder: Path) -> int:
    """For this user, on the disk where the folder is, or will be."""
    existing = next(p for p in (folder, *folder.resolve().parents) if p.exists())
    return shutil.disk_usage(existing).free

"""The run of this process, for functions without arguments: `get_args()`, `get_timers()`, `mpu.*`.

This is the only module of Pentatron with a global variable, because Megatron's interface needs one. Nothing
outside `pentatron.megatron` reads it; a user's program sets it for the duration of its run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from pentatron.data.open_data import configured_tokenizer
from pentatron.data.tokenizer import Tokenizer
from pentatron.errors import UserError
from pentatron.layout.ranks import Axis
from pentatron.layout.stages import StagePart
from pentatron.megatron.arguments import Arguments
from pentatron.megatron.timers import Timers
from pentatron.models.causal_lm import SharedEmbedding
from pentatron.monitor.display import Display
from pentatron.nn.options import Axes, ModelOptions, axes_of
from pentatron.parallel.world import World
from pentatron.settings.resolve import Resolved
from pentatron.settings.run_config import RunConfig

if TYPE_CHECKING:
    from pentatron.megatron.datasets import DataPlan
    from pentatron.megatron.initialize import Stepwise


@dataclass(frozen=True)
class ProcessGroups:
    """How the models of one rank are built: the parallel axes, the contents of each of its stages, and their
    options.

    `options` None takes those of the run, or the defaults outside of a run. `shared_embedding`: for a program
    that builds all stages of the rank in order.
    """

    axes: Axes
    stages: tuple[StagePart, ...]
    options: ModelOptions | None = None
    shared_embedding: SharedEmbedding | None = None


def process_groups(config: RunConfig, world: World) -> ProcessGroups:
    """Returns the `pg_collection` of this rank in a configured layout."""
    numbers = config.placement.stages_of(world.at.pipeline)
    return ProcessGroups(axes_of(world, config.parallel), tuple(config.stages[number] for number in numbers))


@dataclass
class CurrentRun:
    """The state of a run.

    `stage` is the index of the pipeline stage that is built or computed, or None in between. `data` is set
    while the dataset provider is called, `stepwise` if the program calls the steps itself. `alone` is the
    process group of this rank only, made at first use.
    """

    resolved: Resolved
    world: World
    display: Display
    args: Arguments
    timers: Timers
    groups: ProcessGroups
    stage: int | None = None
    data: "DataPlan | None" = None
    stepwise: "Stepwise | None" = None
    alone: Any = None

    @property
    def config(self) -> RunConfig:
        return self.resolved.config

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Cached, because programs call `get_tokenizer()` for every batch."""
        return configured_tokenizer(self.config.data, self.config.model.vocab_size)

    @property
    def local_stages(self) -> tuple[int, ...]:
        return tuple(self.config.placement.stages_of(self.world.at.pipeline))

    @property
    def virtual_rank(self) -> int | None:
        """Index of the active stage among this rank's stages; None with a single stage."""
        if self.stage is None or self.config.virtual_stages == 1:
            return None
        return self.local_stages.index(self.stage)

    @contextmanager
    def building(self, groups: ProcessGroups) -> Iterator[None]:
        """Makes models use these process groups and options if they are built inside the block."""
        previous, self.groups = self.groups, groups
        try:
            yield
        finally:
            self.groups = previous

    def process_group(self, axis: Axis) -> Any:
        """Returns the `torch.distributed` group of an axis; a group of this rank only if its size is 1."""
        group = self.world.group(axis)
        if group.process_group is not None:
            return group.process_group
        if self.alone is None:
            self.alone = dist.new_group([self.world.all_ranks.rank], use_local_synchronization=True)
        return self.alone


_running: CurrentRun | None = None
_started_as: tuple[str, ...] = ()


def current_run() -> CurrentRun:
    if _running is None:
        raise UserError(
            "there is no run yet: get_args(), get_timers() and mpu.* work inside the functions given to pretrain()"
        )
    return _running


def is_running() -> bool:
    return _running is not None


@contextmanager
def running(resolved: Resolved, world: World, display: Display, args: Arguments) -> Iterator[CurrentRun]:
    """Makes this the current run of the process inside the block."""
    global _running
    if _running is not None:
        raise UserError("a run is active in this process; start a second one in another process")
    owns_group = not dist.is_initialized()
    if owns_group:
        # Loss functions of users call all_reduce on mpu's groups, also in a run of one process.
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    timers = Timers(resolved.config.loop.timing_log_level, world.all_ranks, display.say)
    _running = CurrentRun(resolved, world, display, args, timers, process_groups(resolved.config, world))
    try:
        yield _running
    finally:
        _running = None
        if owns_group:
            dist.destroy_process_group()


def script_command(words: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Returns the arguments of `python` that start the script if they are not just its path; sets them if
    given.
    """
    global _started_as
    if words is not None:
        _started_as = words
    return _started_as


def get_args() -> Arguments:
    """Returns every setting of the run by name."""
    return current_run().args


def get_timers() -> Timers:
    return current_run().timers


def get_tokenizer() -> Tokenizer | None:
    """Returns the configured tokenizer; None if the data needs none."""
    return current_run().tokenizer


def get_tensorboard_writer() -> None:
    """Returns None: the session writes to TensorBoard itself."""


def get_wandb_writer() -> None:
    """Returns None: the session writes to Weights & Biases itself."""


def get_one_logger() -> None:
    """Returns None: there is no one_logger, and programs test for that."""

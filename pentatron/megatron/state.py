"""The run of this process, for functions that take no argument: `get_args()`, `get_timers()`, `mpu.*`.

This is the one place of the package where something is global: Megatron's names leave no other way. Nothing outside
`pentatron.megatron` reads it; the program that a user's script is made into sets it when its run begins.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from pentatron.data.datasets import configured_tokenizer
from pentatron.data.tokenizer import Tokenizer
from pentatron.errors import UserError
from pentatron.layout.ranks import Axis
from pentatron.megatron.arguments import Arguments
from pentatron.megatron.timers import Timers
from pentatron.models.gpt_model import ProcessGroups, process_groups
from pentatron.monitor.display import Display
from pentatron.parallel.world import World
from pentatron.settings.resolve import Resolved
from pentatron.settings.run import RunConfig

if TYPE_CHECKING:
    from pentatron.megatron.datasets import DataPlan
    from pentatron.megatron.flow import Flow


@dataclass
class Running:
    """`stage`: the number of the stage that is built or computed right now; None in between."""

    resolved: Resolved
    world: World
    display: Display
    args: Arguments
    timers: Timers
    groups: ProcessGroups
    stage: int | None = None
    data: "DataPlan | None" = None
    flow: "Flow | None" = None
    # Torch's group of this rank alone, once it is asked for.
    alone: Any = None

    @property
    def config(self) -> RunConfig:
        return self.resolved.config

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Read once: programs ask for it with every batch."""
        return configured_tokenizer(self.config.data, self.config.model.vocab_size)

    @property
    def own_stages(self) -> tuple[int, ...]:
        return tuple(self.config.placement.stages_of(self.world.at.pipeline))

    @property
    def virtual_rank(self) -> int | None:
        """Which of this rank's stages is at work, where it has several."""
        if self.stage is None or self.config.virtual_stages == 1:
            return None
        return self.own_stages.index(self.stage)

    @contextmanager
    def building(self, groups: ProcessGroups) -> Iterator[None]:
        """Inside, models are built as those that the run trains."""
        before, self.groups = self.groups, groups
        try:
            yield
        finally:
            self.groups = before

    def process_group(self, axis: Axis) -> Any:
        """Torch's group of the ranks along an axis; on an axis without company, of this rank alone."""
        group = self.world.group(axis)
        if group.process_group is not None:
            return group.process_group
        if self.alone is None:
            self.alone = dist.new_group([self.world.everyone.rank], use_local_synchronization=True)
        return self.alone


_running: Running | None = None
_started_as: tuple[str, ...] = ()


def current() -> Running:
    if _running is None:
        raise UserError(
            "there is no run yet: what get_args(), get_timers() and mpu.* tell is known inside the functions given to pretrain()"
        )
    return _running


def is_running() -> bool:
    return _running is not None


@contextmanager
def running(resolved: Resolved, world: World, display: Display, args: Arguments) -> Iterator[Running]:
    """Makes this the run of the process, until the end of the block."""
    global _running
    if _running is not None:
        raise UserError("a run is under way in this process; a second one needs a process of its own")
    made_group = not dist.is_initialized()
    if made_group:
        # Loss functions reduce over mpu's groups themselves, also where a process is alone.
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    timers = Timers(resolved.config.loop.timing_log_level, world.everyone, display.say)
    groups = process_groups(resolved.config, world)
    _running = Running(resolved, world, display, args, timers, groups)
    try:
        yield _running
    finally:
        _running = None
        if made_group:
            dist.destroy_process_group()


def started_as(words: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """The words after `python` that run the user's script, where it was not started by its name alone."""
    global _started_as
    if words is not None:
        _started_as = words
    return _started_as

"""Which optimizer a layout needs. Whoever has one need not know which it is."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

from pentatron.optim.optimizer import Optimizer
from pentatron.parallel.shards import held_parameters
from pentatron.parallel.world import World
from pentatron.settings.decision_types import OptimizerOptions
from pentatron.settings.training import OptimConfig

if TYPE_CHECKING:
    from pentatron.optim.sharded import ShardedOptimizer

AnyOptimizer: TypeAlias = "Optimizer | ShardedOptimizer"


def build_optimizer(
    chunks: Mapping[int, nn.Module],
    world: World,
    config: OptimConfig,
    options: OptimizerOptions,
    dtype: torch.dtype,
) -> AnyOptimizer:
    """Shards of parameters for ZeRO 3, where there are ranks to divide them between; flat buckets for all else."""
    if options.zero_stage == 3 and has_copies(chunks, world):
        # Torch's sharding brings its compiler along, which other runs need not wait for.
        from pentatron.optim.sharded import ShardedOptimizer

        return ShardedOptimizer(chunks, world, config, options, dtype)
    for chunk in chunks.values():
        chunk.to(world.device)
    return Optimizer(chunks, world, config, options, dtype)


def has_copies(chunks: Mapping[int, nn.Module], world: World) -> bool:
    """Also if it is experts alone of which other ranks of a stage hold copies: all its ranks must answer alike."""
    axes = {held.declared.copies for chunk in chunks.values() for held in held_parameters(chunk)}
    return any(world.group(axis).size > 1 for axis in axes)

"""Construction of the optimizer for the ZeRO stage and the layout."""

from typing import TYPE_CHECKING, TypeAlias

import torch

from pentatron.optim.optimizer import Modules, Optimizer
from pentatron.parallel.sharding import sharded_parameters
from pentatron.parallel.world import World
from pentatron.settings.decision_types import OptimizerOptions
from pentatron.settings.training import OptimConfig

if TYPE_CHECKING:
    from pentatron.optim.sharded import ShardedOptimizer

AnyOptimizer: TypeAlias = "Optimizer | ShardedOptimizer"


def build_optimizer(
    modules: Modules, world: World, config: OptimConfig, options: OptimizerOptions, dtype: torch.dtype
) -> AnyOptimizer:
    """Returns a ZeRO 3 optimizer if there are ranks to shard over, otherwise one on flat buckets."""
    if options.zero_stage == 3 and has_replicas(modules, world):
        # FSDP imports torch's compiler, which takes seconds.
        from pentatron.optim.sharded import ShardedOptimizer

        return ShardedOptimizer(modules, world, config, options, dtype)
    for module in modules.values():
        module.to(world.device)
    return Optimizer(modules, world, config, options, dtype)


def has_replicas(modules: Modules, world: World) -> bool:
    """Whether other ranks hold replicas of a parameter.

    Includes experts, so that all ranks of a stage agree.
    """
    axes = {p.declared.replica_axis for module in modules.values() for p in sharded_parameters(module)}
    return any(world.group(axis).size > 1 for axis in axes)

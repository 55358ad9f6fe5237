"""ZeRO 3: the optimizer on sharded parameters, gradients and optimizer state.

`pentatron.parallel.zero3` shards the parameters and reduces their gradients in every backward; this module
updates, saves and loads the shards. If the replicas form several groups with a full copy of the model each,
gradients are all-reduced over the groups once a step.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from pentatron.layout.actions import Kind
from pentatron.layout.ranks import Axis
from pentatron.optim.optimizer import FragmentsWithAxes, Modules, OptimizerBase
from pentatron.optim.update_rules import Gradients, UpdatePart
from pentatron.parallel.buckets import storage_bytes
from pentatron.parallel.collectives import Pending, start_all_reduce_
from pentatron.parallel.gradients import FlatGradients, GradientStorage, PartialGradientReduction
from pentatron.parallel.sharding import Fragment, Shard, true_runs
from pentatron.parallel.world import World
from pentatron.parallel.zero3 import SHARD_AXES, ShardedStage, Zero3Shard
from pentatron.settings.decision_types import OptimizerOptions
from pentatron.settings.training import OptimConfig


class ShardedOptimizer(OptimizerBase):
    """Optimizer on parameters sharded by `fully_shard`: ZeRO 3."""

    def __init__(
        self,
        modules: Modules,
        world: World,
        config: OptimConfig,
        options: OptimizerOptions,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(world, config)
        self._stages = {number: ShardedStage(module, world, dtype) for number, module in modules.items()}
        self._flats = [flat for stage in self._stages.values() for flat in stage.flat.values()]
        self._shards = [shard for stage in self._stages.values() for shard in stage.shards]
        self._pending: list[Pending] = []
        kept = [_kept_gradients(shard) for shard in self._shards]
        self._partial_sums = PartialGradientReduction(world, kept)
        self._padding = [view for shard in self._shards for view in _padding_of(shard)]
        self._normed = [
            run
            for shard, gradients in zip(self._shards, kept)
            for run in gradients.runs(
                f for s, f in gradients.fragments if world.is_first_of(_replica_axes(shard, s))
            )
        ]
        # A rank has no part of a parameter with fewer rows than ranks.
        self._updated_shards = [shard for shard in self._shards if shard.values.numel()]
        parts = [UpdatePart(shard.values, shard.param.decays) for shard in self._updated_shards]
        self._build_update(parts, options.fused)

    def zero_gradients(self) -> None:
        for flat in self._flats:
            flat.zero_()

    def begin_backward(self, stage: int, last: bool, kind: Kind = Kind.BACKWARD) -> None:
        assert kind is Kind.BACKWARD, (
            "FSDP reduces all gradients in one backward, so a split backward would lose those of the weight half"
        )
        self._stages[stage].begin_backward(last)

    def end_backward(self, stage: int, last: bool, kind: Kind = Kind.BACKWARD) -> None:
        """Does nothing: FSDP has reduced and accumulated the gradients already."""

    def reduce(self, stage: int) -> None:
        """Called after all backward passes of the stage; all-reduces over the groups of replicas."""
        for axis, flat in self._stages[stage].flat.items():
            self._pending.append(start_all_reduce_(flat, self.world.group(SHARD_AXES[axis][1])))

    def finish_reduction(self) -> None:
        """Waits for the sums over replicas, and sums partial gradients over other axes."""
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
        if self._padding:
            torch._foreach_zero_(self._padding)
        self._partial_sums.all_reduce()

    def _gradients(self) -> Gradients:
        return [shard.gradients for shard in self._updated_shards]

    def _update_model_weights(self, rounded: bool = False) -> None:
        for stage in self._stages.values():
            stage.reshard()

    def _after_update(self) -> None:
        """Does nothing: the gradients have a fixed storage."""

    def wait_for_weights(self) -> None:
        """Does nothing: layers gather their weights when they run."""

    def _fragments_of(self, number: int, values: Tensor, owned_only: bool) -> FragmentsWithAxes:
        kept = self._updated_shards[number]
        for shard, fragment in kept.fragments(values):
            yield _replica_axes(kept, shard), fragment

    def model_weights(self) -> Iterator[Fragment]:
        """Yields the full weights this rank computes with; collective, so every rank must exhaust it."""
        for stage in self._stages.values():
            yield from stage.full_weights()

    def bytes(self) -> dict[str, int]:
        """Returns the memory this rank holds between steps. The fp32 shards are the master weights."""
        return {
            "parameters": storage_bytes(shard.values for shard in self._shards),
            "gradients": storage_bytes(self._flats),
            "master": 0,
            "moments": storage_bytes(self.update.moments()),
        }


def _replica_axes(kept: Zero3Shard, shard: Shard) -> Iterable[Axis]:
    """Returns the axes of the ranks that hold the same part of this shard."""
    return SHARD_AXES[kept.param.declared.replica_axis][1], *shard.replicated_over


def _kept_gradients(shard: Zero3Shard) -> FlatGradients:
    """The gradients have a fixed storage, which is zeroed in each step."""
    storage = GradientStorage(shard.gradients.numel(), shard.gradients.view(-1))
    template = storage.template()
    fragments = list(shard.fragments(template.view(shard.gradients.shape)))
    return FlatGradients(shard.param.tensor, storage, template, fragments)


def _padding_of(shard: Zero3Shard) -> list[Tensor]:
    """Returns the gradients of elements of a shard outside all logical tensors, which must stay zero."""
    covered = torch.zeros(shard.values.shape, dtype=torch.bool)
    for _, fragment in shard.fragments(covered):
        fragment.values.fill_(True)
    return [shard.gradients.view(-1)[i:j] for i, j in true_runs(~covered.flatten())]

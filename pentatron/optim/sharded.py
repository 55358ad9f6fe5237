"""ZeRO 3 behind the interface of `Optimizer`: parameters, gradients and the optimizer's state, of which each rank keeps a share.

`pentatron/parallel/zero3.py` cuts the parameters and sums their gradients in every backward pass; here the shards are
updated, counted, saved and loaded. Where the replicas form several groups that each hold the whole model, the sums of
the groups are added up once a step.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from pentatron.layout.actions import Kind
from pentatron.optim.update_rules import Gradients, Part, build_norm, build_update
from pentatron.parallel.buckets import held_bytes
from pentatron.parallel.collectives import Pending, start_all_reduce_
from pentatron.parallel.gradients import Holder, KeptGradients, PartialSums
from pentatron.parallel.shards import Fragment, Piece, runs_of
from pentatron.parallel.world import World
from pentatron.parallel.zero3 import SHARED_OVER, Shard, ShardedStage
from pentatron.settings.decision_types import OptimizerOptions
from pentatron.settings.training import OptimConfig


class ShardedOptimizer:
    """Owns the parameters of a rank's stages from the moment it is made."""

    def __init__(
        self,
        chunks: Mapping[int, nn.Module],
        world: World,
        config: OptimConfig,
        options: OptimizerOptions,
        dtype: torch.dtype,
    ) -> None:
        self.world = world
        self.config = config
        self._stages = {number: ShardedStage(chunk, world, dtype) for number, chunk in chunks.items()}
        self._shards = [shard for stage in self._stages.values() for shard in stage.shards]
        self._pending: list[Pending] = []
        kept = [_kept_gradients(shard) for shard in self._shards]
        self._partial_sums = PartialSums(world, kept)
        self._uncovered = [view for shard in self._shards for view in _uncovered(shard)]
        self._normed = [
            run
            for shard, gradients in zip(self._shards, kept)
            for run in gradients.runs(f for piece, f in gradients.pieces if self._owns(shard, piece))
        ]
        # A rank may keep nothing of a parameter that has fewer rows than there are ranks.
        self._parts = [
            (shard, Part(shard.values, shard.held.decays)) for shard in self._shards if shard.values.numel()
        ]
        self._update = build_update([part for _, part in self._parts], config, options.one_pass)
        self._norm = build_norm(world.device, self._update.decides)

    def _owns(self, shard: Shard, piece: Piece) -> bool:
        """Whether this rank speaks for all that hold this piece of this shard."""
        _, instances = SHARED_OVER[shard.held.declared.copies]
        return self.world.is_first_of({instances, *piece.replicated_over})

    def zero_gradients(self) -> None:
        for stage in self._stages.values():
            for flat in stage.flat.values():
                flat.zero_()

    def begin_backward(self, stage: int, last: bool, kind: Kind = Kind.BACKWARD) -> None:
        assert kind is Kind.BACKWARD, (
            "torch sums gradients with those of the inputs: a second half would be lost"
        )
        self._stages[stage].begin_backward(last)

    def end_backward(self, stage: int, last: bool, kind: Kind = Kind.BACKWARD) -> None:
        """The backward pass has summed and added its gradients already."""

    def reduce(self, stage: int) -> None:
        """All backward passes of the stage are done: what is left is the sum over the groups of replicas."""
        for axis, flat in self._stages[stage].flat.items():
            pending = start_all_reduce_(flat, self.world.group(SHARED_OVER[axis][1]))
            if pending is not None:
                self._pending.append(pending)

    def finish_reduction(self) -> None:
        """Waits until all gradients are summed over their copies, and adds up what is partial over other axes."""
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
        if self._uncovered:
            torch._foreach_zero_(self._uncovered)
        self._partial_sums.add_up()

    def squared_norm(self) -> Tensor:
        """This rank's part of the squared gradient norm; the sum over all ranks counts every element once."""
        normed = [view for place in self._normed if (view := place.now) is not None]
        return self._norm(normed)

    def step(
        self, learning_rate: float, norm: float, scale: float = 1.0, weight_decay: float | None = None
    ) -> None:
        """Clips and updates the weights. Gradients are `scale` times what they should be, `norm` is what it should be."""
        assert math.isfinite(norm), "a step with gradients that are no numbers"
        self._update.step(self._gradients(), learning_rate, norm, scale, weight_decay)
        self._publish()

    @property
    def decides(self) -> bool:
        """Whether `start_step` is possible: the device knows by itself whether to update."""
        return self._update.decides

    def start_step(
        self, learning_rate: float, found: Tensor, scale: float = 1.0, weight_decay: float | None = None
    ) -> None:
        """As `Optimizer.start_step`."""
        self._update.start(self._gradients(), learning_rate, found, scale, weight_decay)
        self._publish()

    def settle_step(self, made: bool) -> None:
        self._update.settle(made)

    def _gradients(self) -> Gradients:
        return [shard.gradients for shard, _ in self._parts]

    def before_update(self, wait: Callable[[], None]) -> None:
        """Calls it before each update: who reads weights and moments beside the computation is waited for."""
        self._update.before = wait

    def _publish(self) -> None:
        for stage in self._stages.values():
            stage.drop_gathered()

    def wait_for_weights(self) -> None:
        """Nothing is on its way between steps: layers gather their weights as they come to them."""

    def fragments(self, owned_only: bool) -> Iterator[Fragment]:
        """Master weights and moments by logical name: what this rank keeps, to be overwritten, or its part of a save.

        Over all ranks the parts cover every element exactly once.
        """
        for shard, part in self._parts:
            for kind, values in self._update.state(part).items():
                yield from self._named(kind, shard, values, owned_only)

    def gradients(self, owned_only: bool) -> Iterator[Fragment]:
        """The gradients, as `fragments` has the rest; for comparisons."""
        for shard, _ in self._parts:
            yield from self._named("gradients", shard, shard.gradients, owned_only)

    def _named(self, kind: str, shard: Shard, values: Tensor, owned_only: bool) -> Iterator[Fragment]:
        for piece, fragment in shard.pieces(values):
            if not owned_only or self._owns(shard, piece):
                yield dataclasses.replace(fragment, tensor=f"{kind}/{fragment.tensor}")

    def model_weights(self) -> Iterator[Fragment]:
        """The weights this rank computes with, whole. Every rank must ask, and take them one after the other."""
        for stage in self._stages.values():
            for _, fragment in stage.whole_weights():
                yield fragment

    def loaded(self, updates: int) -> None:
        """To be called after the fragments were overwritten: `updates` steps had been taken by then."""
        self._update.set_updates(updates)
        self._publish()

    def bytes(self) -> dict[str, int]:
        """The memory this rank holds between steps. The fp32 shards are the master of what is gathered from them."""
        return {
            "parameters": held_bytes(shard.values for shard in self._shards),
            "gradients": held_bytes(flat for stage in self._stages.values() for flat in stage.flat.values()),
            "master": 0,
            "moments": held_bytes(self._update.moments()),
        }


def _kept_gradients(shard: Shard) -> KeptGradients:
    """These stay where they are, zeros where none has come."""
    holder = Holder(shard.gradients.numel(), shard.gradients.view(-1))
    template = holder.template()
    return KeptGradients(
        shard.held.tensor, holder, template, list(shard.pieces(template.view(shard.gradients.shape)))
    )


def _uncovered(shard: Shard) -> list[Tensor]:
    """The elements of a shard that belong to no logical tensor. They stay zero, whatever backward says."""
    covered = torch.zeros(shard.values.shape, dtype=torch.bool)
    for _, fragment in shard.pieces(covered):
        fragment.values.fill_(True)
    return [shard.gradients.view(-1)[i:j] for i, j in runs_of(~covered.flatten())]

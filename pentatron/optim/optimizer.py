"""Optimizers: update this rank's fp32 master weights and optimizer state from the gradients of a step.

`Optimizer` works on flat buckets. The ZeRO stage determines what the replicas partition: 0 nothing, 1 master
weights and optimizer state, 2 gradients as well. The code works on ranges of buckets and is the same for all
stages, and for a single process. `pentatron.optim.sharded` implements ZeRO 3.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pentatron.layout.actions import Kind
from pentatron.layout.ranks import Axis
from pentatron.optim.update_rules import Gradients, UpdatePart, UpdateRule, build_norm, build_update
from pentatron.parallel.buckets import Bucket, Plan, Span, WeightGather, plan_buckets, storage_bytes
from pentatron.parallel.gradients import (
    GradientSlice,
    GradientStorage,
    GradientView,
    PartialGradientReduction,
)
from pentatron.parallel.reduction import Reduction, build_reductions
from pentatron.parallel.sharding import Fragment, ShardedParameter, fragments_of, sharded_parameters
from pentatron.parallel.world import World
from pentatron.settings.decision_types import OptimizerOptions
from pentatron.settings.training import OptimConfig

# The stages of this rank by number.
Modules = Mapping[int, nn.Module]
# Fragments with the axes over which they are replicated.
FragmentsWithAxes = Iterator[tuple[Iterable[Axis], Fragment]]
# The stages of this rank that use some parameters.
StageNumbers = tuple[int, ...]


@dataclass(frozen=True)
class _Range:
    """Elements of a bucket with equal weight decay, and their gradients, which exclude trailing padding."""

    bucket: Bucket
    span: Span
    part: UpdatePart
    view: GradientView


class OptimizerBase(ABC):
    """Common part of the optimizers: the update of this rank's parts, and their gradient norm.

    An optimizer owns the parameters of a rank's stages from its construction on.
    """

    def __init__(self, world: World, config: OptimConfig) -> None:
        self.world = world
        self.config = config
        # Views of the gradients that this rank contributes to the gradient norm.
        self._normed: list[GradientView] = []

    def _build_update(self, parts: Sequence[UpdatePart], fused: bool) -> None:
        self._parts = parts
        self.update: UpdateRule = build_update(parts, self.config, fused)
        self._norm = build_norm(self.world.device, self.update.is_fused)

    @abstractmethod
    def zero_gradients(self) -> None:
        """Resets the gradients before a new step."""

    @abstractmethod
    def _gradients(self) -> Gradients:
        """Returns the gradients of the parts of the update."""

    @abstractmethod
    def _update_model_weights(self, rounded: bool = False) -> None:
        """Makes the updated master weights available to the model.

        `rounded`: an update in one pass has already rounded them into the model's weights.
        """

    @abstractmethod
    def wait_for_weights(self) -> None:
        """Waits until all weights are gathered.

        Must precede any read of weights outside of their module's forward.
        """

    def squared_norm(self) -> Tensor:
        """Returns this rank's part of the squared gradient norm; over all ranks every element counts once."""
        return self._norm([tensor for view in self._normed if (tensor := view.tensor) is not None])

    def step(
        self, learning_rate: float, norm: float, scale: float = 1.0, weight_decay: float | None = None
    ) -> None:
        """Clips the gradients and updates the weights.

        Gradients are multiplied by `scale`; `norm` is the norm without it.
        """
        assert math.isfinite(norm), "a step with NaN or inf gradients"
        self.wait_for_weights()
        decay = self.config.weight_decay if weight_decay is None else weight_decay
        self.update.step(self._gradients(), learning_rate, norm, scale, decay)
        self._update_model_weights(rounded=True)
        self._after_update()

    def start_step(
        self, learning_rate: float, loss_and_norm: Tensor, scale: float, weight_decay: float | None
    ) -> None:
        """Starts an update that the device skips if loss or norm are NaN or inf, without a host
        synchronization.

        `loss_and_norm` has the loss and the squared norm of the scaled gradients, on the device.
        `finish_step` must report the outcome later.
        """
        self.wait_for_weights()
        decay = self.config.weight_decay if weight_decay is None else weight_decay
        self.update.start(self._gradients(), learning_rate, loss_and_norm, scale, decay)
        self._update_model_weights(rounded=True)

    def finish_step(self, updated: bool) -> None:
        """Reports whether the update that was started was made or skipped."""
        self.update.finish(updated)
        if updated:
            self._after_update()

    @abstractmethod
    def _after_update(self) -> None:
        """Called after an update was made."""

    def fragments(self, owned_only: bool) -> Iterator[Fragment]:
        """Yields master weights and optimizer state by logical name, as views: all that this rank holds, for
        loading, or with `owned_only` its part of a checkpoint.

        Over all ranks the owned parts cover every element exactly once.
        """
        self.wait_for_weights()
        for number, part in enumerate(self._parts):
            for kind, values in self.update.state(part).items():
                yield from self._named(kind, number, values, owned_only)

    def gradients(self, owned_only: bool) -> Iterator[Fragment]:
        """Yields the gradients in the same way as `fragments`, in fp32, for comparisons."""
        for number, (part, gradients) in enumerate(zip(self._parts, self._gradients())):
            values = torch.zeros_like(part.values) if gradients is None else gradients.to(torch.float32)
            yield from self._named("gradients", number, values, owned_only)

    def _named(self, kind: str, number: int, values: Tensor, owned_only: bool) -> Iterator[Fragment]:
        for axes, fragment in self._fragments_of(number, values, owned_only):
            if not owned_only or self.world.is_first_of(axes):
                yield dataclasses.replace(fragment, tensor=f"{kind}/{fragment.tensor}")

    @abstractmethod
    def _fragments_of(self, number: int, values: Tensor, owned_only: bool) -> FragmentsWithAxes:
        """Yields the fragments of a part as views of `values`."""

    def after_load(self, updates: int) -> None:
        """Must be called after `fragments` were overwritten by a checkpoint that had seen `updates` steps."""
        self.update.set_updates(updates)
        self._update_model_weights()
        self.wait_for_weights()


class Optimizer(OptimizerBase):
    """Optimizer on flat buckets: ZeRO 0, 1 and 2."""

    def __init__(
        self,
        modules: Modules,
        world: World,
        config: OptimConfig,
        options: OptimizerOptions,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(world, config)
        self._sharded = options.zero_stage > 0
        self._modules = modules
        staged = {
            stages: [Bucket(plan, dtype, self._sharded, options.in_host_memory) for plan in plans]
            for stages, plans in plan_stage_buckets(modules, world, options.bucket_size).items()
        }
        replicated = any(b.replica_group.size > 1 for buckets in staged.values() for b in buckets)
        assert options.zero_stage < 3 or not replicated, "ZeRO 3 needs ShardedOptimizer"
        self._reductions = build_reductions(staged, world.device, options.zero_stage, options.overlap_reduce)
        # Buckets are packed from the end of a model to its start. Parameters shared by two stages are
        # embeddings, which come first.
        in_order = sorted(self._reductions, key=lambda stages: (stages[0], -len(stages)))
        forward = [bucket for stages in in_order for bucket in reversed(self._reductions[stages].buckets)]
        self._gathering = WeightGather(forward, modules.values(), options.overlap_gather)
        self._buckets = [bucket for reduction in self._reductions.values() for bucket in reduction.buckets]
        self._slices = [s for reduction in self._reductions.values() for s in reduction.slices]
        self._partial_sums = PartialGradientReduction(world, [s.flat() for s in self._slices])
        self._padding = [view for s in self._slices for view in s.padding()]
        self._normed = self._norm_views()
        self._ranges = [entry for s in self._slices for entry in _ranges_of(s)]
        self._build_update([entry.part for entry in self._ranges], options.fused)
        self._gradient_bytes = 0

    def _used_by(self, stage: int) -> list[Reduction]:
        return [reduction for stages, reduction in self._reductions.items() if stage in stages]

    def _norm_views(self) -> list[GradientView]:
        """Returns the gradients this rank adds to the norm: the shards whose first replica it holds."""
        views: list[GradientView] = []
        for gradients in self._slices:
            own = gradients.flat(gradients.bucket.own)
            views += own.runs(f for s, f in own.fragments if self.world.is_first_of(s.replicated_over))
        return views

    @property
    def gradient_storages(self) -> list[GradientStorage]:
        """The storage of the gradients, in an order that is the same in every step."""
        return [s.storage for s in self._slices]

    def zero_gradients(self) -> None:
        """Releases the gradients of the previous step."""
        for reduction in self._reductions.values():
            reduction.drop()

    def begin_backward(self, stage: int, last: bool, kind: Kind = Kind.BACKWARD) -> None:
        """Called before each backward of a stage, whole or half; `last`: it is the last of the step."""
        for reduction in self._used_by(stage):
            reduction.begin_backward(last, kind)

    def end_backward(self, stage: int, last: bool, kind: Kind = Kind.BACKWARD) -> None:
        for reduction in self._used_by(stage):
            reduction.end_backward()

    def reduce(self, stage: int) -> None:
        """Called after all backward passes of the stage."""
        for reduction in self._used_by(stage):
            reduction.reduce()

    def finish_reduction(self) -> None:
        """Waits for the sums over replicas, and sums partial gradients over other axes."""
        for reduction in self._reductions.values():
            reduction.finish()
        padding = [tensor for view in self._padding if (tensor := view.tensor) is not None]
        if padding:
            torch._foreach_zero_(padding)
        self._partial_sums.all_reduce()
        self._gradient_bytes = storage_bytes(t for r in self._reductions.values() for t in r.memory())

    def _after_update(self) -> None:
        """Releases the gradients. Those of a skipped step are kept, to diagnose it."""
        self.zero_gradients()

    def _gradients(self) -> Gradients:
        return [entry.view.tensor for entry in self._ranges]

    def _update_model_weights(self, rounded: bool = False) -> None:
        # Copies master weights to the weights in the model's dtype.
        separate = [bucket for bucket in self._buckets if bucket.master_is_separate]
        if separate and not (rounded and self.update.is_fused):
            torch._foreach_copy_([b.kept.of(b.weights) for b in separate], [b.master for b in separate])
        if self._sharded:
            self._gathering.start()

    def wait_for_weights(self) -> None:
        self._gathering.wait()

    def _fragments_of(self, number: int, values: Tensor, owned_only: bool) -> FragmentsWithAxes:
        entry = self._ranges[number]
        within = entry.span.within(entry.bucket.own) if owned_only else entry.span
        for shard, fragment in entry.bucket.plan.fragments(within, values, entry.span.first):
            yield shard.replicated_over, fragment

    def model_weights(self) -> Iterator[Fragment]:
        """Yields the full weights this rank computes with; collective, so every rank must exhaust it."""
        self.wait_for_weights()
        for param in (p for module in self._modules.values() for p in sharded_parameters(module)):
            yield from (fragment for _, fragment in fragments_of(param, param.parameter.detach().view(-1)))

    def bytes(self) -> dict[str, int]:
        """Returns the memory this rank holds. FP32 weights are their own master weights.

        Gradients are those of the last step at its end; between steps there are none.
        """
        return {
            "parameters": storage_bytes(p for module in self._modules.values() for p in module.parameters()),
            "gradients": self._gradient_bytes,
            "master": storage_bytes(b.master for b in self._buckets if b.master_is_separate),
            "moments": storage_bytes(self.update.moments()),
        }


def plan_stage_buckets(modules: Modules, world: World, bucket_size: int) -> dict[StageNumbers, list[Plan]]:
    """Plans buckets of at most `bucket_size` elements, by the stages that use them.

    Parameters belong to one stage, or to both ends of a folded pipeline if the ends share them.
    """
    users: dict[int, StageNumbers] = {}
    for stage in sorted(modules):
        for param in sharded_parameters(modules[stage]):
            users[id(param.parameter)] = (*users.get(id(param.parameter), ()), stage)
    parameters: dict[StageNumbers, list[ShardedParameter]] = {(stage,): [] for stage in modules}
    for param in sharded_parameters(*(modules[stage] for stage in sorted(modules))):
        parameters.setdefault(users[id(param.parameter)], []).append(param)
    return {stages: plan_buckets(params, bucket_size, world.group) for stages, params in parameters.items()}


def _ranges_of(gradients: GradientSlice) -> Iterator[_Range]:
    """Splits gradients by weight decay.

    All ranges of a bucket cover what this rank keeps of it, padding included.
    """
    bucket = gradients.bucket
    firsts = [slot.span.first for slot in bucket.plan.slots]
    middle = bucket.plan.decayed
    for decays, parameters in ((True, Span(0, middle)), (False, Span(middle, bucket.size))):
        decay_span = parameters.within(bucket.kept)
        end = min((f for f in firsts if f >= gradients.span.last), default=decay_span.last)
        span = Span(gradients.span.first, end).within(decay_span)
        if len(span):
            local = span.relative_to(bucket.kept)
            weights = span.of(bucket.weights) if bucket.master.device == bucket.weights.device else None
            part = UpdatePart(local.of(bucket.master), decays, weights if bucket.master_is_separate else None)
            received = span.within(gradients.span).relative_to(gradients.span)
            yield _Range(bucket, span, part, GradientView.of(gradients.storage, received))

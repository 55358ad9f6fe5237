"""An update of what this rank keeps of the flat buffers, fp32 master weights and moments, from the gradients of a step.

What the ranks with copies of a parameter divide between them is decided by the ZeRO stage: 0 nothing, 1 master weights and moments, 2 gradients as
well. Everything below works on stretches of buckets and is the same for all of them, and for one process.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pentatron.layout.actions import Kind
from pentatron.optim.update_rules import Gradients, Part, build_norm, build_update
from pentatron.parallel.buckets import Bucket, Plan, Span, WeightGathering, held_bytes, plan_buckets
from pentatron.parallel.gradients import HeldGradients, Holder, KeptGradients, PartialSums, Place
from pentatron.parallel.reduction import (
    Reduction,
    ScatterBuffers,
    ScatteredReduction,
    SharedReduction,
    WholeReduction,
)
from pentatron.parallel.shards import Fragment, Held, fragments_of, held_parameters, runs_of
from pentatron.parallel.world import World
from pentatron.settings.decision_types import OptimizerOptions
from pentatron.settings.training import OptimConfig

# The stages of this rank that use some parameters.
Stages = tuple[int, ...]


@dataclass(frozen=True)
class _Stretch:
    """Elements of a bucket that decay alike, and where their gradients are; these end where alignment begins."""

    bucket: Bucket
    span: Span
    part: Part
    place: Place

    @property
    def gradients(self) -> Tensor:
        """In fp32, to be read."""
        found = self.place.now
        if found is None:
            return torch.zeros(self.place.shape, dtype=torch.float32, device=self.bucket.weights.device)
        return found.to(torch.float32)


class Optimizer:
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
        self._sharded = options.zero_stage > 0
        self._chunks = chunks
        found = self._take_over(chunks, options, dtype)
        shared = any(bucket.copies.size > 1 for buckets in found.values() for bucket in buckets)
        assert options.zero_stage < 3 or not shared, "sharded parameters are no matter of buckets"
        self._reductions = _reductions(found, world, options)
        # Buckets are packed from a model's end to its start. What two stages share is an embedding, which comes first.
        in_order = sorted(self._reductions, key=lambda stages: (stages[0], -len(stages)))
        forward = [bucket for stages in in_order for bucket in reversed(self._reductions[stages].buckets)]
        self._gathering = WeightGathering(forward, chunks.values(), options.overlap_gather)
        self._buckets = [bucket for reduction in self._reductions.values() for bucket in reduction.buckets]
        self._held = [held for reduction in self._reductions.values() for held in reduction.held]
        self._partial_sums = PartialSums(world, [_kept_gradients(held) for held in self._held])
        self._uncovered = [place for held in self._held for place in _uncovered(held)]
        self._normed = self._places_counted_here()
        self._stretches = [stretch for held in self._held for stretch in _stretches(held)]
        self._update = build_update([stretch.part for stretch in self._stretches], config, options.one_pass)
        self._norm = build_norm(world.device, self._update.decides)
        self._gradient_bytes = 0

    def _take_over(
        self, chunks: Mapping[int, nn.Module], options: OptimizerOptions, dtype: torch.dtype
    ) -> dict[Stages, list[Bucket]]:
        return {
            stages: [Bucket(plan, dtype, self._sharded, options.in_host_memory) for plan in plans]
            for stages, plans in plans_of(chunks, self.world, options.bucket_size).items()
        }

    def _used_by(self, stage: int) -> list[Reduction]:
        return [reduction for stages, reduction in self._reductions.items() if stage in stages]

    def _places_counted_here(self) -> list[Place]:
        """This rank's part of the gradient norm: of its share of every bucket, the pieces it speaks for."""
        found: list[Place] = []
        for held in self._held:
            template = held.holder.template()
            within = held.span.within(held.bucket.own)
            pieces = held.bucket.plan.pieces(within, template, held.span.first)
            counted = [f.values for piece, f in pieces if self.world.is_first_of(piece.replicated_over)]
            found.extend(held.holder.places(counted, template))
        return found

    @property
    def holders(self) -> list[Holder]:
        """Where the gradients of a step are, in an order that stays."""
        return [held.holder for held in self._held]

    def zero_gradients(self) -> None:
        """A new step begins: no gradient has come."""
        for reduction in self._reductions.values():
            reduction.drop()

    def begin_backward(self, stage: int, last: bool, kind: Kind = Kind.BACKWARD) -> None:
        """Before each backward pass of a stage, whole or half; `last`: no other follows in this step."""
        for reduction in self._used_by(stage):
            reduction.begin_backward(last, kind)

    def end_backward(self, stage: int, last: bool, kind: Kind = Kind.BACKWARD) -> None:
        for reduction in self._used_by(stage):
            reduction.end_backward()

    def reduce(self, stage: int) -> None:
        """All backward passes of the stage are done."""
        for reduction in self._used_by(stage):
            reduction.reduce()

    def finish_reduction(self) -> None:
        """Waits until all gradients are summed over their copies, and adds up what is partial over other axes."""
        for reduction in self._reductions.values():
            reduction.finish()
        uncovered = [view for place in self._uncovered if (view := place.now) is not None]
        if uncovered:
            torch._foreach_zero_(uncovered)
        self._partial_sums.add_up()
        self._gradient_bytes = held_bytes(t for r in self._reductions.values() for t in r.memory())

    def squared_norm(self) -> Tensor:
        """This rank's part of the squared gradient norm; the sum over all ranks counts every element once."""
        normed = [view for place in self._normed if (view := place.now) is not None]
        return self._norm(normed)

    def step(
        self, learning_rate: float, norm: float, scale: float = 1.0, weight_decay: float | None = None
    ) -> None:
        """Clips and updates the weights. Gradients are `scale` times what they should be, `norm` is what it should be. They are
        gone afterwards."""
        assert math.isfinite(norm), "a step with gradients that are no numbers"
        self.wait_for_weights()
        self._update.step(self._gradients(), learning_rate, norm, scale, weight_decay)
        self._publish(rounded=True)
        self.zero_gradients()

    @property
    def decides(self) -> bool:
        """Whether `start_step` is possible: the device knows by itself whether to update."""
        return self._update.decides

    def start_step(
        self, learning_rate: float, found: Tensor, scale: float = 1.0, weight_decay: float | None = None
    ) -> None:
        """A step that is made if the numbers on the device are some: `found` has the loss and the squared norm of the
        gradients as they are. Nobody waits for them; `settle_step` must be told later what they were."""
        self.wait_for_weights()
        self._update.start(self._gradients(), learning_rate, found, scale, weight_decay)
        self._publish(rounded=True)

    def settle_step(self, made: bool) -> None:
        """Gradients of a step that was not made are kept, for whoever looks for the reason."""
        self._update.settle(made)
        if made:
            self.zero_gradients()

    def _gradients(self) -> Gradients:
        return [stretch.place.now for stretch in self._stretches]

    def before_update(self, wait: Callable[[], None]) -> None:
        """Calls it before each update: who reads weights and moments beside the computation is waited for."""
        self._update.before = wait

    def _publish(self, rounded: bool = False) -> None:
        """Rounds the master weights into the weights the model computes with, unless the update has done so, and makes these whole
        everywhere."""
        separate = [bucket for bucket in self._buckets if bucket.master_is_separate]
        if separate and not (rounded and self._update.rounds):
            torch._foreach_copy_([b.kept.of(b.weights) for b in separate], [b.master for b in separate])
        if self._sharded:
            self._gathering.start()

    def wait_for_weights(self) -> None:
        """To be called before weights are read by any other way than running their module."""
        self._gathering.wait()

    def fragments(self, owned_only: bool) -> Iterator[Fragment]:
        """Master weights and moments by logical name: what this rank keeps, to be overwritten, or its part of a save.

        Over all ranks the parts cover every element exactly once.
        """
        self.wait_for_weights()
        for stretch in self._stretches:
            for kind, values in self._update.state(stretch.part).items():
                yield from self._named(kind, stretch, values, owned_only)

    def gradients(self, owned_only: bool) -> Iterator[Fragment]:
        """The gradients, as `fragments` has the rest; for comparisons."""
        for stretch in self._stretches:
            yield from self._named("gradients", stretch, stretch.gradients, owned_only)

    def _named(self, kind: str, stretch: _Stretch, values: Tensor, owned_only: bool) -> Iterator[Fragment]:
        bucket, span = stretch.bucket, stretch.span
        within = span.within(bucket.own) if owned_only else span
        for piece, fragment in bucket.plan.pieces(within, values, span.first):
            if not owned_only or self.world.is_first_of(piece.replicated_over):
                yield dataclasses.replace(fragment, tensor=f"{kind}/{fragment.tensor}")

    def model_weights(self) -> Iterator[Fragment]:
        """The weights this rank computes with, whole. Every rank must ask, and take them one after the other."""
        self.wait_for_weights()
        for held in (held for chunk in self._chunks.values() for held in held_parameters(chunk)):
            for _, fragment in fragments_of(held, held.parameter.detach().view(-1)):
                yield fragment

    def loaded(self, updates: int) -> None:
        """To be called after the fragments were overwritten: `updates` steps had been taken by then."""
        self._update.set_updates(updates)
        self._publish()
        self.wait_for_weights()

    def bytes(self) -> dict[str, int]:
        """The memory this rank holds. Weights in fp32 are their own master. Gradients are those of the last step when all of them had
        come; between steps there are none."""
        return {
            "parameters": held_bytes(p for chunk in self._chunks.values() for p in chunk.parameters()),
            "gradients": self._gradient_bytes,
            "master": held_bytes(b.master for b in self._buckets if b.master_is_separate),
            "moments": held_bytes(self._update.moments()),
        }


def plans_of(chunks: Mapping[int, nn.Module], world: World, bucket_size: int) -> dict[Stages, list[Plan]]:
    """Buckets of at most so many elements, by the stages that use them: one stage, or the two ends of a folded pipeline for what they share."""
    users: dict[int, Stages] = {}
    for stage in sorted(chunks):
        for held in held_parameters(chunks[stage]):
            users[id(held.parameter)] = (*users.get(id(held.parameter), ()), stage)
    found: dict[Stages, list[Held]] = {(stage,): [] for stage in chunks}
    for held in held_parameters(*(chunks[stage] for stage in sorted(chunks))):
        found.setdefault(users[id(held.parameter)], []).append(held)
    return {stages: plan_buckets(held, bucket_size, world.group) for stages, held in found.items()}


def _reductions(
    buckets: Mapping[Stages, Sequence[Bucket]], world: World, options: OptimizerOptions
) -> dict[Stages, Reduction]:
    overlap, scatter = options.overlap_reduce, options.zero_stage > 0
    largest = max((b.size for stages, found in buckets.items() if len(stages) == 1 for b in found), default=0)
    buffers = ScatterBuffers(largest, world.device, overlap)

    def reduction(stages: Stages, found: Sequence[Bucket]) -> Reduction:
        if len(stages) > 1:
            return SharedReduction(found, scatter, overlap, len(stages))
        if options.zero_stage == 2:
            return ScatteredReduction(found, buffers)
        return WholeReduction(found, scatter, overlap)

    return {stages: reduction(stages, found) for stages, found in buckets.items()}


def _stretches(held: HeldGradients) -> Iterator[_Stretch]:
    """Those of one parameter or of a whole bucket; together they cover all that is kept of the bucket, alignment included."""
    bucket = held.bucket
    firsts = [slot.span.first for slot in bucket.plan.slots]
    for decays, kind in bucket.plan.kinds():
        alike = kind.within(bucket.kept)
        after = min((f for f in firsts if f >= held.span.last), default=alike.last)
        span = Span(held.span.first, after).within(alike)
        if len(span):
            inside = span.relative_to(bucket.kept)
            weights = span.of(bucket.weights) if bucket.master.device == bucket.weights.device else None
            part = Part(inside.of(bucket.master), decays, weights if bucket.master_is_separate else None)
            come = span.within(held.span).relative_to(held.span)
            yield _Stretch(bucket, span, part, Place.of(held.holder, come))


def _uncovered(held: HeldGradients) -> list[Place]:
    """The elements of parameters that belong to no logical tensor. They stay zero, whatever backward says."""
    found: list[Place] = []
    plan = held.bucket.plan
    for slot in plan.slots:
        part = slot.span.within(held.span)
        if not len(part) or sum(p.elements for p in slot.held.declared.pieces) == len(slot.span):
            continue
        covered = torch.zeros(len(slot.span), dtype=torch.bool)
        for _, fragment in plan.pieces(slot.span, covered, slot.span.first):
            fragment.values.fill_(True)
        local = part.relative_to(slot.span)
        begin = part.first - held.span.first
        runs = runs_of(~covered[local.first : local.last])
        found.extend(Place.of(held.holder, Span(begin + i, begin + j)) for i, j in runs)
    return found


def _kept_gradients(held: HeldGradients) -> KeptGradients:
    template, plan = held.holder.template(), held.bucket.plan
    # A parameter, or that with which the bucket begins, whichever share of it is held.
    first = next((s.held.tensor for s in plan.slots if s.span == held.span), plan.slots[0].held.tensor)
    pieces = list(plan.pieces(held.span, template, held.span.first))
    return KeptGradients(first, held.holder, template, pieces)

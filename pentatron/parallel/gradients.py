"""Storage of the gradients of one step: filled during backward, released after the update.

Gradients without replicas are kept parameter by parameter: the first one as autograd produced it, in the
model's dtype, a second one is accumulated in fp32. Gradients that are summed over replicas are cast into one
flat fp32 buffer per collective. Buffers are neither zeroed in advance nor kept between steps. As their
addresses change every step, views of gradients are described by `GradientView`s and resolved in each step.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pentatron.layout.ranks import Axis
from pentatron.parallel.buckets import Bucket, Span, merge_views
from pentatron.parallel.collectives import all_reduce_, gather_objects
from pentatron.parallel.sharding import Fragment, Shape, Shard, true_runs
from pentatron.parallel.world import World


@dataclass(eq=False)
class GradientStorage:
    """A flat tensor of `elements` gradients.

    `values` is None while no gradient has come, which counts as zeros.
    """

    elements: int
    values: Tensor | None = None

    def in_fp32(self, device: torch.device) -> Tensor:
        """Converts the gradients to fp32 in place, zeros if none have come: all ranks must reduce alike."""
        if self.values is None:
            self.values = torch.zeros(self.elements, dtype=torch.float32, device=device)
        self.values = self.values.to(torch.float32)
        return self.values

    def template(self) -> Tensor:
        """Returns a meta tensor of the same size, on which views are computed."""
        return torch.empty(self.elements, device="meta")


@dataclass(frozen=True)
class GradientView:
    """A view of the gradients of a `GradientStorage`, valid in every step."""

    storage: GradientStorage
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, storage: GradientStorage, span: Span) -> "GradientView":
        return cls(storage, (len(span),), (1,), span.first)

    @property
    def tensor(self) -> Tensor | None:
        """The view in this step; None if no gradient has come."""
        flat = self.storage.values
        # Mostly the view is the whole tensor; `as_strided` for every gradient in every step would be slow.
        if flat is None or (flat.shape == self.shape and self.offset == 0):
            return flat
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)


@dataclass(frozen=True)
class FlatGradients:
    """A flat range of gradients with its fragments as views of `template`; `name` is equal on all ranks."""

    name: str
    storage: GradientStorage
    template: Tensor
    fragments: Sequence[tuple[Shard, Fragment]]

    def runs(self, chosen: Iterable[Fragment]) -> list[GradientView]:
        """Merges disjoint fragments into few views of each step's gradients."""
        return [
            GradientView(self.storage, tuple(run.shape), run.stride(), int(run.storage_offset()))
            for run in merge_views(self.template, (fragment.values for fragment in chosen))
        ]


@dataclass(frozen=True)
class GradientSlice:
    """A contiguous part of a bucket's gradients, which begins at `span.first`."""

    bucket: Bucket
    span: Span
    storage: GradientStorage = field(repr=False)

    def flat(self, within: Span | None = None) -> FlatGradients:
        """Returns the gradients with their fragments, or only those in the span `within`."""
        template, plan = self.storage.template(), self.bucket.plan
        # The name of the parameter or, for a whole bucket, of its first one: equal on all ranks.
        slot = next((slot for slot in plan.slots if slot.span == self.span), plan.slots[0])
        span = self.span if within is None else self.span.within(within)
        fragments = list(plan.fragments(span, template, self.span.first))
        return FlatGradients(slot.param.tensor, self.storage, template, fragments)

    def padding(self) -> list[GradientView]:
        """Returns the gradients of elements outside all logical tensors, which must stay zero."""
        views: list[GradientView] = []
        for slot in self.bucket.plan.slots:
            part = slot.span.within(self.span)
            if not len(part) or sum(p.elements for p in slot.param.declared.shards) == len(slot.span):
                continue
            covered = torch.zeros(len(slot.span), dtype=torch.bool)
            for _, fragment in self.bucket.plan.fragments(slot.span, covered, slot.span.first):
                fragment.values.fill_(True)
            begin = part.first - self.span.first
            runs = true_runs(~part.relative_to(slot.span).of(covered))
            views.extend(GradientView.of(self.storage, Span(begin + i, begin + j)) for i, j in runs)
        return views


# The axes, besides the replicas, over which gradients can be partial sums.
PARTIAL_AXES: tuple[Axis, ...] = ("tensor", "kv", "embedding")


class PartialGradientReduction:
    """All-reduces gradients that are partial sums over other axes than the replicas, once a step.

    The ranks of such an axis hold the same shards at the same offsets of equal buckets, and of their ZeRO
    shares. Only the first and the last stage have their buckets in another order (a tied embedding has its
    own bucket); sorting by name makes the order the same.
    """

    def __init__(self, world: World, gradients: Iterable[FlatGradients]) -> None:
        self.world = world
        self._runs: dict[tuple[Axis, ...], list[GradientView]] = {}
        rectangles: dict[Axis, list[tuple[str, Shape, Shape]]] = {}
        for kept in sorted(gradients, key=lambda kept: kept.name):
            by_axes: dict[tuple[Axis, ...], list[Fragment]] = {}
            for shard, fragment in kept.fragments:
                axes = tuple(sorted(a for a in shard.partial_over if world.group(a).size > 1))
                if axes:
                    by_axes.setdefault(axes, []).append(fragment)
                for axis in axes:
                    rectangle = (fragment.tensor, fragment.start, tuple(fragment.values.shape))
                    rectangles.setdefault(axis, []).append(rectangle)
            for axes, partial in by_axes.items():
                self._runs.setdefault(axes, []).extend(kept.runs(partial))
        # Different rectangles must not be summed.
        for axis in PARTIAL_AXES:
            digest = hashlib.sha256(repr(rectangles.get(axis, ())).encode()).hexdigest()
            if len(set(gather_objects(digest, world.group(axis)))) > 1:
                raise RuntimeError(
                    f"the ranks of the {axis} axis hold different parts of sums: this is a bug in Pentatron"
                )

    def all_reduce(self) -> None:
        """Runs one all-reduce for every axis of every set of axes, in the same order on all ranks."""
        for axes in sorted(self._runs):
            for view in self._runs[axes]:
                view.storage.in_fp32(self.world.device)
            runs = [run for view in self._runs[axes] if (run := view.tensor) is not None]
            # A single run is reduced in place: it may be a large embedding.
            in_place = len(runs) == 1 and runs[0].is_contiguous()
            packed = runs[0] if in_place else torch.cat([run.reshape(-1) for run in runs])
            for axis in axes:
                all_reduce_(packed, self.world.group(axis))
            if not in_place:
                parts = packed.split([run.numel() for run in runs])
                torch._foreach_copy_(runs, [part.view_as(run) for part, run in zip(parts, runs)])

"""Where the gradients of one step lie: taken as backward makes them, dropped after the update.

What no other rank has a copy of is kept parameter by parameter, the first gradient as autograd hands it over, in the dtype of the
model; a second one makes an fp32 sum of the two. What is summed over copies needs one flat fp32 buffer for each collective: every
gradient is cast into its place there. Neither is zeroed before, and neither is there between steps. As nothing lies where it
lay in the step before, views of gradients are kept as `Place`s, which find them anew.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pentatron.layout.ranks import Axis
from pentatron.ops.dispatch import by_kernel
from pentatron.parallel.buckets import Bucket, Span, in_few_runs
from pentatron.parallel.collectives import all_reduce_, gather_objects
from pentatron.parallel.shards import Fragment, Piece, Shape
from pentatron.parallel.world import World


def added(before: Tensor | None, gradient: Tensor) -> Tensor:
    """A sum, in fp32 from the second gradient on; the first one is taken over and may be changed in place."""
    if before is None:
        return gradient
    if before.dtype == torch.float32:
        return before.add_(gradient)
    if by_kernel(before) and gradient.dtype == before.dtype and gradient.is_contiguous():
        from pentatron.ops.triton_update import exact_sum

        return exact_sum(before, gradient)
    return before.to(torch.float32).add_(gradient)


@dataclass(eq=False)
class Holder:
    """Gradients of `elements` that lie one after the other; `values` is one-dimensional. None: none has come, which
    counts as zeros."""

    elements: int
    values: Tensor | None = None

    def in_fp32(self, device: torch.device) -> Tensor:
        """The gradients as they are to be summed over ranks, zeros included; they stay like this."""
        if self.values is None:
            self.values = torch.zeros(self.elements, dtype=torch.float32, device=device)
        self.values = self.values.to(torch.float32)
        return self.values

    def template(self) -> Tensor:
        """A tensor without memory, to find out about views."""
        return torch.empty(self.elements, device="meta")

    def places(self, views: Iterable[Tensor], template: Tensor) -> "list[Place]":
        """Disjoint views of the template in few runs, to be found in the gradients of any step."""
        return [
            Place(self, tuple(run.shape), run.stride(), int(run.storage_offset()))
            for run in in_few_runs(template, views)
        ]


@dataclass(frozen=True)
class Place:
    """A view of what a holder has in this step."""

    holder: Holder
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, holder: Holder, span: Span) -> "Place":
        return cls(holder, (len(span),), (1,), span.first)

    @property
    def now(self) -> Tensor | None:
        flat = self.holder.values
        # All of it, as it is, in most cases: a view of every gradient in every step would be felt.
        if flat is None or (flat.shape == self.shape and self.offset == 0):
            return flat
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)


@dataclass(frozen=True)
class HeldGradients:
    """One stretch of a bucket's gradients, from `span.first` on."""

    bucket: Bucket
    span: Span
    holder: Holder = field(repr=False)


class AsTheyCome:
    """The gradients of a bucket without copies, each in a memory of its own.

    Autograd may hand over views of one memory for two parameters (the gradients of a sum, say). Whose memory was `taken` in this step, by a bucket
    that shares the set, is copied."""

    def __init__(self, bucket: Bucket, taken: set[int]) -> None:
        self._taken = taken
        self.stretches = [
            HeldGradients(bucket, slot.span, Holder(len(slot.span))) for slot in bucket.plan.slots
        ]

    def take(self, slot: int, gradient: Tensor) -> None:
        holder = self.stretches[slot].holder
        # Autograd keeps the layout of the parameter, which is contiguous.
        flat = gradient if gradient.dim() == 1 else gradient.view(-1)
        if holder.values is None:
            memory = flat.untyped_storage().data_ptr()
            if memory in self._taken:
                flat = flat.clone()
            self._taken.add(memory)
        holder.values = added(holder.values, flat)

    def drop(self) -> None:
        self._taken.clear()
        for stretch in self.stretches:
            stretch.holder.values = None

    def memory(self) -> Iterator[Tensor]:
        return (s.holder.values for s in self.stretches if s.holder.values is not None)


class Filling:
    """A flat fp32 buffer that the gradients of a bucket are cast into; what is in it before does not matter."""

    def __init__(self, bucket: Bucket, buffer: Tensor) -> None:
        self.bucket = bucket
        self.buffer = buffer
        self._came: set[int] = set()

    def take(self, slot: int, gradient: Tensor) -> None:
        place = self.bucket.plan.slots[slot].span.of(self.buffer).view(gradient.shape)
        if slot in self._came:
            place.add_(gradient)
        else:
            place.copy_(gradient)
            self._came.add(slot)

    def complete(self) -> None:
        """Zeros where no gradient came, and between parameters."""
        zeros = [span.of(self.buffer) for span in self._left() if len(span)]
        if zeros:
            torch._foreach_zero_(zeros)

    def _left(self) -> Iterator[Span]:
        end = 0
        for number, slot in enumerate(self.bucket.plan.slots):
            if number in self._came:
                yield Span(end, slot.span.first)
                end = slot.span.last
        yield Span(end, self.bucket.size)


# Gradients that are parts of a sum over other axes than the replicas: added up once a step.


# The axes, besides the replicas, that gradients can be partial over.
SUMMED_OVER: tuple[Axis, ...] = ("tensor", "kv", "embedding")


@dataclass(frozen=True)
class KeptGradients:
    """Gradients one after the other, and the pieces among them, as views of a `template`; `name` orders them alike on all ranks."""

    name: str
    holder: Holder
    template: Tensor
    pieces: Sequence[tuple[Piece, Fragment]]

    def runs(self, chosen: Iterable[Fragment]) -> list[Place]:
        return self.holder.places([fragment.values for fragment in chosen], self.template)


class PartialSums:
    """Which stretches of the kept gradients are parts of a sum, and over which axes.

    The ranks of such an axis hold the same pieces at the same places of equal buckets, and thus of their shares. Only
    the buckets of the first and the last stage come in another order (a tied parameter is alone in its
    bucket); going through them by name makes the two agree.
    """

    def __init__(self, world: World, gradients: Iterable[KeptGradients]) -> None:
        self.world = world
        self._runs: dict[tuple[Axis, ...], list[Place]] = {}
        places: dict[Axis, list[tuple[str, Shape, Shape]]] = {}
        for kept in sorted(gradients, key=lambda kept: kept.name):
            found: dict[tuple[Axis, ...], list[Fragment]] = {}
            for piece, fragment in kept.pieces:
                axes = tuple(sorted(a for a in piece.partial_over if world.group(a).size > 1))
                if axes:
                    found.setdefault(axes, []).append(fragment)
                for axis in axes:
                    place = (fragment.tensor, fragment.start, tuple(fragment.values.shape))
                    places.setdefault(axis, []).append(place)
            for axes, chosen in found.items():
                self._runs.setdefault(axes, []).extend(kept.runs(chosen))
        self._require_equal(places)

    def _require_equal(self, places: Mapping[Axis, Sequence[Any]]) -> None:
        """Sums go by place, so ranks that disagree about what lies where would add up what does not belong together,
        without any sign of it."""
        for axis in SUMMED_OVER:
            digest = hashlib.sha256(repr(places.get(axis, ())).encode()).hexdigest()
            if len(set(gather_objects(digest, self.world.group(axis)))) > 1:
                raise RuntimeError(
                    f"the ranks of the {axis} axis hold different parts of sums: this is a bug of ours"
                )

    def add_up(self) -> None:
        """One collective for every axis of every set of axes, in an order that all ranks share."""
        for axes in sorted(self._runs):
            runs = [self._exact(place) for place in self._runs[axes]]
            packed = _packed(runs)
            for axis in axes:
                all_reduce_(packed, self.world.group(axis))
            if packed is not runs[0]:
                parts = packed.split([run.numel() for run in runs])
                torch._foreach_copy_(runs, [part.view_as(run) for part, run in zip(parts, runs)])

    def _exact(self, place: Place) -> Tensor:
        """Sums are made in fp32, and all ranks take part, also those to which no gradient came."""
        place.holder.in_fp32(self.world.device)
        exact = place.now
        assert exact is not None
        return exact


def _packed(runs: list[Tensor]) -> Tensor:
    """All runs in one tensor; the run itself where there is one, which may be a large embedding."""
    if len(runs) == 1 and runs[0].is_contiguous():
        return runs[0]
    return torch.cat([run.reshape(-1) for run in runs])

"""Gradients that are parts of a sum over other axes than the replicas: added up once a step."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pentatron.layout.ranks import Axis
from pentatron.parallel.collectives import all_reduce_, gather_objects
from pentatron.parallel.gradients import Holder, Place
from pentatron.parallel.pieces import Fragment, Piece, Shape
from pentatron.parallel.world import World

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

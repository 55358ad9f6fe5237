"""Where the gradients of one step lie: taken as backward makes them, dropped after the update.

What no other rank has a copy of is kept parameter by parameter, the first gradient as autograd hands it over, in the dtype of the
model; a second one makes an fp32 sum of the two. What is summed over copies needs one flat fp32 buffer for each collective: every
gradient is cast into its place there. Neither is zeroed before, and neither is there between steps. As nothing lies where it
lay in the step before, views of gradients are kept as `Place`s, which find them anew.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pentatron.kernels.choice import by_kernel
from pentatron.parallel.buckets import Bucket, Span, in_few_runs


def added(before: Tensor | None, gradient: Tensor) -> Tensor:
    """A sum, in fp32 from the second gradient on; the first one is taken over and may be changed in place."""
    if before is None:
        return gradient
    if before.dtype == torch.float32:
        return before.add_(gradient)
    if by_kernel(before) and gradient.dtype == before.dtype and gradient.is_contiguous():
        from pentatron.kernels.squares_triton import exact_sum

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

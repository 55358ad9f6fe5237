"""Gradients of one stage: collected in fp32 as backward makes them, and summed over the ranks with copies of them.

`WholeReduction` keeps all of them and reduces once a step (ZeRO 0 and 1), `ScatteredReduction` keeps this rank's share
and reduces in every backward pass (ZeRO 2). What two stages of a rank share, a tied embedding, is kept in whole and reduced once
under every ZeRO stage (`SharedReduction`). All reduce the buckets strictly in their order: a bucket
that is complete early waits for those before it. The ranks of a stage run the same schedule over the same buckets, so all of them
start the same collectives in the same order, even where a parameter gets no gradient on some of them.

Where a backward comes in halves, the input half brings gradients ahead of those of its weight half; a bucket is complete
when the weight half has brought the rest.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pentatron.layout.actions import Kind
from pentatron.parallel.buckets import Bucket, Span
from pentatron.parallel.collectives import (
    Pending,
    start_all_reduce_,
    start_reduce_scatter_into,
)


class Reduction(ABC):
    """`kept` holds, bucket by bucket, the gradients this rank keeps; they are reduced after `finish`."""

    kept: list[Tensor]

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        # Buckets before this one are reduced already, in this step or, where that is the rule, in this pass.
        self._next = 0
        # Where buckets are reduced as they fill: the parameters of each whose gradient has not come in this pass.
        self._missing: list[set[int]] | None = None
        # Whether an input half runs, and which parameters of each bucket get their gradient from one.
        self._ahead = False
        self._came_ahead: list[set[int]] = [set() for _ in buckets]
        for number, bucket in enumerate(buckets):
            for slot in bucket.plan.slots:
                slot.held.parameter.register_post_accumulate_grad_hook(self._collector(number, slot.span))

    def _collector(self, number: int, span: Span) -> Callable[[Tensor], None]:
        """Adds each new gradient of a parameter to its place in an fp32 buffer and drops it."""

        def collect(parameter: Tensor) -> None:
            if parameter.grad is None:
                assert self._ahead, "a gradient that is none"
                # Left for the weight half; autograd tells of it all the same.
                return
            if self._ahead:
                self._came_ahead[number].add(span.first)
                place = self._buffer_ahead(number, span)
            else:
                assert number >= self._next, "a gradient came after its bucket was reduced"
                place = span.of(self._buffer(number))
            place.view(parameter.shape).add_(parameter.grad)
            parameter.grad = None
            if self._missing is not None:
                self._missing[number].discard(span.first)
                while self._next < len(self.buckets) and not self._missing[self._next]:
                    self._reduce_next()

        return collect

    def _reduce_next(self) -> None:
        self._start(self._next)
        self._next += 1

    def _reduce_rest(self) -> None:
        while self._next < len(self.buckets):
            self._reduce_next()

    def _reduce_as_filled(self, kind: Kind) -> None:
        self._missing = [
            {slot.span.first for slot in bucket.plan.slots} - (ahead if kind is Kind.WEIGHT else set())
            for bucket, ahead in zip(self.buckets, self._came_ahead)
        ]

    def _stop_reducing_as_filled(self) -> None:
        """Parameters that got no gradient on this rank count as zeros."""
        if self._missing is not None:
            self._missing = None
            self._reduce_rest()

    @abstractmethod
    def _buffer(self, number: int) -> Tensor:
        """Where the fp32 gradients of a bucket lie, from the first element on, to be added to."""

    @abstractmethod
    def _buffer_ahead(self, number: int, span: Span) -> Tensor:
        """Where a gradient of an input half is to be added."""

    @abstractmethod
    def _start(self, number: int) -> None:
        """Starts to sum a bucket over its copies."""

    @abstractmethod
    def zero(self) -> None:
        """A new step begins."""

    def begin_backward(self, last: bool, kind: Kind = Kind.BACKWARD) -> None:
        self._ahead = kind is Kind.INPUT
        if not self._ahead:
            self._begin(last, kind)

    @abstractmethod
    def _begin(self, last: bool, kind: Kind) -> None:
        """A pass that completes gradients begins."""

    def end_backward(self) -> None:
        self._ahead = False
        self._stop_reducing_as_filled()

    @abstractmethod
    def reduce(self) -> None:
        """All backward passes of the step are done."""

    @abstractmethod
    def finish(self) -> None:
        """Waits until everything is reduced."""

    @abstractmethod
    def memory(self) -> list[Tensor]:
        """All gradient buffers, for counting."""


class WholeReduction(Reduction):
    """Full fp32 gradients, reduced once a step: all-reduced, or scattered so that each rank has its share.

    With `overlap` that happens during the last backward pass, else after it.
    """

    def __init__(self, buckets: Sequence[Bucket], scatter: bool, overlap: bool) -> None:
        super().__init__(buckets)
        self.scatter = scatter
        self.overlap = overlap
        self._whole = [
            torch.zeros(bucket.size, dtype=torch.float32, device=bucket.weights.device) for bucket in buckets
        ]
        self.kept = [bucket.kept.of(whole) for bucket, whole in zip(buckets, self._whole)]
        self._pending: list[Pending] = []

    def _buffer(self, number: int) -> Tensor:
        return self._whole[number]

    def _start(self, number: int) -> None:
        whole, copies = self._whole[number], self.buckets[number].copies
        if self.scatter:
            pending = start_reduce_scatter_into(self.kept[number], whole, copies)
        else:
            pending = start_all_reduce_(whole, copies)
        if pending is not None:
            self._pending.append(pending)

    def zero(self) -> None:
        self._next = 0
        for whole in self._whole:
            whole.zero_()

    def _buffer_ahead(self, number: int, span: Span) -> Tensor:
        return span.of(self._whole[number])

    def _begin(self, last: bool, kind: Kind) -> None:
        if last and self.overlap:
            self._reduce_as_filled(kind)

    def reduce(self) -> None:
        self._reduce_rest()
        if not self.overlap:
            self._wait()

    def finish(self) -> None:
        assert self._next == len(self.buckets), "the stage was never reduced"
        self._wait()

    def _wait(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._pending.clear()

    def memory(self) -> list[Tensor]:
        return self._whole


class SharedReduction(WholeReduction):
    """Parameters that several stages of a rank use: reduced when the last of these stages is done, and once."""

    def __init__(self, buckets: Sequence[Bucket], scatter: bool, overlap: bool, stages: int) -> None:
        super().__init__(buckets, scatter, overlap)
        self.stages = stages
        self._stages_left = stages

    def _begin(self, last: bool, kind: Kind) -> None:
        """The last pass of one stage need not be that of the others: nothing is reduced before they are done."""

    def zero(self) -> None:
        super().zero()
        self._stages_left = self.stages

    def reduce(self) -> None:
        self._stages_left -= 1
        if self._stages_left == 0:
            super().reduce()


@dataclass(frozen=True)
class _Scattering:
    """A reduce-scatter under way; `part` is this rank's place in `buffer`, `share` where it is to be added."""

    buffer: Tensor
    part: Tensor
    share: Tensor
    pending: Pending | None


class ScatterBuffers:
    """The few buffers in which buckets of gradients live between their first gradient and their reduction.

    Shared by the stages of a rank. With `overlap` one reduction runs while the next bucket fills.
    """

    def __init__(self, elements: int, device: torch.device, overlap: bool) -> None:
        self.elements = elements
        self.device = device
        self.overlap = overlap
        self.made: list[Tensor] = []
        self._free: list[Tensor] = []
        self._running: _Scattering | None = None

    def take(self, bucket: Bucket) -> Tensor:
        """A buffer that begins with as many zeros as the bucket has elements."""
        if not self._free:
            self.made.append(torch.empty(self.elements, dtype=torch.float32, device=self.device))
            self._free.append(self.made[-1])
        buffer = self._free.pop()
        buffer[: bucket.size].zero_()
        return buffer

    def scatter(self, buffer: Tensor, bucket: Bucket, share: Tensor) -> None:
        """Sums a bucket's gradients over its copies, adds this rank's part of the sum to `share`, frees the buffer."""
        self.finish()
        part = bucket.own.of(buffer)
        pending = start_reduce_scatter_into(part, buffer[: bucket.size], bucket.copies)
        self._running = _Scattering(buffer, part, share, pending)
        if not self.overlap:
            self.finish()

    def finish(self) -> None:
        if self._running is not None:
            done, self._running = self._running, None
            if done.pending is not None:
                done.pending.wait()
            done.share.add_(done.part)
            self._free.append(done.buffer)


class ScatteredReduction(Reduction):
    """Only this rank's share of the gradients lives through the step; every backward pass adds to it.

    Gradients of an input half are kept in whole, added up, until the next pass that completes gradients takes them along:
    one fp32 copy of the biases, norms and tables of the stage.
    """

    def __init__(self, buckets: Sequence[Bucket], buffers: ScatterBuffers) -> None:
        super().__init__(buckets)
        self.buffers = buffers
        self.kept = [
            torch.zeros(len(bucket.kept), dtype=torch.float32, device=bucket.weights.device)
            for bucket in buckets
        ]
        self._filling: dict[int, Tensor] = {}
        self._kept_ahead: list[dict[Span, Tensor]] = [{} for _ in buckets]

    def _buffer(self, number: int) -> Tensor:
        assert self._missing is not None, "a gradient came outside begin_backward and end_backward"
        if number not in self._filling:
            self._filling[number] = self.buffers.take(self.buckets[number])
        return self._filling[number]

    def _start(self, number: int) -> None:
        bucket = self.buckets[number]
        buffer = self._filling.pop(number, None)
        if buffer is None:
            buffer = self.buffers.take(bucket)
        for span, values in self._kept_ahead[number].items():
            span.of(buffer).add_(values)
        self._kept_ahead[number].clear()
        self.buffers.scatter(buffer, bucket, self.kept[number])

    def zero(self) -> None:
        for share in self.kept:
            share.zero_()

    def _buffer_ahead(self, number: int, span: Span) -> Tensor:
        kept = self._kept_ahead[number]
        if span not in kept:
            kept[span] = torch.zeros(len(span), dtype=torch.float32, device=self.buffers.device)
        return kept[span]

    def _begin(self, last: bool, kind: Kind) -> None:
        self._next = 0
        self._reduce_as_filled(kind)

    def reduce(self) -> None:
        assert not self._filling, "a backward pass was not ended"
        assert not any(self._kept_ahead), "the second half of a backward is missing"

    def finish(self) -> None:
        self.buffers.finish()

    def memory(self) -> list[Tensor]:
        ahead = [values for kept in self._kept_ahead for values in kept.values()]
        return [*self.kept, *self.buffers.made, *ahead]

"""Gradients of one stage: collected as backward makes them, and summed in fp32 over the ranks with copies of them.

`WholeReduction` keeps all of them and reduces once a step (ZeRO 0 and 1), `ScatteredReduction` keeps this rank's share
and reduces in every backward pass (ZeRO 2). What two stages of a rank share, a tied embedding, is kept in whole and reduced once
under every ZeRO stage (`SharedReduction`). Buckets without copies elsewhere are the same under all of them: their gradients
stay where they are (`AsTheyCome`). All reduce the buckets strictly in their order: a bucket
that is complete early waits for those before it. The ranks of a stage run the same schedule over the same buckets, so all of them
start the same collectives in the same order, even where a parameter gets no gradient on some of them.

Where a backward comes in halves, the input half brings gradients ahead of those of its weight half; a bucket is complete
when the weight half has brought the rest. Memory is taken when a gradient comes, and given back by `drop`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pentatron.layout.actions import Kind
from pentatron.parallel.buckets import Bucket
from pentatron.parallel.collectives import (
    Pending,
    start_all_reduce_,
    start_reduce_scatter_into,
)
from pentatron.parallel.gradients import AsTheyCome, Filling, HeldGradients, Holder, added


class Reduction(ABC):
    """`held` are, bucket by bucket, the gradients this rank keeps; they are reduced after `finish`."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        taken: set[int] = set()
        self._alone = {n: AsTheyCome(b, taken) for n, b in enumerate(buckets) if b.copies.size == 1}
        # Of the other buckets: what this rank keeps of the sums.
        self._sums = {n: Holder(len(b.kept)) for n, b in enumerate(buckets) if n not in self._alone}
        # Buckets before this one are reduced already, in this step or, where that is the rule, in this pass.
        self._next = 0
        # Where buckets are reduced as they fill: the parameters of each whose gradient has not come in this pass.
        self._missing: list[set[int]] | None = None
        # Whether an input half runs, and which parameters of each bucket get their gradient from one.
        self._ahead = False
        self._came_ahead: list[set[int]] = [set() for _ in buckets]
        for number, bucket in enumerate(buckets):
            for slot, found in enumerate(bucket.plan.slots):
                found.held.parameter.register_post_accumulate_grad_hook(self._collector(number, slot))

    @property
    def held(self) -> Iterator[HeldGradients]:
        for number, bucket in enumerate(self.buckets):
            if number in self._alone:
                yield from self._alone[number].stretches
            else:
                yield HeldGradients(bucket, bucket.kept, self._sums[number])

    def _collector(self, number: int, slot: int) -> Callable[[Tensor], None]:
        """Takes each new gradient of a parameter over: from then on it is nobody else's."""

        def collect(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                assert self._ahead, "a gradient that is none"
                # Left for the weight half; autograd tells of it all the same.
                return
            if self._ahead:
                self._came_ahead[number].add(slot)
            else:
                assert number >= self._next, "a gradient came after its bucket was reduced"
            if number in self._alone:
                self._alone[number].take(slot, gradient)
            elif self._ahead:
                self._take_ahead(number, slot, gradient)
            else:
                self._take(number, slot, gradient)
            if self._missing is not None:
                self._missing[number].discard(slot)
                while self._next < len(self.buckets) and not self._missing[self._next]:
                    self._reduce_next()

        return collect

    def _reduce_next(self) -> None:
        if self._next not in self._alone:
            self._start(self._next)
        self._next += 1

    def _reduce_rest(self) -> None:
        while self._next < len(self.buckets):
            self._reduce_next()

    def _reduce_as_filled(self, kind: Kind) -> None:
        self._missing = [
            set(range(len(bucket.plan.slots))) - (ahead if kind is Kind.WEIGHT else set())
            for bucket, ahead in zip(self.buckets, self._came_ahead)
        ]

    def _stop_reducing_as_filled(self) -> None:
        """Parameters that got no gradient on this rank count as zeros."""
        if self._missing is not None:
            self._missing = None
            self._reduce_rest()

    @abstractmethod
    def _take(self, number: int, slot: int, gradient: Tensor) -> None:
        """Adds a gradient to those of a bucket that has copies."""

    @abstractmethod
    def _take_ahead(self, number: int, slot: int, gradient: Tensor) -> None:
        """The same with one of an input half."""

    @abstractmethod
    def _start(self, number: int) -> None:
        """Starts to sum a bucket over its copies."""

    def drop(self) -> None:
        """Nobody needs the gradients any more, or a new step begins: their memory is free. Nothing is left of a step that failed."""
        self._next, self._missing, self._ahead = 0, None, False
        for bucket in self._alone.values():
            bucket.drop()
        for holder in self._sums.values():
            holder.values = None

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

    def memory(self) -> list[Tensor]:
        """All that gradients lie in at the moment, for counting."""
        sums = [holder.values for holder in self._sums.values() if holder.values is not None]
        return [*sums, *(t for bucket in self._alone.values() for t in bucket.memory())]


class WholeReduction(Reduction):
    """Full gradients, reduced once a step: all-reduced, or scattered so that each rank has its share.

    With `overlap` that happens during the last backward pass, else after it.
    """

    def __init__(self, buckets: Sequence[Bucket], scatter: bool, overlap: bool) -> None:
        super().__init__(buckets)
        self.scatter = scatter
        self.overlap = overlap
        self._whole: dict[int, Filling] = {}
        self._pending: list[Pending] = []

    def _filling(self, number: int) -> Filling:
        if number not in self._whole:
            bucket = self.buckets[number]
            buffer = torch.empty(bucket.size, dtype=torch.float32, device=bucket.weights.device)
            self._whole[number] = Filling(bucket, buffer)
        return self._whole[number]

    def _take(self, number: int, slot: int, gradient: Tensor) -> None:
        self._filling(number).take(slot, gradient)

    _take_ahead = _take

    def _start(self, number: int) -> None:
        bucket, filling = self.buckets[number], self._filling(number)
        filling.complete()
        kept = self._sums[number].values = bucket.kept.of(filling.buffer)
        if self.scatter:
            pending = start_reduce_scatter_into(kept, filling.buffer, bucket.copies)
        else:
            pending = start_all_reduce_(filling.buffer, bucket.copies)
        if pending is not None:
            self._pending.append(pending)

    def drop(self) -> None:
        super().drop()
        self._wait()
        self._whole.clear()

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
        return [*super().memory(), *(filling.buffer for filling in self._whole.values())]


class SharedReduction(WholeReduction):
    """Parameters that several stages of a rank use: reduced when the last of these stages is done, and once."""

    def __init__(self, buckets: Sequence[Bucket], scatter: bool, overlap: bool, stages: int) -> None:
        super().__init__(buckets, scatter, overlap)
        self.stages = stages
        self._stages_left = stages

    def _begin(self, last: bool, kind: Kind) -> None:
        """The last pass of one stage need not be that of the others: nothing is reduced before they are done."""

    def drop(self) -> None:
        super().drop()
        self._stages_left = self.stages

    def reduce(self) -> None:
        self._stages_left -= 1
        if self._stages_left == 0:
            super().reduce()


@dataclass(frozen=True)
class _Scattering:
    """A reduce-scatter under way; `part` is where this rank's part of the sum will be, to be added to what `share` has."""

    buffer: Tensor
    part: Tensor
    share: Holder
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
        """A buffer with room for the bucket."""
        if not self._free:
            self.made.append(torch.empty(self.elements, dtype=torch.float32, device=self.device))
            self._free.append(self.made[-1])
        return self._free.pop()

    def scatter(self, buffer: Tensor, bucket: Bucket, share: Holder) -> None:
        """Sums a bucket's gradients over its copies, adds this rank's part of the sum to `share`, frees the buffer."""
        self.finish()
        part = bucket.own.of(buffer)
        if share.values is None:
            part = torch.empty_like(part)
        pending = start_reduce_scatter_into(part, buffer[: bucket.size], bucket.copies)
        self._running = _Scattering(buffer, part, share, pending)
        if not self.overlap:
            self.finish()

    def finish(self) -> None:
        if self._running is not None:
            done, self._running = self._running, None
            if done.pending is not None:
                done.pending.wait()
            if done.share.values is None:
                done.share.values = done.part
            else:
                done.share.values.add_(done.part)
            self._free.append(done.buffer)

    def drop(self) -> None:
        """Gives the memory back between steps."""
        self.finish()
        self.made.clear()
        self._free.clear()


class ScatteredReduction(Reduction):
    """Only this rank's share of the gradients lives through the step; every backward pass adds to it.

    Gradients of an input half are kept in whole, added up, until the next pass that completes gradients takes them along:
    a copy of the biases, norms and tables of the stage.
    """

    def __init__(self, buckets: Sequence[Bucket], buffers: ScatterBuffers) -> None:
        super().__init__(buckets)
        self.buffers = buffers
        self._filling: dict[int, Filling] = {}
        self._kept_ahead: list[dict[int, Tensor]] = [{} for _ in buckets]

    def _take(self, number: int, slot: int, gradient: Tensor) -> None:
        assert self._missing is not None, "a gradient came outside begin_backward and end_backward"
        self._open(number).take(slot, gradient)

    def _open(self, number: int) -> Filling:
        if number not in self._filling:
            bucket = self.buckets[number]
            self._filling[number] = Filling(bucket, self.buffers.take(bucket))
        return self._filling[number]

    def _start(self, number: int) -> None:
        bucket, filling = self.buckets[number], self._open(number)
        for slot, values in self._kept_ahead[number].items():
            filling.take(slot, values)
        filling.complete()
        del self._filling[number]
        self._kept_ahead[number].clear()
        self.buffers.scatter(filling.buffer, bucket, self._sums[number])

    def _take_ahead(self, number: int, slot: int, gradient: Tensor) -> None:
        kept = self._kept_ahead[number]
        kept[slot] = added(kept.get(slot), gradient)

    def drop(self) -> None:
        self.buffers.drop()
        super().drop()
        self._filling.clear()
        for kept in self._kept_ahead:
            kept.clear()

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
        return [*super().memory(), *self.buffers.made, *ahead]

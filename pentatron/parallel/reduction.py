"""Gradient reduction of one stage: collects gradients during backward and sums them in fp32 over the
replicas.

`FullReduction` keeps full gradients and reduces them once a step (ZeRO 0 and 1). `ShardedReduction` keeps
this rank's shard and reduces in every backward pass (ZeRO 2). Under every ZeRO stage, parameters that several
stages of a rank share, such as a tied embedding, have a `FullReduction`. Buckets without replicas are not
reduced: their gradients stay as autograd produced them.

Buckets are reduced strictly in order: a bucket that is complete early waits for those before it. The ranks of
a stage run the same schedule over the same buckets, so all of them start the same collectives in the same
order, even if a parameter gets no gradient on some of them.

If the schedule splits backwards, the input half produces some gradients ahead of the weight half; a bucket is
complete after the weight half. Memory is allocated when a gradient arrives and released by `drop`.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from pentatron.layout.actions import Kind
from pentatron.ops.dispatch import uses_triton
from pentatron.parallel.buckets import Bucket, Span
from pentatron.parallel.collectives import Pending, start_all_reduce_, start_reduce_scatter_into
from pentatron.parallel.gradients import GradientSlice, GradientStorage


def accumulate(before: Tensor | None, gradient: Tensor) -> Tensor:
    """Accumulates a gradient, in fp32 from the second one on. May reuse the memory of `before`."""
    if before is None:
        return gradient
    if before.dtype == torch.float32:
        return before.add_(gradient)
    if uses_triton(before) and gradient.dtype == before.dtype and gradient.is_contiguous():
        from pentatron.ops.triton_update import sum_in_fp32

        return sum_in_fp32(before, gradient)
    return before.to(torch.float32).add_(gradient)


class BucketBuffer:
    """A flat fp32 buffer that collects the gradients of a bucket. It need not be initialized."""

    def __init__(self, bucket: Bucket, buffer: Tensor) -> None:
        self.bucket = bucket
        self.buffer = buffer
        self._filled: set[int] = set()

    def take(self, slot: int, gradient: Tensor) -> None:
        place = self.bucket.plan.slots[slot].span.of(self.buffer).view(gradient.shape)
        if slot in self._filled:
            place.add_(gradient)
        else:
            place.copy_(gradient)
            self._filled.add(slot)

    def complete(self) -> None:
        """Zeros the padding and the parameters without a gradient."""
        end = 0
        gaps: list[Span] = []
        for number, slot in enumerate(self.bucket.plan.slots):
            if number in self._filled:
                gaps.append(Span(end, slot.span.first))
                end = slot.span.last
        gaps.append(Span(end, self.bucket.size))
        unfilled = [span.of(self.buffer) for span in gaps if len(span)]
        if unfilled:
            torch._foreach_zero_(unfilled)


class Reduction(ABC):
    """Collects the gradients of some buckets.

    `slices` are those this rank keeps; they are reduced after `finish`.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        # For each bucket the gradients this rank keeps: without replicas those of each parameter, as autograd
        # produced them, otherwise its part of the sums.
        self._slices: list[list[GradientSlice]] = []
        # The addresses of gradients without replicas.
        self._storages: set[int] = set()
        # Flat fp32 buffers that collect the gradients of a bucket before its reduction.
        self._buffers: dict[int, BucketBuffer] = {}
        # The next bucket to reduce in this step (ZeRO 2: in this backward).
        self._next = 0
        # While buckets are reduced as they fill: their slots without a gradient in this backward.
        self._missing: list[set[int]] | None = None
        # Whether an input half runs, and which slots of each bucket get their gradient in an input half.
        self._in_input_half = False
        self._from_input_half: list[set[int]] = [set() for _ in buckets]
        for number, bucket in enumerate(buckets):
            spans = [bucket.kept] if bucket.replica_group.size > 1 else [s.span for s in bucket.plan.slots]
            self._slices.append([GradientSlice(bucket, s, GradientStorage(len(s))) for s in spans])
            for slot, entry in enumerate(bucket.plan.slots):
                collect = partial(self._collect, number, slot)
                entry.param.parameter.register_post_accumulate_grad_hook(collect)

    @property
    def slices(self) -> Iterator[GradientSlice]:
        return itertools.chain.from_iterable(self._slices)

    def _collect(self, number: int, slot: int, parameter: Tensor) -> None:
        """Moves each new gradient of a parameter from `.grad` into this object; called by autograd."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            assert self._in_input_half, "autograd produced no gradient"
            # Deferred to the weight half; autograd calls the hook nevertheless.
            return
        if self._in_input_half:
            self._from_input_half[number].add(slot)
        else:
            assert number >= self._next, "a gradient came after its bucket was reduced"
        if self.buckets[number].replica_group.size == 1:
            self._keep(self._slices[number][slot].storage, gradient)
        else:
            self._take(number, slot, gradient)
        if self._missing is not None:
            self._missing[number].discard(slot)
            self._reduce_complete()

    def _keep(self, storage: GradientStorage, gradient: Tensor) -> None:
        """Adds a gradient without replicas.

        Autograd may produce views of one storage for two parameters (the gradients of a sum, say), but
        gradients are changed in place, so the second one is copied.
        """
        # Autograd keeps the layout of the parameter, which is contiguous.
        flat = gradient if gradient.dim() == 1 else gradient.view(-1)
        if storage.values is None:
            memory = flat.untyped_storage().data_ptr()
            if memory in self._storages:
                flat = flat.clone()
            self._storages.add(memory)
        storage.values = accumulate(storage.values, flat)

    def _buffer(self, number: int) -> BucketBuffer:
        if number not in self._buffers:
            bucket = self.buckets[number]
            self._buffers[number] = BucketBuffer(bucket, self._allocate(bucket))
        return self._buffers[number]

    def _reduce_complete(self) -> None:
        """Starts the reduction of the next buckets until one lacks gradients; of all that are left unless
        buckets are reduced as they fill.
        """
        while self._next < len(self.buckets) and not (self._missing and self._missing[self._next]):
            if self.buckets[self._next].replica_group.size > 1:
                self._start(self._next)
            self._next += 1

    @abstractmethod
    def _allocate(self, bucket: Bucket) -> Tensor:
        """Returns an uninitialized fp32 buffer for the gradients of a bucket."""

    def _take(self, number: int, slot: int, gradient: Tensor) -> None:
        """Adds a gradient to the buffer of a bucket that has replicas."""
        self._buffer(number).take(slot, gradient)

    @abstractmethod
    def _start(self, number: int) -> None:
        """Starts the reduction of a bucket over its replicas."""

    def drop(self) -> None:
        """Releases the gradients after the update or before a new step, also those of a step that failed."""
        self._next, self._missing, self._in_input_half = 0, None, False
        self._storages.clear()
        for kept in self.slices:
            kept.storage.values = None

    def begin_backward(self, last: bool, kind: Kind = Kind.BACKWARD) -> None:
        self._in_input_half = kind is Kind.INPUT
        if not self._in_input_half and self._reduces_during(last):
            self._next = 0
            self._missing = [
                set(range(len(bucket.plan.slots))) - (early if kind is Kind.WEIGHT else set())
                for bucket, early in zip(self.buckets, self._from_input_half)
            ]

    @abstractmethod
    def _reduces_during(self, last: bool) -> bool:
        """Whether each bucket is reduced as soon as all of its gradients have come in a backward.

        That is a whole backward or a weight half, which completes a micro-batch's gradients.
        """

    def end_backward(self) -> None:
        self._in_input_half = False
        if self._missing is not None:
            # Parameters that got no gradient on this rank count as zeros.
            self._missing = None
            self._reduce_complete()

    @abstractmethod
    def reduce(self) -> None:
        """Called after all backward passes of the step."""

    @abstractmethod
    def finish(self) -> None:
        """Waits for all reductions."""

    def memory(self) -> list[Tensor]:
        """Returns all tensors that currently hold gradients, for memory reports."""
        return [kept.storage.values for kept in self.slices if kept.storage.values is not None]


class FullReduction(Reduction):
    """Full gradients, reduced once a step by all-reduce, or by reduce-scatter if `scatter`.

    With `overlap` the reduction overlaps the last backward pass, otherwise it follows it. Gradients of
    parameters that several `stages` of a rank share are reduced after the last stage, without overlap: the
    last backward of one stage need not be the last of all stages.
    """

    def __init__(self, buckets: Sequence[Bucket], scatter: bool, overlap: bool, stages: int = 1) -> None:
        super().__init__(buckets)
        self.scatter, self.overlap, self.stages = scatter, overlap, stages
        self._stages_left = stages
        self._pending: list[Pending] = []

    def _allocate(self, bucket: Bucket) -> Tensor:
        return torch.empty(bucket.size, dtype=torch.float32, device=bucket.weights.device)

    def _start(self, number: int) -> None:
        bucket, filling = self.buckets[number], self._buffer(number)
        filling.complete()
        kept = self._slices[number][0].storage.values = bucket.kept.of(filling.buffer)
        if self.scatter:
            self._pending.append(start_reduce_scatter_into(kept, filling.buffer, bucket.replica_group))
        else:
            self._pending.append(start_all_reduce_(filling.buffer, bucket.replica_group))

    def drop(self) -> None:
        super().drop()
        # Collectives of a step that failed may still write to the buffers.
        self._wait()
        self._buffers.clear()
        self._stages_left = self.stages

    def _reduces_during(self, last: bool) -> bool:
        return last and self.overlap and self.stages == 1

    def reduce(self) -> None:
        self._stages_left -= 1
        if self._stages_left == 0:
            self._reduce_complete()
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
        return [*super().memory(), *(filling.buffer for filling in self._buffers.values())]


class ScatterBuffers:
    """Pool of buffers for buckets of gradients between their first gradient and their reduction.

    Shared by the stages of a rank. With `overlap` one reduction runs while the next bucket fills.
    """

    def __init__(self, elements: int, device: torch.device, overlap: bool) -> None:
        self.elements = elements
        self.device = device
        self.overlap = overlap
        self.made: list[Tensor] = []
        self._free: list[Tensor] = []
        # The running reduce-scatter, its buffer, and the gradients to which its result is added.
        self._running: tuple[Pending, Tensor, GradientStorage] | None = None

    def take(self) -> Tensor:
        """Returns a free buffer, which has room for any bucket, or allocates one."""
        if not self._free:
            self.made.append(torch.empty(self.elements, dtype=torch.float32, device=self.device))
            self._free.append(self.made[-1])
        return self._free.pop()

    def scatter(self, buffer: Tensor, bucket: Bucket, share: GradientStorage) -> None:
        """Reduce-scatters a bucket's gradients, adds this rank's part to `share`, and frees the buffer."""
        self.finish()
        part = bucket.own.of(buffer)
        if share.values is None:
            # `share` keeps this tensor, so it must not be a view of the buffer, which is reused.
            part = torch.empty_like(part)
        pending = start_reduce_scatter_into(part, buffer[: bucket.size], bucket.replica_group)
        self._running = pending, buffer, share
        if not self.overlap:
            self.finish()

    def finish(self) -> None:
        """Waits for the running reduction and accumulates its result."""
        if self._running is not None:
            (pending, buffer, share), self._running = self._running, None
            part = pending.wait()
            share.values = part if share.values is None else share.values.add_(part)
            self._free.append(buffer)

    def drop(self) -> None:
        """Releases the buffers between steps."""
        self.finish()
        self.made.clear()
        self._free.clear()


class ShardedReduction(Reduction):
    """Keeps only this rank's shard of the gradients through the step; every backward pass adds to it.

    Gradients from an input half are kept in full and accumulated until the next weight half or whole
    backward: one copy of the biases, norms and embeddings of the stage.
    """

    def __init__(self, buckets: Sequence[Bucket], buffers: ScatterBuffers) -> None:
        super().__init__(buckets)
        self.buffers = buffers
        self._input_half_gradients: list[dict[int, Tensor]] = [{} for _ in buckets]

    def _allocate(self, bucket: Bucket) -> Tensor:
        return self.buffers.take()

    def _take(self, number: int, slot: int, gradient: Tensor) -> None:
        if self._in_input_half:
            gradients = self._input_half_gradients[number]
            gradients[slot] = accumulate(gradients.get(slot), gradient)
        else:
            assert self._missing is not None, "a gradient came outside begin_backward and end_backward"
            super()._take(number, slot, gradient)

    def _start(self, number: int) -> None:
        bucket, filling = self.buckets[number], self._buffer(number)
        for slot, gradient in self._input_half_gradients[number].items():
            filling.take(slot, gradient)
        filling.complete()
        del self._buffers[number]
        self._input_half_gradients[number].clear()
        self.buffers.scatter(filling.buffer, bucket, self._slices[number][0].storage)

    def drop(self) -> None:
        self.buffers.drop()
        super().drop()
        self._buffers.clear()
        for gradients in self._input_half_gradients:
            gradients.clear()

    def _reduces_during(self, last: bool) -> bool:
        return True

    def reduce(self) -> None:
        assert not self._buffers, "a backward pass was not ended"
        assert not any(self._input_half_gradients), "the second half of a backward is missing"

    def finish(self) -> None:
        self.buffers.finish()

    def memory(self) -> list[Tensor]:
        early = [tensor for gradients in self._input_half_gradients for tensor in gradients.values()]
        return [*super().memory(), *self.buffers.made, *early]


def build_reductions(
    buckets: Mapping[tuple[int, ...], Sequence[Bucket]], device: torch.device, zero_stage: int, overlap: bool
) -> dict[tuple[int, ...], Reduction]:
    """Returns the reductions of buckets, by the stages that use them."""
    largest = max((b.size for stages, own in buckets.items() if len(stages) == 1 for b in own), default=0)
    buffers = ScatterBuffers(largest, device, overlap)

    return {
        stages: ShardedReduction(own, buffers)
        if zero_stage == 2 and len(stages) == 1
        else FullReduction(own, zero_stage > 0, overlap, len(stages))
        for stages, own in buckets.items()
    }

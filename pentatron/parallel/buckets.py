"""Buckets: flat buffers that hold the weights of several parameters, which become views of them.

A bucket is the unit of a collective, and the ranks with replicas of it cut it into equal shards if they
partition optimizer state or gradients (ZeRO). Parameters with replicas on other ranks (experts) have their
own buckets. Parameters are packed from the last to the first, roughly the order in which backward computes
their gradients, so that early buckets are complete while backward still runs. Within a bucket the parameters
with weight decay come first, so any shard of it consists of at most two ranges for the optimizer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pentatron.layout.packing import ALIGNMENT, Item, align_up, pack
from pentatron.layout.ranks import Axis
from pentatron.parallel.collectives import Group, Pending, start_all_gather_into
from pentatron.parallel.sharding import Fragment, Shard, ShardedParameter, fragments_of

# The most rows of strided views to examine for merging; more would slow down the construction of a model.
_MOST_SPANS = 1 << 14


@dataclass(frozen=True)
class Span:
    """The elements [first, last) of a flat tensor."""

    first: int
    last: int

    def within(self, other: "Span") -> "Span":
        """Returns the intersection with another span; an empty one has `first == last`."""
        first = max(self.first, other.first)
        return Span(first, max(first, min(self.last, other.last)))

    def relative_to(self, other: "Span") -> "Span":
        return Span(self.first - other.first, self.last - other.first)

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.first : self.last]

    def __len__(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class BucketSlot:
    """A parameter and its span in a bucket."""

    param: ShardedParameter
    span: Span


@dataclass(frozen=True)
class Plan:
    """Layout of a bucket of `size` elements: parameters with weight decay up to `decayed`, then the others.

    `replica_group` are the ranks with replicas of the bucket.
    """

    slots: tuple[BucketSlot, ...]
    decayed: int
    size: int
    replica_group: Group

    def own_share(self) -> Span:
        """Returns this rank's equal share of the bucket."""
        length = self.size // self.replica_group.size
        return Span(self.replica_group.rank * length, (self.replica_group.rank + 1) * length)

    def fragments(self, within: Span, values: Tensor, begin: int) -> Iterator[tuple[Shard, Fragment]]:
        """Yields the shards in `within` as views of `values`, which start at element `begin`."""
        for slot in self.slots:
            part = slot.span.within(within)
            if len(part):
                local = part.relative_to(slot.span)
                flat = values[part.first - begin : part.last - begin]
                yield from fragments_of(slot.param, flat, local.first, local.last)


def plan_buckets(
    params: Sequence[ShardedParameter], limit: int, group_of: Callable[[Axis], Group]
) -> list[Plan]:
    """Packs parameters, given in model order, into buckets of at most `limit` elements.

    A larger parameter gets its own bucket. So does one that the first and the last stage share: its
    neighbours differ between the two stages, but both must cut it into the same shards to sum its gradients.
    `group_of` returns the group of an axis. Buckets are in the order in which they were opened.
    """
    items = []
    for p in params:
        is_tied = any("embedding" in shard.partial_over for shard in p.declared.shards)
        items.append(Item(p.parameter.numel(), p.declared.replica_axis, alone=is_tied))
    return [_plan([params[i] for i in b.items], group_of(b.replica_axis)) for b in pack(items, limit)]


def _plan(params: Sequence[ShardedParameter], replica_group: Group) -> Plan:
    slots: list[BucketSlot] = []
    end = decayed = 0
    for param in sorted(params, key=lambda p: not p.decays):
        slots.append(BucketSlot(param, Span(end, end + param.parameter.numel())))
        end = align_up(slots[-1].span.last)
        if param.decays:
            decayed = end
    return Plan(tuple(slots), decayed, align_up(end, ALIGNMENT * replica_group.size), replica_group)


class Bucket:
    """Moves the parameters of a plan into the flat buffer `weights`, of which they become views.

    `own` is this rank's shard, `kept` the span this rank updates: its shard if `sharded`, else everything.
    `master` holds the fp32 master weights of `kept`; fp32 weights are their own master unless it is in host
    memory.
    """

    def __init__(self, plan: Plan, dtype: torch.dtype, sharded: bool, on_host: bool = False) -> None:
        self.plan, self.size, self.replica_group = plan, plan.size, plan.replica_group
        self.master_is_separate = on_host or dtype != torch.float32
        self.own = plan.own_share()
        self.kept = self.own if sharded else Span(0, plan.size)
        values = torch.zeros(plan.size, dtype=torch.float32, device=plan.slots[0].param.parameter.device)
        for slot in plan.slots:
            slot.span.of(values).copy_(slot.param.parameter.detach().flatten())
        self.weights, self.master = values.to(dtype), self.kept.of(values)
        if on_host:
            self.master = self.master.to("cpu", copy=True)
        elif sharded and self.master_is_separate:
            # A copy of the share, not a view: a view would keep the whole fp32 buffer alive.
            self.master = self.master.clone()
        for slot in plan.slots:
            slot.param.parameter.data = slot.span.of(self.weights).view(slot.param.parameter.shape)


def merge_views(flat: Tensor, views: Iterable[Tensor]) -> list[Tensor]:
    """Merges disjoint views of a flat tensor that are separated by nothing but alignment padding.

    Padding is always zero, so it does not change sums of squares or sums over ranks. Strided views that
    together are contiguous, such as the two halves of every expert's matrix, are merged too; others are
    returned as they are.
    """
    origin, views = int(flat.storage_offset()), list(views)
    strided = [view for view in views if not view.is_contiguous()]
    contiguous = (view for view in views if view.is_contiguous())
    merged = _merged((span for view in contiguous for span in _contiguous_spans(view, origin)), ALIGNMENT)
    rows = sum(view.shape[:-1].numel() for view in strided)
    if rows <= _MOST_SPANS and all(view.stride(-1) == 1 for view in strided):
        # Between the rows of a strided view there may be other parameters, so nothing may be skipped.
        merged_rows = _merged((span for view in strided for span in _contiguous_spans(view, origin)), 1)
        if len(merged_rows) <= len(strided):
            merged, strided = _merged([*merged, *merged_rows], 1), []
    return [*(span.of(flat) for span in merged), *strided]


def _contiguous_spans(view: Tensor, origin: int) -> Iterator[Span]:
    """Yields the contiguous spans of a view, relative to `origin`."""
    if view.is_contiguous():
        first = int(view.storage_offset()) - origin
        yield Span(first, first + view.numel())
    else:
        for part in view:
            yield from _contiguous_spans(part, origin)


def _merged(spans: Iterable[Span], alignment: int) -> list[Span]:
    """Sorts spans and merges those where the next one begins at the end of the previous one, aligned up."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: span.first):
        if merged and span.first <= align_up(merged[-1].last, alignment):
            merged[-1] = Span(merged[-1].first, span.last)
        else:
            merged.append(span)
    return merged


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the size of the storages of some tensors, each counted once."""
    memories = (t.untyped_storage() for t in tensors)
    return sum({memory.data_ptr(): memory.nbytes() for memory in memories}.values())


class WeightGather:
    """All-gathers the updated weights over their replicas, bucket by bucket in the order of forward.

    With `overlap` the first modules compute while the last buckets are still being gathered: a forward
    pre-hook waits for the module's own parameters. Code that reads weights before their module has run must
    call `wait`.
    """

    def __init__(self, buckets: Sequence[Bucket], models: Iterable[nn.Module], overlap: bool) -> None:
        self.buckets = buckets
        self.overlap = overlap
        self._pending: dict[int, Pending] = {}
        if overlap and any(bucket.replica_group.size > 1 for bucket in buckets):
            bucket_of = {id(s.param.parameter): n for n, b in enumerate(buckets) for s in b.plan.slots}
            for path, module, parameters in (row for model in models for row in _parameters_run_by(model)):
                numbers = {bucket_of[id(p)] for p in parameters if id(p) in bucket_of}
                if numbers:
                    assert type(module).forward is not nn.Module.forward, (
                        f"{path} has no forward, so it cannot wait for its weights"
                    )
                    module.register_forward_pre_hook(partial(self._wait, sorted(numbers)))

    def start(self) -> None:
        """Starts to gather all buckets; waits for them unless `overlap`."""
        for number, bucket in enumerate(self.buckets):
            own = bucket.own.of(bucket.weights)
            self._pending[number] = start_all_gather_into(bucket.weights, own, bucket.replica_group)
        if not self.overlap:
            self.wait()

    def wait(self) -> None:
        """Waits until all weights are gathered."""
        self._wait(list(self._pending))

    def _wait(self, numbers: Iterable[int], *arguments_of_the_hook: Any) -> None:
        for number in numbers:
            if number in self._pending:
                self._pending.pop(number).wait()


def _parameters_run_by(
    module: nn.Module, path: str = ""
) -> Iterator[tuple[str, nn.Module, list[nn.Parameter]]]:
    """Yields each module with the parameters it must wait for: its own.

    A module with `runs_whole` (a compiled one, say) does not run the hooks of its children, so it waits for
    theirs too.
    """
    whole = getattr(module, "runs_whole", False)
    yield path, module, list(module.parameters(recurse=whole))
    if not whole:
        for name, child in module.named_children():
            yield from _parameters_run_by(child, f"{path}.{name}" if path else name)

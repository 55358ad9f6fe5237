"""Parameters as flat buffers: a bucket holds the weights of some parameters, which become views of it.

A bucket is what one collective moves, and what the ranks with copies of it cut into equal shares when they divide optimizer
state or gradients between them. Parameters whose copies are on other ranks (experts) have buckets of their own. Parameters
are packed from the last to the first, about the order in which backward finishes them, so that early buckets are
complete while backward still runs. Within a bucket the decayed parameters come first: any share of it is then at most
two stretches for the optimizer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pentatron.layout.packing import ALIGNMENT, Item, aligned, packed
from pentatron.layout.ranks import Axis
from pentatron.parallel.collectives import Group, Pending, start_all_gather_into
from pentatron.parallel.shards import Fragment, Held, Piece, fragments_of

# Of views that are looked at in parts to see whether they are one together; more would be felt when a model is made.
_MOST_STRETCHES = 1 << 14


@dataclass(frozen=True)
class Span:
    """The elements [first, last) of a bucket."""

    first: int
    last: int

    def within(self, other: "Span") -> "Span":
        """The part of this span that lies in the other; empty spans start where they end."""
        first = max(self.first, other.first)
        return Span(first, max(first, min(self.last, other.last)))

    def relative_to(self, other: "Span") -> "Span":
        return Span(self.first - other.first, self.last - other.first)

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.first : self.last]

    def __len__(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in a bucket."""

    held: Held
    span: Span


@dataclass(frozen=True)
class Plan:
    """What lies where in a bucket of `size` elements: decayed parameters up to `decayed`, then the others.

    `copies` are the ranks that have the same bucket.
    """

    slots: tuple[Slot, ...]
    decayed: int
    size: int
    copies: Group

    def kinds(self) -> tuple[tuple[bool, Span], tuple[bool, Span]]:
        """The decayed and the undecayed stretch; either may be empty."""
        return (True, Span(0, self.decayed)), (False, Span(self.decayed, self.size))

    def own_share(self) -> Span:
        """This rank's of the equal shares of the bucket."""
        length = self.size // self.copies.size
        return Span(self.copies.rank * length, (self.copies.rank + 1) * length)

    def pieces(self, within: Span, values: Tensor, begin: int) -> Iterator[tuple[Piece, Fragment]]:
        """The pieces that lie in `within`, as views of `values`, whose first element is element `begin` here."""
        for slot in self.slots:
            part = slot.span.within(within)
            if len(part):
                local = part.relative_to(slot.span)
                flat = values[part.first - begin : part.last - begin]
                yield from fragments_of(slot.held, flat, local.first, local.last)


def plan_buckets(held: Sequence[Held], limit: int, group_of: Callable[[Axis], Group]) -> list[Plan]:
    """Packs parameters, given in the order of the model, into buckets of at most `limit` elements.

    A larger parameter gets a bucket of its own. So does one that the first and the last stage share: what surrounds
    it differs between the two, and yet both must cut it into the same shares to add up its gradients. `group_of` gives
    the ranks of an axis. Buckets come in the order in which they are opened.
    """
    items = [Item(h.parameter.numel(), h.declared.copies, _ends_share(h)) for h in held]
    return [
        _plan([held[i] for i in bucket.items], group_of(bucket.copies)) for bucket in packed(items, limit)
    ]


def _ends_share(held: Held) -> bool:
    return any("embedding" in piece.partial_over for piece in held.declared.pieces)


def _plan(group: Sequence[Held], copies: Group) -> Plan:
    slots: list[Slot] = []
    end = decayed = 0
    for held in sorted(group, key=lambda h: not h.decays):
        slots.append(Slot(held, Span(end, end + held.parameter.numel())))
        end = aligned(slots[-1].span.last)
        if held.decays:
            decayed = end
    return Plan(tuple(slots), decayed, aligned(end, ALIGNMENT * copies.size), copies)


class Bucket:
    """Takes the parameters of a plan over: their values move into `weights`, of which they become views.

    `own` is this rank's share among those with copies, `kept` what this rank updates: its share where `sharded`, else
    everything. `master` holds the fp32 values of what is kept; weights in fp32 are their own master, unless it is to be in
    host memory.
    """

    def __init__(self, plan: Plan, dtype: torch.dtype, sharded: bool, on_host: bool = False) -> None:
        self.plan = plan
        self.master_is_separate = on_host or dtype != torch.float32
        self.own = plan.own_share()
        self.kept = self.own if sharded else Span(0, plan.size)
        exact = torch.zeros(plan.size, dtype=torch.float32, device=plan.slots[0].held.parameter.device)
        for slot in plan.slots:
            slot.span.of(exact).copy_(slot.held.parameter.detach().flatten())
        if on_host:
            self.weights, self.master = exact.to(dtype), self.kept.of(exact).to("cpu", copy=True)
        elif dtype == torch.float32:
            self.weights, self.master = exact, self.kept.of(exact)
        else:
            # A copy of the share, not a view: a view would keep the whole fp32 buffer alive.
            self.weights, self.master = exact.to(dtype), self.kept.of(exact).clone() if sharded else exact
        for slot in plan.slots:
            slot.held.parameter.data = slot.span.of(self.weights).view(slot.held.parameter.shape)

    @property
    def size(self) -> int:
        return self.plan.size

    @property
    def copies(self) -> Group:
        return self.plan.copies


def in_few_runs(flat: Tensor, views: Iterable[Tensor]) -> list[Tensor]:
    """Disjoint views of a flat tensor, joined where nothing but alignment lies between them.

    Alignment is always zero, so sums over such runs, of squares or over ranks, are those over the views. Views that only together leave nothing out,
    such as the two halves of every expert's matrix, are joined too; else they stay as they are.
    """
    origin = int(flat.storage_offset())
    spans: list[Span] = []
    strided: list[Tensor] = []
    for view in views:
        if view.is_contiguous():
            spans.extend(_stretches(view, origin))
        else:
            strided.append(view)
    found = _joined(spans, aligned)
    rows = sum(view.shape[:-1].numel() for view in strided)
    if rows <= _MOST_STRETCHES and all(view.stride(-1) == 1 for view in strided):
        # Beside rows of a view there may be anything but alignment.
        together = _joined((span for view in strided for span in _stretches(view, origin)), _exactly)
        if len(together) <= len(strided):
            found, strided = _joined([*found, *together], _exactly), []
    return [*(span.of(flat) for span in found), *strided]


def _stretches(view: Tensor, origin: int) -> Iterator[Span]:
    """Elements of a view that lie one after the other, by their distance from `origin`."""
    if view.is_contiguous():
        first = int(view.storage_offset()) - origin
        yield Span(first, first + view.numel())
    else:
        for part in view:
            yield from _stretches(part, origin)


def _exactly(last: int) -> int:
    return last


def _joined(spans: Iterable[Span], reaches: Callable[[int], int]) -> list[Span]:
    """In the order of their elements. `reaches`: where the next one may begin, from where one ends."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: span.first):
        begins = found.pop().first if found and span.first <= reaches(found[-1].last) else span.first
        found.append(Span(begins, span.last))
    return found


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """The memory behind some tensors, counted once where they share it."""
    memories = (t.untyped_storage() for t in tensors)
    return sum({memory.data_ptr(): memory.nbytes() for memory in memories}.values())


# Weights that every rank updated in part are made whole again.


class WeightGathering:
    """Gathers the shares of the weights over their copies, bucket by bucket in the order given: that of forward.

    With `overlap` the first modules compute while the last buckets still travel: before a module runs, a hook waits for
    the parameters it holds itself. Whoever reads weights before their module has run calls `wait`.
    """

    def __init__(self, buckets: Sequence[Bucket], models: Iterable[nn.Module], overlap: bool) -> None:
        self.buckets = buckets
        self.overlap = overlap
        self._pending: dict[int, Pending] = {}
        if overlap and any(bucket.copies.size > 1 for bucket in buckets):
            for model in models:
                self._hook(model)

    def _hook(self, model: nn.Module) -> None:
        bucket_of = {
            id(slot.held.parameter): number
            for number, bucket in enumerate(self.buckets)
            for slot in bucket.plan.slots
        }
        for path, module, parameters in _runs(model):
            numbers = {bucket_of[id(p)] for p in parameters if id(p) in bucket_of}
            if numbers:
                assert type(module).forward is not nn.Module.forward, (
                    f"{path} is never run, so it cannot wait"
                )
                module.register_forward_pre_hook(self._waiter(sorted(numbers)))

    def _waiter(self, numbers: Sequence[int]) -> Callable[[nn.Module, Any], None]:
        def wait(module: nn.Module, arguments: Any) -> None:
            for number in numbers:
                self._wait_for(number)

        return wait

    def start(self) -> None:
        for number, bucket in enumerate(self.buckets):
            pending = start_all_gather_into(bucket.weights, bucket.own.of(bucket.weights), bucket.copies)
            if pending is not None:
                self._pending[number] = pending
        if not self.overlap:
            self.wait()

    def wait(self) -> None:
        for number in list(self._pending):
            self._wait_for(number)

    def _wait_for(self, number: int) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            pending.wait()


def _runs(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module, list[nn.Parameter]]]:
    """Modules with the parameters they hold themselves. What runs as a whole (compiled, say) runs no hooks inside: it waits for all it has."""
    whole = getattr(module, "runs_whole", False)
    yield path, module, list(module.parameters(recurse=whole))
    if not whole:
        for name, child in module.named_children():
            yield from _runs(child, f"{path}.{name}" if path else name)

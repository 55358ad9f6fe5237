"""Weights that every rank updated in part are made whole again."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from pentatron.parallel.buckets import Bucket
from pentatron.parallel.collectives import Pending, start_all_gather_into


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

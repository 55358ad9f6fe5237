"""Planted bugs in layers with experts; part of `BUGS` of `bugs.py`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import pentatron.nn.experts as experts_module
import pentatron.nn.moe as dispatch_module
from pentatron.models.router_load import RouterLoads
from pentatron.nn.moe import SharedGate
from pentatron.nn.router import Router, RouterLoad
from pentatron.optim.optimizer import Optimizer
from pentatron.parallel.axes import ExpertAxis
from pentatron.parallel.collectives import all_reduce_
from pentatron.parallel.gradients import GradientView
from pentatron.parallel.reduction import FullReduction
from pentatron.parallel.sharding import Shard, ShardedModule, ShardingSpec


def forget_partial(chosen: Callable[[Any, str], bool]) -> None:
    """Makes the layers that `chosen` selects declare partial gradients as complete."""
    declare = ShardedModule.declare

    def forgetful(self: Any, name: str, shape: tuple[int, ...], declared: ShardingSpec) -> Any:
        if chosen(self, name):
            shards = tuple(
                type(p)(p.start, p.local, p.size, p.replicated_over, frozenset()) for p in declared.shards
            )
            declared = dataclasses.replace(declared, shards=shards)
        return declare(self, name, shape, declared)

    ShardedModule.declare = forgetful  # type: ignore[method-assign]


def token_combined_with_the_wrong_weight() -> None:
    weighted = dispatch_module._weighted

    def rolled(made: Tensor, weights: Tensor) -> Tensor:
        return weighted(made, weights.roll(1, dims=1))

    dispatch_module._weighted = rolled


def tokens_returned_in_the_order_of_experts() -> None:
    """Outputs of experts are not scattered back to the places of their tokens."""
    put_back = dispatch_module._scatter_rows

    def as_it_came(rows: Tensor, order: Tensor, count: int) -> Tensor:
        return put_back(rows, order.sort().values, count)

    dispatch_module._scatter_rows = as_it_came


def balance_judged_by_local_counts() -> None:
    ExpertAxis.sum_over_micro_batch = lambda self, x: x.clone()  # type: ignore[method-assign]


def balance_averaged_over_own_micro_batches() -> None:
    """Each data-parallel rank averages over its own micro-batches, and the averages are summed."""

    def own(self: RouterLoads, micro_batches: int, scale: float = 1.0) -> None:
        for load in self.local.values():
            load.begin_step(micro_batches, scale)

    RouterLoads.begin_step = own  # type: ignore[method-assign]


def expert_gradients_divided_by_the_wrong_number() -> None:
    """Gradients summed over expert replicas are scaled by the ratio of expert to dense replicas."""
    finish = FullReduction.finish

    def divided(self: FullReduction) -> None:
        finish(self)
        most = max(bucket.replica_group.size for bucket in self.buckets)
        for kept in self.slices:
            if kept.storage.values is not None:
                kept.storage.values.mul_(kept.bucket.replica_group.size / most)

    FullReduction.finish = divided  # type: ignore[method-assign]


def expert_gradients_summed_with_dense_ones() -> None:
    """Expert gradients are summed over all data-parallel ranks, some of which hold other experts."""
    finish = FullReduction.finish

    def with_all(self: FullReduction) -> None:
        finish(self)
        of_dense = max((bucket.replica_group for bucket in self.buckets), key=lambda group: group.size)
        for kept in self.slices:
            if kept.bucket.replica_group.size < of_dense.size:
                all_reduce_(kept.storage.in_fp32(kept.bucket.weights.device), of_dense)

    FullReduction.finish = with_all  # type: ignore[method-assign]


def expert_norm_counted_on_the_first_tensor_rank() -> None:
    """The norm leaves out experts of later tensor ranks, as if they were copies."""
    counted = Optimizer._norm_views

    def fewer(self: Optimizer) -> list[GradientView]:
        everything = self._slices
        if self.world.tensor.rank > 0:
            self._slices = [
                kept
                for kept in everything
                if kept.bucket.plan.slots[0].param.declared.replica_axis != "expert_data"
            ]
        found = counted(self)
        self._slices = everything
        return found

    Optimizer._norm_views = fewer  # type: ignore[method-assign]


def shared_gate_gradient_not_summed() -> None:
    forget_partial(lambda layer, name: isinstance(layer, SharedGate))


def router_gradients_not_summed() -> None:
    forget_partial(lambda layer, name: isinstance(layer, Router))


def bias_moved_by_local_counts() -> None:
    finish_step = RouterLoad.finish_step

    def local(self: RouterLoad, numbers: Tensor) -> None:
        finish_step(self, self.tally())

    RouterLoad.finish_step = local  # type: ignore[method-assign]


def expert_gate_and_up_cut_as_one() -> None:
    """A rank that has a part of an expert takes consecutive rows of [gate; up]."""
    build = experts_module.ExpertLinear.__init__

    def contiguous(self: Any, shape: Any, local: Any, shards: tuple[Shard, ...], *others: Any) -> None:
        if len(shards) == 2 and shape[1] > local[1]:
            first = shards[0]
            part = first.start[1] // first.size[1]
            start = (first.start[0], part * local[1], 0)
            shards = (Shard(start, (0, 0, 0), (first.size[0], local[1], local[2])),)
        build(self, shape, local, shards, *others)

    experts_module.ExpertLinear.__init__ = contiguous  # type: ignore[method-assign]


def capacity_by_local_tokens() -> None:
    """Every rank drops tokens as if its own were the whole micro-batch."""
    of_micro_batch = ExpertAxis.gather_micro_batch

    def own(self: ExpertAxis, x: Tensor) -> Tensor:
        found = of_micro_batch(self, x)
        if x.dim() > 1:
            found.unflatten(0, (self.sequence.size, -1))[
                torch.arange(self.sequence.size) != self.sequence.rank
            ] = 0
        return found

    ExpertAxis.gather_micro_batch = own  # type: ignore[method-assign]


# Each bug with a family and a layout on which it acts.
MIXTURE_BUGS: dict[str, tuple[Callable[[], None], str, str]] = {
    "a token combined with the wrong weight": (token_combined_with_the_wrong_weight, "mixtral", "ep2"),
    "tokens returned in the order of experts": (
        tokens_returned_in_the_order_of_experts,
        "mixtral",
        "ep2 gather",
    ),
    "balance judged by local counts": (balance_judged_by_local_counts, "mixtral", "cp2 p2p ep2"),
    "balance averaged over own micro-batches": (balance_averaged_over_own_micro_batches, "qwen3-moe", "dp2"),
    "expert gradients divided by dp, not edp": (
        expert_gradients_divided_by_the_wrong_number,
        "mixtral",
        "tp2 dp2 ep2",
    ),
    "expert gradients summed with dense ones": (expert_gradients_summed_with_dense_ones, "mixtral", "ep2"),
    "expert norm counted on the first tensor rank": (
        expert_norm_counted_on_the_first_tensor_rank,
        "qwen3-moe",
        "tp2 ep2 whole",
    ),
    "shared-expert gate not summed": (shared_gate_gradient_not_summed, "qwen2-moe", "tp2"),
    "router gradients not summed": (router_gradients_not_summed, "mixtral", "tp2"),
    "expert bias moved by local counts": (bias_moved_by_local_counts, "sigmoid", "ep2"),
    "gate and up of an expert cut as one": (expert_gate_and_up_cut_as_one, "mixtral", "dp2 etp2"),
    "capacity by local tokens": (capacity_by_local_tokens, "mixtral", "tp2 cp2 ep2 capacity gather"),
}

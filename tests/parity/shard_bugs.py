"""Planted bugs in ZeRO 3; part of `BUGS` of `bugs.py`."""

from collections.abc import Callable

import pentatron.optim.sharded as sharded_module
from pentatron.parallel.collectives import Pending
from pentatron.parallel.gradients import PartialGradientReduction
from pentatron.parallel.zero3 import FSDPModule, ShardedStage


def sharded_gradients_averaged() -> None:
    """FSDP averages gradients, which is torch's default."""
    FSDPModule.set_gradient_divide_factor = lambda self, factor: None  # type: ignore[method-assign]


def partial_sums_skipped_on_shards() -> None:
    PartialGradientReduction.all_reduce = lambda self: None  # type: ignore[method-assign]


def groups_of_replicas_not_summed() -> None:
    sharded_module.start_all_reduce_ = Pending


def gathered_weights_outlive_the_update() -> None:
    """Weights that a stage keeps gathered through a step are not gathered again after the update."""

    def keep(self: ShardedStage, last: bool) -> None:
        self.units[-1].set_reshard_after_backward(False, recurse=False)

    ShardedStage.begin_backward = keep  # type: ignore[method-assign]
    ShardedStage.reshard = lambda self: None  # type: ignore[method-assign]


# Each bug with a family and a layout on which it acts.
SHARD_BUGS: dict[str, tuple[Callable[[], None], str, str]] = {
    "sharded gradients averaged": (sharded_gradients_averaged, "llama", "dp2 zero3"),
    "partial sums skipped on shards": (partial_sums_skipped_on_shards, "llama", "tp2 sp dp2 zero3"),
    "tied shards not summed": (partial_sums_skipped_on_shards, "qwen2.5", "pp2 dp2 zero3"),
    "groups of replicas not summed": (groups_of_replicas_not_summed, "qwen3", "dp4 zero3 hybrid"),
    "gathered weights outlive the update": (gathered_weights_outlive_the_update, "llama", "dp2 zero3"),
}

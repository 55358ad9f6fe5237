"""Planted bugs in the loss scale; part of `BUGS` of `bugs.py`."""

from collections.abc import Callable
from typing import Any

from pentatron.models.router_load import RouterLoads
from pentatron.optim.optimizer import Optimizer
from pentatron.optim.sharded import ShardedOptimizer


def clipped_by_the_norm_of_scaled_gradients() -> None:
    step = Optimizer.step

    def too_early(self: Optimizer, learning_rate: float, norm: float, scale: float, *rest: Any) -> None:
        step(self, learning_rate, norm * scale, scale, *rest)

    Optimizer.step = too_early  # type: ignore[method-assign]


def shards_keep_the_scale() -> None:
    """The ZeRO 3 optimizer does not divide gradients by the loss scale."""
    step = ShardedOptimizer.step

    def undivided(
        self: ShardedOptimizer, learning_rate: float, norm: float, scale: float, *rest: Any
    ) -> None:
        step(self, learning_rate, norm, 1.0, *rest)

    ShardedOptimizer.step = undivided  # type: ignore[method-assign]


def router_losses_not_scaled() -> None:
    """Router losses, which are not part of the model's loss, are not scaled."""
    begin = RouterLoads.begin_step

    def without(self: RouterLoads, micro_batches: int, scale: float = 1.0) -> None:
        begin(self, micro_batches)

    RouterLoads.begin_step = without  # type: ignore[method-assign]


SCALE_BUGS: dict[str, tuple[Callable[[], None], str, str]] = {
    "clipped by the norm of scaled gradients": (clipped_by_the_norm_of_scaled_gradients, "llama", "dp2"),
    "shards keep the scale": (shards_keep_the_scale, "llama", "dp2 zero3"),
    "router losses not scaled": (router_losses_not_scaled, "mixtral", "ep2 gather"),
}

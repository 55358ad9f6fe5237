"""The routers of a run together: how busy their experts were in a step, over all ranks, and what follows from it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pentatron.checkpoint.load import ROUTERS
from pentatron.models.causal_lm import CausalLM
from pentatron.nn.moe import MoE
from pentatron.nn.router import RouterLoad, loss_weights
from pentatron.parallel.shards import Fragment
from pentatron.parallel.world import World
from pentatron.settings.run import RunConfig


@dataclass(frozen=True)
class ExpertLoad:
    """How busy the experts were in one step. `counts` has a row for every layer with experts, `losses` the mean of the
    layers for each loss there is, before its weight."""

    layers: tuple[int, ...]
    counts: Tensor
    losses: Mapping[str, float]

    @property
    def imbalance(self) -> float:
        """The busiest expert of any layer, in units of an equal share."""
        return float((self.counts.amax(1) / self.counts.mean(1).clamp(min=1e-9)).max())

    @property
    def idle(self) -> int:
        """Experts, over all layers, that got no token."""
        return int(self.counts.eq(0).sum())


def loads_of(stage: CausalLM) -> dict[int, RouterLoad]:
    """By the numbers of their layers."""
    return {
        int(number): layer.mlp.router.load
        for number, layer in stage.layers.items()
        if isinstance(layer.mlp, MoE)
    }


def kept_by_routers(loads: Mapping[int, RouterLoad]) -> Iterator[Fragment]:
    """What checkpoints have of routers besides their weights, under the names they give it."""
    for layer, load in loads.items():
        for name, values in load.kept().items():
            yield Fragment(f"{ROUTERS}layers.{layer}.mlp.router.{name}", tuple(values.shape), (0,), values)


class RouterLoads:
    """Those of the layers this rank holds, and what all ranks say of theirs."""

    def __init__(self, config: RunConfig, world: World, stages: Mapping[int, CausalLM]) -> None:
        self.world = world
        self.layers = config.layers_with_experts
        self.names = tuple(loss_weights(config.moe)) if self.layers else ()
        self.experts = config.moe.num_experts or 0
        self.own = {number: load for stage in stages.values() for number, load in loads_of(stage).items()}

    def begin_step(self, micro_batches: int, scale: float = 1.0) -> None:
        """`micro_batches`: those of this rank. `scale`: what the loss of the step is multiplied by before backward."""
        for load in self.own.values():
            load.begin_step(micro_batches * self.world.data.size, scale)

    def numbers(self) -> Tensor:
        """One after the other for all layers of the model; summed over all ranks, the numbers of the step."""
        rows = torch.zeros(
            len(self.layers), self.experts + len(self.names), dtype=torch.float64, device=self.world.device
        )
        for row, layer in enumerate(self.layers):
            if layer in self.own:
                rows[row] = self.own[layer].numbers()
        return rows.flatten()

    def settle(self, summed: Tensor) -> None:
        """The step is done: what later steps need of it is kept."""
        width = self.experts + len(self.names)
        for layer, numbers in zip(self.layers, summed.view(len(self.layers), width)):
            if layer in self.own:
                self.own[layer].settle(numbers)

    def report(self, summed: Tensor) -> ExpertLoad | None:
        if not self.layers:
            return None
        rows = summed.view(len(self.layers), -1).cpu()
        means = rows[:, self.experts :].mean(0).tolist()
        return ExpertLoad(self.layers, rows[:, : self.experts], dict(zip(self.names, means)))

    def fragments(self, owned_only: bool) -> Iterator[Fragment]:
        """What later steps need, to be overwritten, or this rank's part of a save."""
        if owned_only and not self.world.is_first_of(("tensor", "replicas")):
            return
        yield from kept_by_routers(self.own)

"""The load of all routers of a run: counts per expert and balancing losses, summed over all ranks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pentatron.checkpoint.load import ROUTERS
from pentatron.models.causal_lm import CausalLM
from pentatron.nn.moe import MoE
from pentatron.nn.router import RouterLoad, loss_weights
from pentatron.parallel.sharding import Fragment
from pentatron.parallel.world import World
from pentatron.settings.run_config import RunConfig


@dataclass(frozen=True)
class ExpertLoad:
    """The load of the experts in one step.

    `counts` has a row for every layer with experts; `losses` are means over the layers, before their weights.
    """

    layers: tuple[int, ...]
    counts: Tensor
    losses: Mapping[str, float]

    @property
    def imbalance(self) -> float:
        """Load of the busiest expert of any layer, relative to an equal share."""
        return float((self.counts.amax(1) / self.counts.mean(1).clamp(min=1e-9)).max())

    @property
    def idle(self) -> int:
        """Number of experts, over all layers, without any token."""
        return int(self.counts.eq(0).sum())


def loads_of(stage: CausalLM) -> dict[int, RouterLoad]:
    """Router loads of a stage by layer number."""
    layers = stage.layers.items()
    return {int(number): layer.mlp.router.load for number, layer in layers if isinstance(layer.mlp, MoE)}


def router_fragments(loads: Mapping[int, RouterLoad]) -> Iterator[Fragment]:
    """Yields the router state that checkpoints save besides weights, with its names in the checkpoint."""
    for layer, load in loads.items():
        for name, values in load.kept().items():
            yield Fragment(f"{ROUTERS}layers.{layer}.mlp.router.{name}", tuple(values.shape), (0,), values)


class RouterLoads:
    """Router loads of this rank's layers, and their reduction over all ranks."""

    def __init__(self, config: RunConfig, world: World, stages: Mapping[int, CausalLM]) -> None:
        self.world = world
        self.layers = config.layers_with_experts
        self.names = tuple(loss_weights(config.moe)) if self.layers else ()
        self.experts = config.moe.num_experts or 0
        self.size = (len(self.layers), self.experts + len(self.names))
        self.local = {number: load for stage in stages.values() for number, load in loads_of(stage).items()}

    def begin_step(self, micro_batches: int, scale: float = 1.0) -> None:
        """Starts a step.

        `micro_batches`: of this rank. `scale`: the factor of the step's loss before backward.
        """
        for load in self.local.values():
            load.begin_step(micro_batches * self.world.data.size, scale)

    def tally(self) -> Tensor:
        """This rank's counts and losses for all layers of the model, to be summed over all ranks."""
        rows = torch.zeros(self.size, dtype=torch.float64, device=self.world.device)
        for row, layer in enumerate(self.layers):
            if layer in self.local:
                rows[row] = self.local[layer].tally()
        return rows.flatten()

    def finish_step(self, summed: Tensor) -> None:
        """Finishes the step with the sums over all ranks."""
        for layer, totals in zip(self.layers, summed.view(self.size)):
            if layer in self.local:
                self.local[layer].finish_step(totals)

    def report(self, summed: Tensor) -> ExpertLoad | None:
        """Returns the load of the step; None for a model without experts."""
        if not self.layers:
            return None
        rows = summed.view(self.size).cpu()
        means = rows[:, self.experts :].mean(0).tolist()
        return ExpertLoad(self.layers, rows[:, : self.experts], dict(zip(self.names, means)))

    def fragments(self, owned_only: bool) -> Iterator[Fragment]:
        """Yields the tensors to load into, or with `owned_only` this rank's part of a save."""
        if owned_only and not self.world.is_first_of(("tensor", "replicas")):
            return
        yield from router_fragments(self.local)

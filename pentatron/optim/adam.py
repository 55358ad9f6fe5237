"""AdamW over tensors that this rank updates, wherever they come from: buckets, or shards of parameters.

It is torch's fused update without the class around it: making or stepping any `torch.optim.Optimizer` imports torch's compiler, a third
of what a process needs to start.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from pentatron.config.training import OptimConfig
from pentatron.optim.clip import clip_

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Part:
    """What Adam sees as one parameter: fp32 values, updated in place where they are, and their gradients, which may be
    on another device."""

    values: nn.Parameter
    gradients: Tensor
    decays: bool


class Adam:
    """Clipping by a norm that all ranks know, and one fused update."""

    def __init__(self, parts: Sequence[Part], config: OptimConfig) -> None:
        self.config = config
        self._parts = parts
        self._steps = {id(p): torch.zeros((), dtype=torch.float32, device=p.values.device) for p in parts}
        # Made now rather than at the first step, so that saving and loading see one layout at all times.
        self._moments = {id(p): {m: torch.zeros_like(p.values.data) for m in MOMENTS} for p in parts}

    @torch.no_grad()
    def step(self, learning_rate: float, norm: float) -> None:
        clip_([part.gradients for part in self._parts], norm, self.config.clip_grad)
        for decays in (True, False):
            parts = [part for part in self._parts if part.decays is decays]
            if parts:
                self._update(parts, learning_rate, self.config.weight_decay if decays else 0.0)

    def _update(self, parts: Sequence[Part], learning_rate: float, weight_decay: float) -> None:
        averages, squares = ([self._moments[id(part)][moment] for part in parts] for moment in MOMENTS)
        adamw(
            [part.values for part in parts],
            [part.gradients.to(part.values.device) for part in parts],
            averages,
            squares,
            [],
            [self._steps[id(part)] for part in parts],
            fused=True,
            amsgrad=False,
            beta1=self.config.adam_beta1,
            beta2=self.config.adam_beta2,
            lr=learning_rate,
            weight_decay=weight_decay,
            eps=self.config.adam_eps,
            maximize=False,
        )

    def state(self, part: Part) -> dict[str, Tensor]:
        """What a checkpoint keeps of a part, to be read or overwritten."""
        return {"weights": part.values.detach(), **self._moments[id(part)]}

    def moments(self) -> list[Tensor]:
        return [moment for part in self._parts for moment in self._moments[id(part)].values()]

    def set_updates(self, updates: int) -> None:
        """How many updates the values and moments, overwritten from elsewhere, have seen."""
        for step in self._steps.values():
            step.fill_(float(updates))

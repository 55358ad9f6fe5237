"""AdamW over tensors that this rank updates, wherever they come from: buckets, or shards of parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pentatron.config.training import OptimConfig
from pentatron.optim.clip import clip_

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Part:
    """What Adam sees as one parameter: fp32 values, updated in place, and their gradients."""

    values: nn.Parameter
    gradients: Tensor
    decays: bool


class Adam:
    """Clipping by a norm that all ranks know, and one fused update."""

    def __init__(self, parts: Sequence[Part], config: OptimConfig) -> None:
        self.config = config
        self._parts = parts
        for part in parts:
            part.values.grad = part.gradients
        groups = [
            {
                "params": [part.values for part in parts if part.decays is decays],
                "weight_decay": config.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        # A rank may keep nothing of a small model; torch wants a parameter all the same.
        kept = [group for group in groups if group["params"]] or [{"params": [nn.Parameter(torch.empty(0))]}]
        self._adam = torch.optim.AdamW(
            kept,
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )
        for part in parts:
            # Made now rather than at the first step, so that saving and loading see one layout at all times.
            self._adam.state[part.values] = {
                "step": torch.zeros((), dtype=torch.float32, device=part.values.device),
                **{moment: torch.zeros_like(part.values) for moment in MOMENTS},
            }

    def step(self, learning_rate: float, norm: float) -> None:
        clip_([part.gradients for part in self._parts], norm, self.config.clip_grad)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()

    def state(self, part: Part) -> dict[str, Tensor]:
        """What a checkpoint keeps of a part, to be read or overwritten."""
        state = self._adam.state[part.values]
        return {"weights": part.values.detach(), **{moment: state[moment] for moment in MOMENTS}}

    def moments(self) -> list[Tensor]:
        return [self._adam.state[part.values][moment] for part in self._parts for moment in MOMENTS]

    def set_updates(self, updates: int) -> None:
        """How many updates the values and moments, overwritten from elsewhere, have seen."""
        for part in self._parts:
            self._adam.state[part.values]["step"].fill_(float(updates))

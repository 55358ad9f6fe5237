"""AdamW on a GPU in one pass over memory, which the device itself can skip.

Clipping, the update and the rounding of the weights are one kernel on the gradients as backward left them.
Loss and norm need not be known on the host before the update is launched: the GPU never waits for the host.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pentatron.ops.triton_update import AdamWParameters, FusedAdamWKernel, Target
from pentatron.optim.update_rules import (
    MOMENTS,
    Gradients,
    Part,
    UpdateRule,
    clip_factor,
    clip_factor_on_device,
)
from pentatron.settings.training import OptimConfig


class FusedAdamW(UpdateRule):
    in_one_pass = True

    def __init__(self, parts: Sequence[Part], config: OptimConfig) -> None:
        super().__init__(parts, config, MOMENTS)
        self._updates = 0
        self._device = parts[0].values.device
        targets = [
            Target(part.values, kept["exp_avg"], kept["exp_avg_sq"], part.weights, part.decays)
            for part, kept in zip(parts, self._moments.values())
        ]
        self._one_pass = FusedAdamWKernel(targets)

    @torch.no_grad()
    def step(
        self, gradients: Gradients, learning_rate: float, norm: float, scale: float, decay: float
    ) -> None:
        factor = clip_factor(norm, self.config.clip_grad, scale)
        control = torch.tensor([factor, 1.0], dtype=torch.float32).to(self._device)
        self._launch(gradients, learning_rate, control, decay)
        self.settle(updated=True)

    @torch.no_grad()
    def start(
        self, gradients: Gradients, learning_rate: float, loss_and_norm: Tensor, scale: float, decay: float
    ) -> None:
        factor = clip_factor_on_device(loss_and_norm[1], self.config.clip_grad, scale)
        if len(loss_and_norm) > 2:
            factor = factor * loss_and_norm[2]
        control = torch.stack((factor, torch.isfinite(loss_and_norm).all().double())).float()
        self._launch(gradients, learning_rate, control, decay)

    def _launch(self, gradients: Gradients, learning_rate: float, control: Tensor, decay: float) -> None:
        self.before()
        betas = self.config.adam_beta1, self.config.adam_beta2
        numbers = AdamWParameters(learning_rate, decay, *betas, self.config.adam_eps, self._updates + 1)
        self._one_pass(gradients, control, numbers)

    def settle(self, updated: bool) -> None:
        self._updates += updated

    def set_updates(self, updates: int) -> None:
        self._updates = updates

"""AdamW.

It is torch's fused update without the class around it: making or stepping any `torch.optim.Optimizer` imports torch's compiler, a third
of what a process needs to start. On a GPU `one_pass.py` does the same in one pass over memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from pentatron.config.training import OptimConfig
from pentatron.optim.update import Part, Update, beside

MOMENTS = ("exp_avg", "exp_avg_sq")


class Adam(Update):
    def __init__(self, parts: Sequence[Part], config: OptimConfig) -> None:
        super().__init__(parts, config, MOMENTS)
        self._steps = {id(p): torch.zeros((), dtype=torch.float32, device=p.values.device) for p in parts}

    def _update(
        self,
        parts: Sequence[Part],
        gradients: Sequence[Tensor],
        learning_rate: float,
        weight_decay: float,
        divisor: Tensor | None,
    ) -> None:
        adamw(
            [beside(part.values, gradient) for part, gradient in zip(parts, gradients)],
            [gradient.to(part.values.device) for part, gradient in zip(parts, gradients)],
            self._of("exp_avg", parts, gradients),
            self._of("exp_avg_sq", parts, gradients),
            [],
            [self._steps[id(part)] for part in parts],
            fused=True,
            grad_scale=divisor,
            amsgrad=False,
            beta1=self.config.adam_beta1,
            beta2=self.config.adam_beta2,
            lr=learning_rate,
            weight_decay=weight_decay,
            eps=self.config.adam_eps,
            maximize=False,
        )

    def set_updates(self, updates: int) -> None:
        for step in self._steps.values():
            step.fill_(float(updates))

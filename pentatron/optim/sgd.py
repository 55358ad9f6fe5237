"""Stochastic gradient descent with momentum, torch's as AdamW is in `adam.py`.

As in torch and Megatron, weight decay is a part of the gradient here, and is remembered with it.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.optim.sgd import sgd

from pentatron.config.training import OptimConfig
from pentatron.optim.update import Part, Update, beside

_MOMENTUM = "momentum_buffer"


class Sgd(Update):
    def __init__(self, parts: Sequence[Part], config: OptimConfig) -> None:
        super().__init__(parts, config, (_MOMENTUM,) if config.sgd_momentum else ())

    def _update(
        self,
        parts: Sequence[Part],
        gradients: Sequence[Tensor],
        learning_rate: float,
        weight_decay: float,
        divisor: Tensor | None,
    ) -> None:
        momentum = self.config.sgd_momentum
        remembered: list[Tensor | None] = [None] * len(parts)
        sgd(
            [beside(part.values, gradient) for part, gradient in zip(parts, gradients)],
            [gradient.to(part.values.device) for part, gradient in zip(parts, gradients)],
            [*self._of(_MOMENTUM, parts, gradients)] if momentum else remembered,
            fused=True,
            grad_scale=divisor,
            weight_decay=weight_decay,
            momentum=momentum,
            lr=learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )

    def set_updates(self, updates: int) -> None:
        """Every update is like the first."""

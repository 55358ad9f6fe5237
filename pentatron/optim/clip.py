"""Gradient norm and clipping."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_EPSILON = 1e-6


def squared_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The squared L2 norm over all gradients; zero where there are none."""
    if not gradients:
        return torch.zeros((), device=device)
    return nn.utils.get_total_norm(gradients).square()


def clip_(gradients: Sequence[Tensor], norm: float, limit: float) -> None:
    """Scales the gradients down to `limit`; does nothing when they are below it or the limit is 0."""
    factor = limit / (norm + _EPSILON)
    if 0 < factor < 1:
        torch._foreach_mul_(list(gradients), factor)

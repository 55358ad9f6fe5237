"""Gradient norm and clipping."""

from collections.abc import Sequence

import torch
from torch import Tensor

_EPSILON = 1e-6


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The L2 norm over all gradients."""
    return torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]).norm()


def clip_(gradients: Sequence[Tensor], norm: Tensor, limit: float) -> None:
    """Scales the gradients down to `limit`; does nothing when they are below it or the limit is 0."""
    if limit > 0:
        factor = (limit / (norm + _EPSILON)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)

"""Gradient norm and clipping."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_EPSILON = 1e-6


def squared_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The squared L2 norm over all gradients, in fp64: squares of scaled gradients may be large. Zero where there are none."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return nn.utils.get_total_norm(gradients).double().square()


def clip_(gradients: Sequence[Tensor], norm: float, limit: float, scale: float = 1.0) -> None:
    """Scales the gradients down to `limit`, unless they are below it or the limit is 0.

    They are `scale` times what they should be, which is mended in the same pass; `norm` is that of the mended ones.
    """
    factor = limit / (norm + _EPSILON)
    factor = (factor if 0 < factor < 1 else 1.0) / scale
    if factor != 1:
        torch._foreach_mul_(list(gradients), factor)

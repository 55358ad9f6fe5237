"""Norms, computed in fp32 whatever the dtype of the stream. Every rank holds them whole."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pentatron.layout.ranks import Axis
from pentatron.parallel.pieces import ONES, ZEROS, DeclaringModule, whole


class RMSNorm(DeclaringModule):
    def __init__(self, width: int, epsilon: float, partial_over: frozenset[Axis] = frozenset()) -> None:
        super().__init__()
        self.weight = self.declare("weight", (width,), whole((width,), ONES, partial_over))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return scaled.to(x.dtype) * self.weight


class LayerNorm(DeclaringModule):
    def __init__(self, width: int, epsilon: float, partial_over: frozenset[Axis] = frozenset()) -> None:
        super().__init__()
        self.weight = self.declare("weight", (width,), whole((width,), ONES, partial_over))
        self.bias = self.declare("bias", (width,), whole((width,), ZEROS, partial_over))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


def build_norm(
    kind: str, width: int, epsilon: float, partial_over: frozenset[Axis] = frozenset()
) -> nn.Module:
    """`partial_over`: the axes whose ranks each see a part of what is normed, so that gradients must be summed."""
    return {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}[kind](width, epsilon, partial_over)

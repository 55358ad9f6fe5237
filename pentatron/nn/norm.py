"""Norms, computed in fp32 whatever the dtype of the stream. Every rank holds them whole."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pentatron.config.model import TransformerConfig
from pentatron.layout.ranks import Axis
from pentatron.nn.spec import Slot, build_module
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


class ConfiguredNorm(nn.Module):
    """Stands in a spec for the norm that the configuration names."""


NORMS: dict[str, type[RMSNorm] | type[LayerNorm]] = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}


def norm_in(
    slot: Slot, config: TransformerConfig, width: int, partial_over: frozenset[Axis] = frozenset()
) -> nn.Module:
    """The norm that a spec chooses.

    `partial_over`: the axes whose ranks each see a part of what is normed, so that gradients must be summed.
    """
    chosen = NORMS[config.normalization] if slot is ConfiguredNorm else slot
    made: nn.Module = build_module(chosen, width, config.layernorm_epsilon, partial_over)
    return made

"""The feed-forward part of a layer."""

import torch.nn.functional as F
from torch import Tensor, nn

from pentatron.config.model import TransformerConfig
from pentatron.nn.init import residual_scale
from pentatron.nn.linear import Linear


class MLP(nn.Module):
    """Gated SiLU (`fc1` holds gate and up as [2, F, D]) or GELU."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.ffn_hidden_size
        self.gated = config.gated_linear_unit
        inner = config.ffn_hidden_size
        self.linear_fc1 = Linear(config.hidden_size, inner * (2 if self.gated else 1), config.add_bias_linear)
        self.linear_fc2 = Linear(
            inner, config.hidden_size, config.add_bias_linear, residual_scale(config.num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.linear_fc1(x)
        if self.gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = F.silu(gate) * up
        else:
            inner = F.gelu(inner, approximate="tanh")
        return self.linear_fc2(inner)

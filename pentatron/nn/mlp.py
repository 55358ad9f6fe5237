"""The feed-forward part of a layer."""

import torch.nn.functional as F
from torch import Tensor, nn

from pentatron.config.model import TransformerConfig
from pentatron.nn.init import residual_scale
from pentatron.nn.linear import ColumnParallelLinear, RowParallelLinear, Rows, even_rows
from pentatron.parallel.tensor_axis import TensorAxis


class MLP(nn.Module):
    """Gated SiLU (`fc1` holds the gate's rows, then the up projection's) or GELU; the inner width is split."""

    def __init__(self, config: TransformerConfig, axis: TensorAxis, inner: int) -> None:
        super().__init__()
        self.gated = config.gated_linear_unit
        hidden, bias = config.hidden_size, config.add_bias_linear
        gate = even_rows(inner, axis)
        # A rank needs the same share of gate and up: not a contiguous share of the two together.
        up = tuple(Rows(inner + rows.start, rows.count) for rows in gate) if self.gated else ()
        self.linear_fc1 = ColumnParallelLinear(
            hidden, inner * (2 if self.gated else 1), gate + up, bias, axis
        )
        self.linear_fc2 = RowParallelLinear(inner, hidden, bias, axis, residual_scale(config.num_layers))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(activated(self.linear_fc1(x), self.gated))


def activated(inner: Tensor, gated: bool) -> Tensor:
    """What lies between the two matrices; a gated one gets the gate's half first."""
    if not gated:
        return F.gelu(inner, approximate="tanh")
    gate, up = inner.chunk(2, dim=-1)
    return F.silu(gate) * up

"""The MLP of a layer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pentatron.nn.init import residual_scale
from pentatron.nn.linear import ColumnParallelLinear, RowParallelLinear, Rows, even_rows
from pentatron.nn.options import ONE_PROCESS, Axes
from pentatron.nn.spec import MLPSubmodules, build_module
from pentatron.ops.activation import mlp_activation
from pentatron.ops.dispatch import uses_triton
from pentatron.settings.core_config import CoreTransformerConfig
from pentatron.settings.model import TransformerConfig
from pentatron.settings.model_sizes import mlp_sizes

PLAIN_MLP = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


class MLP(nn.Module):
    """Gated SiLU or GELU, split by the intermediate size. A gated `linear_fc1` has the gate's rows first."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        axes: Axes = ONE_PROCESS,
        submodules: MLPSubmodules = PLAIN_MLP,
        inner: int | None = None,
    ) -> None:
        super().__init__()
        config, axis = CoreTransformerConfig.of(config), axes.tensor
        whole = mlp_sizes(config, inner=inner)
        self.gated = config.gated_linear_unit
        # Whether the gate is fused into a matrix product: in fp8 into the first one, otherwise into the
        # second one if there is a kernel.
        self.fuses_gate = self.gated and axes.options.fuses_gates
        first, second = whole.linear_fc1, whole.linear_fc2
        gate = even_rows(whole.inner, axis)
        # A rank needs the same share of the gate and of the up projection, which is not contiguous.
        up = tuple(Rows(whole.inner + rows.start, rows.count) for rows in gate) if self.gated else ()
        self.linear_fc1 = build_module(
            submodules.linear_fc1, first.inputs, first.outputs, gate + up, first.has_bias, axis
        )
        scale = residual_scale(config.num_layers)
        self.linear_fc2 = build_module(
            submodules.linear_fc2, second.inputs, second.outputs, second.has_bias, axis, scale
        )

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.linear_fc1, self.linear_fc2
        if self.fuses_gate and type(first) is ColumnParallelLinear and first.fp8 is not None:
            return second(first(x, gates=True))
        inner: Tensor = first(x)
        if self.fuses_gate and type(second) is RowParallelLinear and second.is_plain and uses_triton(inner):
            return second(inner, gates=True)
        trains_on_cpu = inner.device.type == "cpu" and torch.is_grad_enabled()
        if self.gated and trains_on_cpu and not torch.compiler.is_compiling():
            return second(_GatedByHalves.apply(inner))
        return second(mlp_activation(inner, self.gated))


class _GatedByHalves(torch.autograd.Function):
    """`mlp_activation` with a gate, with the same bits, for CPUs.

    Backward writes the gradients of both halves into one tensor, which saves the pass over memory that
    concatenates them.
    """

    @staticmethod
    def forward(ctx: Any, inner: Tensor) -> Tensor:
        gate, up = inner.chunk(2, dim=-1)
        activated_gate = F.silu(gate)
        ctx.save_for_backward(inner, activated_gate)
        return activated_gate * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        inner, activated_gate = ctx.saved_tensors
        gate, up = inner.chunk(2, dim=-1)
        d_inner = torch.empty_like(inner)
        d_gate, d_up = d_inner.chunk(2, dim=-1)
        torch.mul(gradient, activated_gate, out=d_up)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=d_gate)
        return d_inner

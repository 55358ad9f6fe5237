"""Norms, computed in fp32 whatever the dtype of the hidden states. Their parameters are replicated."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pentatron.layout.ranks import Axis
from pentatron.nn.compiled import CompileOptions
from pentatron.nn.spec import Slot, build_module, takes
from pentatron.parallel.sharding import ONES, ZEROS, ShardedModule, replicated
from pentatron.settings.model import TransformerConfig
from pentatron.settings.model_sizes import norm_parameters

_INITIAL = {"weight": ONES, "bias": ZEROS}


class _Norm(ShardedModule):
    """Base class that declares the parameters of a norm."""

    kind: str
    weight: nn.Parameter

    def __init__(
        self,
        width: int,
        epsilon: float,
        partial_over: frozenset[Axis] = frozenset(),
        compile: CompileOptions | None = None,
    ) -> None:
        super().__init__()
        if compile is not None:
            self.runs_whole = True
            self.forward = compile.compiled(self.forward)
        for each in norm_parameters(self.kind, width):
            self.declare(each.name, each.shape, replicated(each.shape, _INITIAL[each.name], partial_over))
        self.epsilon = epsilon


class RMSNorm(_Norm):
    kind = "RMSNorm"

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                return _FusedRMSNorm.apply(x, self.weight, self.epsilon)
            # Without gradients one fused call has the same bits. (In half precision torch rounds once less.)
            if x.dtype is self.weight.dtype is torch.float32:
                return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        return _scaled(x, self.epsilon)[0] * self.weight


def _scaled(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Divides rows by their root mean square in fp32; also returns the factor."""
    wide = x.float()
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * factor).to(x.dtype), factor


class _FusedRMSNorm(torch.autograd.Function):
    """RMSNorm with the same bits and fewer passes over memory in backward, which matters on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scaled, factor = _scaled(x, epsilon)
        ctx.save_for_backward(x, weight, scaled, factor)
        return scaled * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scaled, factor = ctx.saved_tensors
        gradient = gradients[0]
        d_x = d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = (gradient * scaled).sum_to_size(weight.shape)
        if ctx.needs_input_grad[0]:
            d_scaled, wide = (gradient * weight).float(), x.float()
            product = d_scaled * wide
            d_factor = product.sum(-1, keepdim=True)
            d_mean = d_factor * (-0.5 * factor.pow(3))
            torch.mul(wide, d_mean / x.shape[-1] * 2, out=product)
            # In place: on a CPU every pass over a new tensor counts.
            d_x = d_scaled.mul_(factor).add_(product).to(x.dtype)
        return d_x, d_weight, None


class LayerNorm(_Norm):
    kind = "LayerNorm"
    bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


class ConfiguredNorm(nn.Module):
    """Placeholder in a spec for the norm that the configuration names."""


NORMS: dict[str, type[RMSNorm] | type[LayerNorm]] = {norm.kind: norm for norm in (RMSNorm, LayerNorm)}


def norm_in(
    slot: Slot,
    config: TransformerConfig,
    width: int,
    partial_over: frozenset[Axis] = frozenset(),
    compile: CompileOptions | None = None,
) -> nn.Module:
    """Builds the norm that a spec chooses.

    `partial_over`: axes whose ranks each normalize a part of the tensor, so that gradients must be summed.
    `compile`: compiles a built-in norm as its own graph; inside a compiled layer it is part of the layer's.
    """
    chosen = NORMS[config.normalization] if slot is ConfiguredNorm else slot
    compiles = compile is not None and takes(chosen, "compile", (RMSNorm, LayerNorm))
    kwargs = {"compile": compile} if compiles else {}
    return build_module(chosen, width, config.layernorm_epsilon, partial_over, **kwargs)

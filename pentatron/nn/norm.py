"""Norms, computed in fp32 whatever the dtype of the stream. Every rank holds them whole."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pentatron.layout.ranks import Axis
from pentatron.nn.compiled import Compile
from pentatron.nn.spec import Slot, build_module, takes
from pentatron.parallel.shards import ONES, ZEROS, DeclaringModule, whole
from pentatron.settings.model import TransformerConfig
from pentatron.settings.parameters import norm_parameters

_INITIAL = {"weight": ONES, "bias": ZEROS}


class _Norm(DeclaringModule):
    """Declares the parameters of its kind."""

    kind: str
    weight: nn.Parameter

    def __init__(
        self,
        width: int,
        epsilon: float,
        partial_over: frozenset[Axis] = frozenset(),
        compile: Compile | None = None,
    ) -> None:
        super().__init__()
        if compile is not None:
            self.runs_whole = True
            self.forward = compile.whole(self.forward)
        for each in norm_parameters(self.kind, width):
            self.declare(each.name, each.shape, whole(each.shape, _INITIAL[each.name], partial_over))
        self.epsilon = epsilon


class RMSNorm(_Norm):
    kind = "RMSNorm"

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                normed: Tensor = _NormedInFewPasses.apply(x, self.weight, self.epsilon)
                return normed
            # Nothing is kept for a backward: one call, with the same bits. (In half precision torch rounds once less.)
            if x.dtype is self.weight.dtype is torch.float32:
                return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        return _scaled(x, self.epsilon)[0] * self.weight


def _scaled(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Rows divided by the root of their mean square, and what they were multiplied by, in fp32."""
    wide = x.float()
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * factor).to(x.dtype), factor


class _NormedInFewPasses(torch.autograd.Function):
    """An RMSNorm with the same bits: backward goes over memory less often than what autograd derives, and that is what it costs on a CPU."""

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
        of_x = of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (gradient * scaled).sum_to_size(weight.shape)
        if ctx.needs_input_grad[0]:
            made, wide = (gradient * weight).float(), x.float()
            product = made * wide
            of_factor = product.sum(-1, keepdim=True)
            of_mean = of_factor * (-0.5 * factor.pow(3))
            torch.mul(wide, of_mean / x.shape[-1] * 2, out=product)
            of_x = made.mul_(factor).add_(product).to(x.dtype)
        return of_x, of_weight, None


class LayerNorm(_Norm):
    kind = "LayerNorm"
    bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


class ConfiguredNorm(nn.Module):
    """Stands in a spec for the norm that the configuration names."""


NORMS: dict[str, type[RMSNorm] | type[LayerNorm]] = {norm.kind: norm for norm in (RMSNorm, LayerNorm)}


def norm_in(
    slot: Slot,
    config: TransformerConfig,
    width: int,
    partial_over: frozenset[Axis] = frozenset(),
    compile: Compile | None = None,
) -> nn.Module:
    """The norm that a spec chooses.

    `partial_over`: the axes whose ranks each see a part of what is normed, so that gradients must be summed.
    `compile`: as a graph of its own, if it is one of ours; inside a compiled layer it is a part of the
    layer's.
    """
    chosen = NORMS[config.normalization] if slot is ConfiguredNorm else slot
    by_itself = compile is not None and takes(chosen, (RMSNorm, LayerNorm), "compile")
    more = {"compile": compile} if by_itself else {}
    made: nn.Module = build_module(chosen, width, config.layernorm_epsilon, partial_over, **more)
    return made

"""`swiglu(inner) Wᵀ` as one function, which keeps `inner` alone for its backward."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pentatron.kernels.swiglu import swiglu, swiglu_backward


def gated_linear(inner: Tensor, weight: nn.Parameter) -> Tensor:
    result = _GatedLinear.apply(inner, weight)
    assert isinstance(result, Tensor)
    return result


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(inner, weight)
        return F.linear(swiglu(inner), weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        inner, weight = ctx.saved_tensors
        gradient = gradients[0]
        of_inner, made = swiglu_backward(gradient @ weight, inner)
        return of_inner, gradient.flatten(0, -2).t() @ made.flatten(0, -2)

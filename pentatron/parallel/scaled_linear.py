"""`x Wᵀ` and its gradients with all factors rounded to fp8.

Inputs and weights are e4m3. Gradients are e5m2, with a wider range and fewer digits ("hybrid"), or e4m3 as well. Results, and everything
outside the three products, have the dtype of the model. For backward the input is kept in fp8, transposed, as its product wants it; the
weight is rounded once more there, so that nothing of its size is kept between the two.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pentatron.kernels.fp8 import E4M3, E5M2, MULTIPLE, product, scaled, scaled_by
from pentatron.parallel.deferral import DeferredGradients


@dataclass(frozen=True)
class Fp8Format:
    """`gradients`: the dtype that the gradient of an output is rounded to."""

    gradients: torch.dtype


FORMATS = {"e4m3": Fp8Format(E4M3), "hybrid": Fp8Format(E5M2)}


@dataclass
class ScaledProduct:
    """The gradient of a weight, not yet computed; both factors in fp8 with the tokens last."""

    weight: nn.Parameter
    inputs: Tensor
    gradient: Tensor
    unscale: tuple[Tensor, Tensor]

    def compute(self) -> Tensor:
        return product(self.gradient, self.inputs, self.unscale, self.weight.dtype)


def can_be_scaled(x: Tensor) -> bool:
    """Whether there are as many tokens as the products take: tokens are what the gradient of a weight is summed over."""
    return x.shape[:-1].numel() % MULTIPLE == 0


def scaled_linear(
    x: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    fp8: Fp8Format,
    deferred: DeferredGradients | None = None,
) -> Tensor:
    """`x Wᵀ + b`; with `deferred`, the gradient of the weight may come later than the others."""
    if not torch.is_grad_enabled():
        flat = x.flatten(0, -2)
        made = _forward(flat, weight, columns=False)[0].view(*x.shape[:-1], -1)
    else:
        applied = _ScaledLinear.apply(x, weight, fp8.gradients, deferred)
        assert isinstance(applied, Tensor)
        made = applied
    return made if bias is None else made + bias


def _forward(flat: Tensor, weight: Tensor, columns: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The product; the input in fp8 transposed, where wanted; what undoes the scale of the input, and that of the weight."""
    x = scaled(flat, E4M3, columns=columns)
    w = scaled(weight, E4M3, columns=False)
    assert x.rows is not None and w.rows is not None
    made = product(x.rows, w.rows, (x.unscale, w.unscale), flat.dtype, fast=True)
    return made, x.columns, x.unscale, w.unscale


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, gradients: torch.dtype, deferred: DeferredGradients | None
    ) -> Tensor:
        made, x_columns, x_unscale, w_unscale = _forward(x.flatten(0, -2), weight, columns=True)
        ctx.save_for_backward(x_columns, weight, x_unscale, w_unscale)
        # Where a layer is recomputed, the saved weight comes back as another tensor, whose gradient nobody reads.
        ctx.parameter, ctx.gradients, ctx.deferred = weight, gradients, deferred
        return made.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_columns, weight, x_unscale, w_unscale = ctx.saved_tensors
        gradient = gradients[0]
        g = scaled(gradient.flatten(0, -2), ctx.gradients)
        assert g.rows is not None and g.columns is not None
        of_input = of_weight = None
        if ctx.needs_input_grad[0]:
            w = scaled_by(weight, w_unscale.reciprocal(), E4M3, rows=False)
            assert w.columns is not None
            flat = product(g.rows, w.columns, (g.unscale, w_unscale), gradient.dtype)
            of_input = flat.view(*gradient.shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            unscale = (g.unscale, x_unscale)
            if ctx.deferred is None:
                of_weight = product(g.columns, x_columns, unscale, weight.dtype)
            else:
                later = ScaledProduct(ctx.parameter, x_columns, g.columns, unscale)
                of_weight = None if ctx.deferred.take(later) else later.compute()
        return of_input, of_weight, None, None

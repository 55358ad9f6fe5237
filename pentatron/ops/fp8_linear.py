"""`x Wᵀ` and its gradients with all factors rounded to fp8.

Inputs and weights are e4m3. Gradients are e5m2, with a wider range and fewer digits ("hybrid"), or e4m3 as well. Results, and everything
outside the three products, have the dtype of the model. For backward the input is kept in fp8, transposed, as its product wants it; the
weight is rounded once more there, so that nothing of its size is kept between the two.

A gate behind the product is a part of the function: its backward then finds the largest element of what it writes, which is what the
products of backward are to be scaled by.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pentatron.devices import FP8_MULTIPLE
from pentatron.ops.activation import gate_backward, gated
from pentatron.ops.fp8 import E4M3, E5M2, Scaled, product, scale_of, scaled, scaled_by, scales_of
from pentatron.ops.linear import DeferredGradients


@dataclass(frozen=True)
class Fp8Format:
    """`gradients`: the dtype that the gradient of an output is rounded to. `by_rows`: with a scale for each row of a factor, not one for all."""

    gradients: torch.dtype
    by_rows: bool = False


FORMATS = {"e4m3": Fp8Format(E4M3), "hybrid": Fp8Format(E5M2)}


# The scale of a weight and what undoes it, where somebody keeps them; otherwise they are found anew each time.
Scale = tuple[Tensor | None, Tensor | None]
UNKNOWN: Scale = (None, None)


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
    return x.shape[:-1].numel() % FP8_MULTIPLE == 0


def scaled_linear(
    x: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    fp8: Fp8Format,
    deferred: DeferredGradients | None = None,
    scale: Scale = UNKNOWN,
    gates: bool = False,
) -> Tensor:
    """`x Wᵀ + b`, with `gates` `silu(gate) * up` of it, its first half being the gate; with `deferred`, the gradient of the weight may
    come later than the others."""
    if gates and torch.is_grad_enabled():
        made = _ScaledGatedLinear.apply(x, weight, bias, *scale, fp8.gradients, fp8.by_rows, deferred)
        assert isinstance(made, Tensor)
        return made
    if torch.is_grad_enabled():
        made = _ScaledLinear.apply(x, weight, *scale, fp8.gradients, fp8.by_rows, deferred)
        assert isinstance(made, Tensor)
    else:
        flat = x.flatten(0, -2)
        made = _forward(flat, weight, scale, fp8.by_rows, columns=False)[0].view(*x.shape[:-1], -1)
    whole = made if bias is None else made + bias
    return gated(whole) if gates else whole


def _forward(
    flat: Tensor, weight: nn.Parameter, scale: Scale, by_rows: bool, columns: bool
) -> tuple[Tensor, Scaled, Scaled]:
    """The product; the input, with its transpose where wanted; and the weight."""
    x = scaled(flat, E4M3, columns=columns, by_rows=by_rows)
    if scale[0] is None:
        w = scaled(weight, E4M3, columns=False, by_rows=by_rows)
    else:
        w = scaled_by(weight, scale[0], E4M3, columns=False, unscale=scale[1])
    assert x.rows is not None and w.rows is not None
    return product(x.rows, w.rows, (x.unscale, w.unscale), flat.dtype, fast=True), x, w


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        scale: Tensor | None,
        unscale: Tensor | None,
        gradients: torch.dtype,
        by_rows: bool,
        deferred: DeferredGradients | None,
    ) -> Tensor:
        made, x8, w8 = _forward(x.flatten(0, -2), weight, (scale, unscale), by_rows, columns=True)
        ctx.save_for_backward(x8.columns, weight, x8.columns_unscale, w8.scale, w8.unscale)
        # Where a layer is recomputed, the saved weight comes back as another tensor, whose gradient nobody reads.
        ctx.parameter, ctx.gradients, ctx.by_rows, ctx.deferred = weight, gradients, by_rows, deferred
        return made.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0]
        g = scaled(gradient.flatten(0, -2), ctx.gradients, by_rows=ctx.by_rows)
        of_input, of_weight = _backward(ctx, ctx.saved_tensors, g, gradient)
        return of_input, of_weight, None, None, None, None, None


class _ScaledGatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        scale: Tensor | None,
        unscale: Tensor | None,
        gradients: torch.dtype,
        by_rows: bool,
        deferred: DeferredGradients | None,
    ) -> Tensor:
        made, x8, w8 = _forward(x.flatten(0, -2), weight, (scale, unscale), by_rows, columns=True)
        inner = made if bias is None else made + bias
        ctx.save_for_backward(x8.columns, weight, x8.columns_unscale, w8.scale, w8.unscale, inner)
        ctx.parameter, ctx.gradients, ctx.by_rows, ctx.deferred = weight, gradients, by_rows, deferred
        return gated(inner).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0]
        *kept, inner = ctx.saved_tensors
        of_inner, largest = gate_backward(gradient.flatten(0, -2), inner)
        if ctx.by_rows:
            g = scaled(of_inner, ctx.gradients, by_rows=True)
        else:
            scale, unscale = scale_of(largest, ctx.gradients)
            g = scaled_by(of_inner, scale, ctx.gradients, unscale=unscale)
        of_input, of_weight = _backward(ctx, kept, g, gradient)
        of_bias = of_inner.sum(0) if ctx.needs_input_grad[2] else None
        return of_input, of_weight, of_bias, None, None, None, None, None


def _backward(
    ctx: Any, kept: Sequence[Tensor], g: Scaled, gradient: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of input and weight. `g` is that of the product; dtype and shape are those of `gradient`, but for the last side."""
    x_columns, weight, x_unscale, w_scale, w_unscale = kept
    assert g.rows is not None and g.columns is not None
    of_input = of_weight = None
    if ctx.needs_input_grad[0]:
        # By rows those of the transposed weight have scales of their own.
        w = (
            scaled(weight, E4M3, rows=False, by_rows=True)
            if ctx.by_rows
            else scaled_by(weight, w_scale, E4M3, rows=False, unscale=w_unscale)
        )
        assert w.columns is not None
        flat = product(g.rows, w.columns, (g.unscale, w.columns_unscale), gradient.dtype)
        of_input = flat.view(*gradient.shape[:-1], -1)
    if ctx.needs_input_grad[1]:
        unscale = (g.columns_unscale, x_unscale)
        if ctx.deferred is None:
            of_weight = product(g.columns, x_columns, unscale, weight.dtype)
        else:
            later = ScaledProduct(ctx.parameter, x_columns, g.columns, unscale)
            of_weight = None if ctx.deferred.take(later) else later.compute()
    return of_input, of_weight


# How linear layers multiply: fp8 and its scales, and weight gradients that are computed later.
#
# The options of a layer are chosen before it is built and handed to it with its tensor axis.


class Weighted(Protocol):
    """A layer that multiplies by its weight."""

    weight: nn.Parameter


class WeightScale:
    """The scale of one fp8 weight. Its layer reads `known` in every forward, and computes the scale itself
    while it is UNKNOWN."""

    def __init__(self) -> None:
        self.known: Scale = UNKNOWN


class WeightScales:
    """The scales of the fp8 weights of a rank, computed for all of them at once: weights change once a step,
    and there are many.

    For weights that are whole on this rank when a step or a validation begins. Where replicas share them out
    (ZeRO), they arrive layer by layer, and each layer computes its own scale. The tensors stay in place, so
    that CUDA graphs can read them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._layers: list[Weighted] = []
        self._held: list[WeightScale] = []
        self._scales: list[Tensor] = []
        self._unscales: list[Tensor] = []

    def of(self, layer: Weighted) -> WeightScale:
        """The scale of a layer under construction, which `refresh` computes from now on."""
        held = WeightScale()
        self._layers.append(layer)
        self._held.append(held)
        self._scales.append(torch.ones((), device=self._device))
        self._unscales.append(torch.ones((), device=self._device))
        return held

    @torch.no_grad()
    def refresh(self) -> None:
        """To be called after weights have changed, before they are multiplied."""
        if not self._layers:
            return
        found = scales_of([layer.weight for layer in self._layers], E4M3)
        torch._foreach_copy_(self._scales, list(found.unbind()))
        torch._foreach_copy_(self._unscales, list(found.reciprocal().unbind()))
        for held, scale, unscale in zip(self._held, self._scales, self._unscales):
            held.known = (scale, unscale)

    def forget(self) -> None:
        """To be called before weights change: products outside of a step or a validation compute the scales
        they need."""
        for held in self._held:
            held.known = UNKNOWN


@dataclass(frozen=True)
class LinearOptions:
    """How the linear layers built with a tensor axis multiply.

    `deferred` keeps what weight gradients are made of until the weight half of a backward. `fp8` is the
    format of the factors, `scales` computes the scales of such weights. With `in_graph` the layers around are
    compiled, and a linear layer that cannot be keeps itself out of their graphs.
    """

    deferred: DeferredGradients | None = None
    fp8: Fp8Format | None = None
    scales: WeightScales | None = None
    in_graph: bool = False


PLAIN = LinearOptions()

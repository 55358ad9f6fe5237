"""FP8 linear layers: `x Wᵀ` and its gradients with all factors rounded to fp8, and their options.

Inputs and weights are e4m3. Gradients are e5m2, with a wider range and less precision ("hybrid"), or e4m3.
Results, and everything outside the three products, have the model's dtype. Backward saves the transposed fp8
input, as its product needs it, and rounds the weight again, so that nothing of the weight's size is saved.

A gate after the product is part of the autograd function: its backward then computes the maxima of the
gradient that it writes, from which the products of backward are scaled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pentatron.devices import FP8_MULTIPLE
from pentatron.ops.activation import gate_backward, gated
from pentatron.ops.fp8 import (
    E4M3,
    E5M2,
    Fp8Matrix,
    product,
    quantize,
    quantize_with_scale,
    scale_of,
    scales_of,
)
from pentatron.ops.linear import DeferredGradients


@dataclass(frozen=True)
class Fp8Format:
    """`gradients`: the dtype of output gradients.

    `by_rows`: one scale per row of a factor, not one per tensor.
    """

    gradients: torch.dtype
    by_rows: bool = False


FORMATS = {"e4m3": Fp8Format(E4M3), "hybrid": Fp8Format(E5M2)}


# The scale of a weight and its inverse, if they are cached; otherwise every product computes them.
Scale = tuple[Tensor | None, Tensor | None]
UNKNOWN: Scale = (None, None)


@dataclass
class Fp8Product:
    """A deferred weight gradient; both factors are fp8 and transposed, with the tokens last."""

    weight: nn.Parameter
    inputs: Tensor
    gradient: Tensor
    unscale: tuple[Tensor, Tensor]

    def compute(self) -> Tensor:
        return product(self.gradient, self.inputs, self.unscale, self.weight.dtype)


def fp8_supports(x: Tensor) -> bool:
    """Whether the number of tokens suits fp8 products: weight gradients sum over tokens."""
    return x.shape[:-1].numel() % FP8_MULTIPLE == 0


def fp8_linear(
    x: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    fp8: Fp8Format,
    deferred: DeferredGradients | None = None,
    scale: Scale = UNKNOWN,
    gates: bool = False,
) -> Tensor:
    """Returns `x Wᵀ + b`; with `gates`, SwiGLU of it, with the gate first.

    With `deferred` the weight gradient may be deferred.
    """
    if gates and torch.is_grad_enabled():
        return _ScaledGatedLinear.apply(x, weight, bias, *scale, fp8.gradients, fp8.by_rows, deferred)
    if torch.is_grad_enabled():
        product_rows = _ScaledLinear.apply(x, weight, *scale, fp8.gradients, fp8.by_rows, deferred)
    else:
        flat = x.flatten(0, -2)
        product_rows = _forward(flat, weight, scale, fp8.by_rows, columns=False)[0].view(*x.shape[:-1], -1)
    whole = product_rows if bias is None else product_rows + bias
    return gated(whole) if gates else whole


def _forward(
    flat: Tensor, weight: nn.Parameter, scale: Scale, by_rows: bool, columns: bool
) -> tuple[Tensor, Fp8Matrix, Fp8Matrix]:
    """Returns the product, the fp8 input (with its transpose if `columns`) and the fp8 weight."""
    x = quantize(flat, E4M3, columns=columns, by_rows=by_rows)
    if scale[0] is None:
        w = quantize(weight, E4M3, columns=False, by_rows=by_rows)
    else:
        w = quantize_with_scale(weight, scale[0], E4M3, columns=False, unscale=scale[1])
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
        output, x8, w8 = _forward(x.flatten(0, -2), weight, (scale, unscale), by_rows, columns=True)
        ctx.save_for_backward(x8.columns, weight, x8.columns_unscale, w8.scale, w8.unscale)
        # With recomputation, the saved weight is unpacked as another tensor, so keep the parameter itself.
        ctx.parameter, ctx.gradients, ctx.by_rows, ctx.deferred = weight, gradients, by_rows, deferred
        return output.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0]
        g = quantize(gradient.flatten(0, -2), ctx.gradients, by_rows=ctx.by_rows)
        grad_input, grad_weight = _backward(ctx, ctx.saved_tensors, g, gradient)
        return grad_input, grad_weight, None, None, None, None, None


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
        output, x8, w8 = _forward(x.flatten(0, -2), weight, (scale, unscale), by_rows, columns=True)
        inner = output if bias is None else output + bias
        ctx.save_for_backward(x8.columns, weight, x8.columns_unscale, w8.scale, w8.unscale, inner)
        ctx.parameter, ctx.gradients, ctx.by_rows, ctx.deferred = weight, gradients, by_rows, deferred
        return gated(inner).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0]
        *saved, inner = ctx.saved_tensors
        grad_inner, largest = gate_backward(gradient.flatten(0, -2), inner)
        if ctx.by_rows:
            g = quantize(grad_inner, ctx.gradients, by_rows=True)
        else:
            scale, unscale = scale_of(largest, ctx.gradients)
            g = quantize_with_scale(grad_inner, scale, ctx.gradients, unscale=unscale)
        grad_input, grad_weight = _backward(ctx, saved, g, gradient)
        grad_bias = grad_inner.sum(0) if ctx.needs_input_grad[2] else None
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


def _backward(
    ctx: Any, saved: Sequence[Tensor], g: Fp8Matrix, gradient: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of input and weight.

    `g` is the fp8 gradient of the product; `gradient` determines the dtype and, except for the last
    dimension, the shape.
    """
    x_columns, weight, x_unscale, w_scale, w_unscale = saved
    assert g.rows is not None and g.columns is not None
    grad_input = grad_weight = None
    if ctx.needs_input_grad[0]:
        # With scales by rows, the transposed weight has scales of its own.
        w = (
            quantize(weight, E4M3, rows=False, by_rows=True)
            if ctx.by_rows
            else quantize_with_scale(weight, w_scale, E4M3, rows=False, unscale=w_unscale)
        )
        assert w.columns is not None
        flat = product(g.rows, w.columns, (g.unscale, w.columns_unscale), gradient.dtype)
        grad_input = flat.view(*gradient.shape[:-1], -1)
    if ctx.needs_input_grad[1]:
        unscale = (g.columns_unscale, x_unscale)
        if ctx.deferred is None:
            grad_weight = product(g.columns, x_columns, unscale, weight.dtype)
        else:
            deferred_product = Fp8Product(ctx.parameter, x_columns, g.columns, unscale)
            grad_weight = None if ctx.deferred.take(deferred_product) else deferred_product.compute()
    return grad_input, grad_weight


# --- options of linear layers, chosen before a layer is built and passed to it with its tensor axis ---


class Weighted(Protocol):
    """A layer with a weight matrix."""

    weight: nn.Parameter


class WeightScale:
    """The cached scale of one fp8 weight.

    While it is UNKNOWN, the layer computes the scale in every forward.
    """

    def __init__(self) -> None:
        self.known: Scale = UNKNOWN


class WeightScales:
    """Computes the scales of all fp8 weights of a rank at once: weights change once a step, and there are
    many.

    For weights that are complete on this rank when a step or an evaluation begins. With ZeRO, weights are
    gathered layer by layer and each layer computes its own scale. The tensors stay in place, so that CUDA
    graphs can read them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._layers: list[Weighted] = []
        self._entries: list[WeightScale] = []
        self._scales: list[Tensor] = []
        self._unscales: list[Tensor] = []

    def of(self, layer: Weighted) -> WeightScale:
        """Returns the scale of a layer under construction, which `refresh` computes from now on."""
        entry = WeightScale()
        self._layers.append(layer)
        self._entries.append(entry)
        self._scales.append(torch.ones((), device=self._device))
        self._unscales.append(torch.ones((), device=self._device))
        return entry

    @torch.no_grad()
    def refresh(self) -> None:
        """Must be called after weights have changed, before the next product."""
        if not self._layers:
            return
        scales = scales_of([layer.weight for layer in self._layers], E4M3)
        torch._foreach_copy_(self._scales, list(scales.unbind()))
        torch._foreach_copy_(self._unscales, list(scales.reciprocal().unbind()))
        for entry, scale, unscale in zip(self._entries, self._scales, self._unscales):
            entry.known = (scale, unscale)

    def forget(self) -> None:
        """Must be called before weights change: later products compute their own scales."""
        for entry in self._entries:
            entry.known = UNKNOWN


@dataclass(frozen=True)
class LinearOptions:
    """Options of the linear layers built with a tensor axis.

    `deferred` collects weight gradients for the weight half of a split backward. `fp8` is the format of the
    factors, `scales` caches the scales of such weights. `in_graph`: the layers around are compiled, so a
    linear layer that cannot be compiled excludes itself from their graphs.
    """

    deferred: DeferredGradients | None = None
    fp8: Fp8Format | None = None
    scales: WeightScales | None = None
    in_graph: bool = False


DEFAULT_LINEAR = LinearOptions()

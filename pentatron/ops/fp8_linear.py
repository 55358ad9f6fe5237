"""FP8 linear layers: `x Wᵀ` and its gradients with all factors rounded to fp8, and their options.

Inputs and weights are e4m3. Gradients are e5m2, with a wider range and less precision ("hybrid"), or e4m3.
Results, and everything outside the three products, have the model's dtype. Backward saves the transposed fp8
input, as its product needs it, and rounds the weight again, so that nothing of the weight's size is saved.

A gate after the product is part of the autograd function: its backward then computes the maxima of the
gradient that it writes, from which the products of backward are scaled.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pentatron.devices import FP8_MULTIPLE
from pentatron.ops.activation import gate_backward, gated
from pentatron.ops.fp8 import (
    E4M3,
    E5M2,
    Fp8Matrix,
    quantize,
    quantize_with_scale,
    scale_of,
    scaled_matmul,
    scales_of,
)
from pentatron.ops.linear import DeferredGradients, compute_or_defer


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
    if torch.is_grad_enabled():
        # A gate in the function needs the bias there.
        output = _ScaledLinear.apply(x, weight, bias if gates else None, *scale, fp8, deferred, gates)
        return output if gates or bias is None else output + bias
    rows = _forward(x.flatten(0, -2), weight, scale, fp8.by_rows, columns=False)[0].view(*x.shape[:-1], -1)
    whole = rows if bias is None else rows + bias
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
    return scaled_matmul(x.rows, w.rows, (x.unscale, w.unscale), flat.dtype, fast=True), x, w


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        scale: Tensor | None,
        unscale: Tensor | None,
        fp8: Fp8Format,
        deferred: DeferredGradients | None,
        gates: bool,
    ) -> Tensor:
        output, x8, w8 = _forward(x.flatten(0, -2), weight, (scale, unscale), fp8.by_rows, columns=True)
        inner = output if bias is None else output + bias
        saved = (x8.columns, weight, x8.columns_unscale, w8.scale, w8.unscale)
        ctx.save_for_backward(*saved, inner if gates else None)
        # With recomputation, the saved weight is unpacked as another tensor, so keep the parameter itself.
        ctx.parameter, ctx.fp8, ctx.deferred = weight, fp8, deferred
        return (gated(inner) if gates else inner).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_columns, weight, x_unscale, w_scale, w_unscale, inner = ctx.saved_tensors
        fp8, dtype, gradient = ctx.fp8, gradients[0].dtype, gradients[0].flatten(0, -2)
        largest = None
        if inner is not None:
            gradient, largest = gate_backward(gradient, inner)
        if largest is None or fp8.by_rows:
            g = quantize(gradient, fp8.gradients, by_rows=fp8.by_rows)
        else:
            scale, unscale = scale_of(largest, fp8.gradients)
            g = quantize_with_scale(gradient, scale, fp8.gradients, unscale=unscale)
        assert g.rows is not None and g.columns is not None
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            # With scales by rows, the transposed weight has scales of its own.
            w = (
                quantize(weight, E4M3, rows=False, by_rows=True)
                if fp8.by_rows
                else quantize_with_scale(weight, w_scale, E4M3, rows=False, unscale=w_unscale)
            )
            assert w.columns is not None
            flat = scaled_matmul(g.rows, w.columns, (g.unscale, w.columns_unscale), dtype)
            grad_input = flat.view(*gradients[0].shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            function = partial(scaled_matmul, unscale=(g.columns_unscale, x_unscale), dtype=weight.dtype)
            grad_weight = compute_or_defer(ctx.deferred, ctx.parameter, function, g.columns, x_columns)
        grad_bias = gradient.sum(0) if ctx.needs_input_grad[2] else None
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


# --- options of linear layers, chosen before a layer is built and passed to it with its tensor axis ---


class Weighted(Protocol):
    """A layer with a weight matrix."""

    weight: nn.Parameter


@dataclass(eq=False)
class WeightScale:
    """The cached scale of one fp8 weight.

    While it is UNKNOWN, the layer computes the scale in every forward.
    """

    known: Scale = UNKNOWN


class WeightScales:
    """Computes the scales of all fp8 weights of a rank at once: weights change once a step, and there are
    many.

    For weights that are complete on this rank when a step or an evaluation begins. With ZeRO, weights are
    gathered layer by layer and each layer computes its own scale. The tensors stay in place, so that CUDA
    graphs can read them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Layers with the scale of their weight and its inverse.
        self._entries: list[tuple[Weighted, WeightScale, Tensor, Tensor]] = []

    def of(self, layer: Weighted) -> WeightScale:
        """Returns the scale of a layer under construction, which `refresh` computes from now on."""
        scale, unscale = (torch.ones((), device=self._device) for _ in range(2))
        self._entries.append((layer, WeightScale(), scale, unscale))
        return self._entries[-1][1]

    @torch.no_grad()
    def refresh(self) -> None:
        """Must be called after weights have changed, before the next product."""
        if not self._entries:
            return
        layers, _, known, known_inverse = zip(*self._entries)
        scales = scales_of([layer.weight for layer in layers], E4M3)
        torch._foreach_copy_(known, scales.unbind())
        torch._foreach_copy_(known_inverse, scales.reciprocal().unbind())
        for _, entry, scale, unscale in self._entries:
            entry.known = (scale, unscale)

    def forget(self) -> None:
        """Must be called before weights change: later products compute their own scales."""
        for _, entry, _, _ in self._entries:
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

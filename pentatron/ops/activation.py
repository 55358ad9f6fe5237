"""Activations of MLPs and experts with their backward, and dispatch of rows to experts.

The routing weight is applied before the second matmul. Rows are narrower there, and the gradient of the
weight does not need the output of that matmul.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pentatron.ops.dispatch import operator, uses_triton

_SLOPE = math.sqrt(2 / math.pi)
_CUBE = 0.044715


def weighted_activation(inner_NI: Tensor, weights_N: Tensor, gated: bool) -> Tensor:
    """Returns the activation times each row's weight: SwiGLU (gate first) if `gated`, else GELU (tanh
    approximation).

    Computed in fp32 and rounded once.
    """
    if uses_triton(inner_NI):
        from pentatron.ops import triton_activation

        return triton_activation.weighted_activation(inner_NI, weights_N, gated)
    return (mlp_activation(inner_NI.float(), gated) * weights_N.float()[:, None]).to(inner_NI.dtype)


def weighted_activation_backward(
    gradient_NI: Tensor, inner_NI: Tensor, weights_N: Tensor, gated: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of the input and of the weights, and recomputes the output."""
    if uses_triton(inner_NI):
        from pentatron.ops import triton_activation

        return triton_activation.weighted_activation_backward(gradient_NI, inner_NI, weights_N, gated)
    weights, gradient, inner = weights_N.float()[:, None], gradient_NI.float(), inner_NI.float()
    activated = mlp_activation(inner, gated)
    grad_weights = (gradient * activated).sum(1)
    grad_activated = gradient * weights
    if gated:
        grad_inner = _gate_gradient(grad_activated, inner)
    else:
        sigmoid = (2 * _SLOPE * (inner + _CUBE * inner**3)).sigmoid()
        steepness = 2 * _SLOPE * (1 + 3 * _CUBE * inner**2)
        grad_inner = grad_activated * sigmoid * (1 + inner * (1 - sigmoid) * steepness)
    dtype = inner_NI.dtype
    return grad_inner.to(dtype), grad_weights.to(weights_N.dtype), (activated * weights).to(dtype)


def mlp_activation(inner: Tensor, has_gate: bool) -> Tensor:
    """The activation of an MLP: gated SiLU, with the gate in the first half, or GELU."""
    return gated(inner) if has_gate else F.gelu(inner, approximate="tanh")


def _gate_gradient(gradient: Tensor, inner: Tensor) -> Tensor:
    """Backward of `silu(gate) * up`, in fp32."""
    gate, up = inner.chunk(2, dim=-1)
    sigmoid = gate.sigmoid()
    grad_gate = gradient * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((grad_gate, gradient * gate * sigmoid), dim=-1)


# Backward of the gate also computes the largest element of the gradient, so that rounding to fp8 need not
# read it once more for its scale.


def gated(inner: Tensor) -> Tensor:
    """Returns `silu(gate) * up`; the gate is the first half of `inner`."""
    gate, up = inner.chunk(2, dim=-1)
    return F.silu(gate) * up


def _like_gate(gradient: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    return inner.new_empty(inner.shape), inner.new_empty(inner.shape[:-1].numel(), dtype=torch.float32)


@operator("gate_backward", _like_gate)
def gate_backward(gradient: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradient of `inner`, and row maxima of its absolute values in fp32."""
    if uses_triton(inner):
        from pentatron.ops.triton_activation import gate_backward as by_triton

        return by_triton(gradient.contiguous(), inner.contiguous())
    grad_inner = _gate_gradient(gradient.float(), inner.float()).to(inner.dtype)
    return grad_inner, grad_inner.abs().amax(-1).float().flatten()


# Backward of SwiGLU also recomputes the output, so an MLP saves nothing between its two matrices.


def swiglu(inner: Tensor) -> Tensor:
    """Returns `silu(gate) * up` with the gate first; computed in fp32 and rounded once."""
    # A compiler generates a kernel of the operations below, and can fuse it with its neighbours.
    if not torch.compiler.is_compiling() and uses_triton(inner):
        from pentatron.ops.triton_activation import swiglu as by_triton

        return by_triton(inner.contiguous())
    gate, up = inner.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(inner.dtype)


def _like_swiglu(gradient: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    return inner.new_empty(inner.shape), inner.new_empty(gradient.shape)


@operator("swiglu_backward", _like_swiglu)
def swiglu_backward(gradient: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradient of `inner`, and the recomputed output of `swiglu`."""
    if uses_triton(inner):
        from pentatron.ops.triton_activation import swiglu_backward as by_triton

        return by_triton(gradient.contiguous(), inner.contiguous())
    gate, up = inner.float().chunk(2, dim=-1)
    grad_inner = _gate_gradient(gradient.float(), inner.float())
    return grad_inner.to(inner.dtype), (gate * gate.sigmoid() * up).to(inner.dtype)


# Dispatch of rows to several places (MoE tokens), and their combination; each is the other's backward.


def dispatch_rows(x_TD: Tensor, places_TK: Tensor) -> Tensor:
    """Copies row t to all of its places; the places of all rows are a permutation of the result's rows."""
    if uses_triton(x_TD):
        from pentatron.ops import triton_activation

        return triton_activation.dispatch_rows(x_TD.contiguous(), places_TK)
    out = x_TD.new_empty(places_TK.numel(), x_TD.shape[1])
    return out.index_copy_(0, places_TK.flatten(), x_TD.repeat_interleave(places_TK.shape[1], 0))


def combine_rows(rows_ND: Tensor, places_TK: Tensor) -> Tensor:
    """Sums the rows at the places of token t into row t of the result, in fp32 and in their order."""
    if uses_triton(rows_ND):
        from pentatron.ops import triton_activation

        return triton_activation.combine_rows(rows_ND.contiguous(), places_TK)
    rows = rows_ND.index_select(0, places_TK.flatten()).unflatten(0, places_TK.shape)
    return rows.float().sum(1).to(rows_ND.dtype)


def gated_linear(inner: Tensor, weight: nn.Parameter) -> Tensor:
    """Returns `swiglu(inner) Wᵀ`; saves only `inner` for backward."""
    return _GatedLinear.apply(inner, weight)


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(inner, weight)
        return F.linear(swiglu(inner), weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        inner, weight = ctx.saved_tensors
        gradient = gradients[0]
        grad_inner, output = swiglu_backward(gradient @ weight, inner)
        return grad_inner, gradient.flatten(0, -2).t() @ output.flatten(0, -2)

"""What lies between the two matrices of an expert, times the weight that a token gives the expert.

The second matrix is linear: a weight may be applied before it as well as after it, and before it rows are narrower, and nothing that
the second matrix makes has to be kept for the weight's gradient.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pentatron.ops.dispatch import by_kernel, operator

_SLOPE = math.sqrt(2 / math.pi)
_CUBE = 0.044715


def weighted_activation(inner_NI: Tensor, weights_N: Tensor, gated: bool) -> Tensor:
    """`silu(gate) * up` of a gated one, whose gate comes first, otherwise gelu (tanh); in fp32, rounded once."""
    if by_kernel(inner_NI):
        from pentatron.ops import triton_activation

        return triton_activation.weighted_activation(inner_NI, weights_N, gated)
    return (_activated(inner_NI.float(), gated) * weights_N.float()[:, None]).to(inner_NI.dtype)


def weighted_activation_backward(
    gradient_NI: Tensor, inner_NI: Tensor, weights_N: Tensor, gated: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the input and of the weights; and what forward made, once more."""
    if by_kernel(inner_NI):
        from pentatron.ops import triton_activation

        return triton_activation.weighted_activation_backward(gradient_NI, inner_NI, weights_N, gated)
    weights, gradient, inner = weights_N.float()[:, None], gradient_NI.float(), inner_NI.float()
    plain = _activated(inner, gated)
    of_weights = (gradient * plain).sum(1)
    of_plain = gradient * weights
    if gated:
        gate, up = inner.chunk(2, dim=-1)
        sigmoid = gate.sigmoid()
        of_gate = of_plain * up * sigmoid * (1 + gate * (1 - sigmoid))
        of_inner = torch.cat((of_gate, of_plain * gate * sigmoid), dim=-1)
    else:
        sigmoid = (2 * _SLOPE * (inner + _CUBE * inner**3)).sigmoid()
        steepness = 2 * _SLOPE * (1 + 3 * _CUBE * inner**2)
        of_inner = of_plain * sigmoid * (1 + inner * (1 - sigmoid) * steepness)
    dtype = inner_NI.dtype
    return of_inner.to(dtype), of_weights.to(weights_N.dtype), (plain * weights).to(dtype)


def _activated(inner: Tensor, gated: bool) -> Tensor:
    if not gated:
        return F.gelu(inner, approximate="tanh")
    gate, up = inner.chunk(2, dim=-1)
    return F.silu(gate) * up


# `silu(gate) * up`, and its backward, which also finds the largest element of what it writes: who rounds that
# to fp8 need not read it for its scale.


def gated(inner: Tensor) -> Tensor:
    """`silu(gate) * up`, the gate being the first half."""
    gate, up = inner.chunk(2, dim=-1)
    return F.silu(gate) * up


def _like_gate(gradient: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    rows = inner.shape[:-1].numel()
    return inner.new_empty(inner.shape), inner.new_empty(rows, dtype=torch.float32)


@operator("gate_backward", _like_gate)
def gate_backward(gradient: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `inner`, whose first half is the gate; and the largest elements of parts of it, without sign, in fp32."""
    if by_kernel(inner):
        from pentatron.ops.triton_activation import gate_backward as by_triton

        return by_triton(gradient.contiguous(), inner.contiguous())
    gate, up = inner.float().chunk(2, dim=-1)
    sigmoid, wide = gate.sigmoid(), gradient.float()
    of_gate = wide * up * sigmoid * (1 + gate * (1 - sigmoid))
    made = torch.cat((of_gate, wide * gate * sigmoid), dim=-1).to(inner.dtype)
    return made, made.abs().amax(-1).float().flatten()


# Backward of `silu(gate) * up`, which also makes the product once more: nothing between the two matrices of
# an MLP need be kept.


def swiglu(inner: Tensor) -> Tensor:
    """Gate first, then what it lets through; in fp32, rounded once."""
    # A compiler makes a kernel of what is written below, and one with its neighbours.
    if not torch.compiler.is_compiling() and by_kernel(inner):
        from pentatron.ops.triton_activation import swiglu as by_triton

        return by_triton(inner.contiguous())
    gate, up = inner.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(inner.dtype)


def _like_swiglu(gradient: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    made = inner.new_empty((*inner.shape[:-1], inner.shape[-1] // 2))
    return inner.new_empty(inner.shape), made


@operator("swiglu_backward", _like_swiglu)
def swiglu_backward(gradient: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `inner`, and what `swiglu` made of it."""
    if by_kernel(inner):
        from pentatron.ops.triton_activation import swiglu_backward as by_triton

        return by_triton(gradient.contiguous(), inner.contiguous())
    gate, up = inner.float().chunk(2, dim=-1)
    sigmoid, wide = gate.sigmoid(), gradient.float()
    of_gate = wide * up * sigmoid * (1 + gate * (1 - sigmoid))
    of_inner = torch.cat((of_gate, wide * gate * sigmoid), dim=-1)
    return of_inner.to(inner.dtype), (gate * sigmoid * up).to(inner.dtype)


# Rows of a table dealt out to places, and what lies at several places summed up again: each is the other's
# backward.


def deal_rows(x_TD: Tensor, places_TK: Tensor) -> Tensor:
    """Row t goes to all of its places; together they are all rows of the result, each once."""
    if by_kernel(x_TD):
        from pentatron.ops import triton_activation

        return triton_activation.deal_rows(x_TD.contiguous(), places_TK)
    out = x_TD.new_empty(places_TK.numel(), x_TD.shape[1])
    return out.index_copy_(0, places_TK.flatten(), x_TD.repeat_interleave(places_TK.shape[1], 0))


def sum_rows(rows_ND: Tensor, places_TK: Tensor) -> Tensor:
    """Row t of the result is the sum of the rows at the places of t, added in fp32 in their order."""
    if by_kernel(rows_ND):
        from pentatron.ops import triton_activation

        return triton_activation.sum_rows(rows_ND.contiguous(), places_TK)
    found = rows_ND.index_select(0, places_TK.flatten()).unflatten(0, places_TK.shape)
    return found.float().sum(1).to(rows_ND.dtype)


# `swiglu(inner) Wᵀ` as one function, which keeps `inner` alone for its backward.


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

"""What lies between the two matrices of an expert, times the weight that a token gives the expert.

The second matrix is linear: a weight may be applied before it as well as after it, and before it rows are narrower, and nothing that
the second matrix makes has to be kept for the weight's gradient.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from pentatron.kernels.choice import by_kernel

_SLOPE = math.sqrt(2 / math.pi)
_CUBE = 0.044715


def weighted_activation(inner_NI: Tensor, weights_N: Tensor, gated: bool) -> Tensor:
    """`silu(gate) * up` of a gated one, whose gate comes first, otherwise gelu (tanh); in fp32, rounded once."""
    if by_kernel(inner_NI):
        from pentatron.kernels import activation_triton

        return activation_triton.weighted_activation(inner_NI, weights_N, gated)
    return (_activated(inner_NI.float(), gated) * weights_N.float()[:, None]).to(inner_NI.dtype)


def weighted_activation_backward(
    gradient_NI: Tensor, inner_NI: Tensor, weights_N: Tensor, gated: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the input and of the weights; and what forward made, once more."""
    if by_kernel(inner_NI):
        from pentatron.kernels import activation_triton

        return activation_triton.weighted_activation_backward(gradient_NI, inner_NI, weights_N, gated)
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

"""Backward of `silu(gate) * up`, which also makes the product once more: nothing between the two matrices of an MLP need be kept."""

import torch
from torch import Tensor
from torch.nn import functional as F

from pentatron.kernels.choice import by_kernel
from pentatron.kernels.operators import operator


def swiglu(inner: Tensor) -> Tensor:
    """Gate first, then what it lets through; in fp32, rounded once."""
    # A compiler makes a kernel of what is written below, and one with its neighbours.
    if not torch.compiler.is_compiling() and by_kernel(inner):
        from pentatron.kernels.swiglu_triton import swiglu as by_triton

        return by_triton(inner.contiguous())
    gate, up = inner.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(inner.dtype)


def _like(gradient: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    made = inner.new_empty((*inner.shape[:-1], inner.shape[-1] // 2))
    return inner.new_empty(inner.shape), made


@operator("swiglu_backward", _like)
def swiglu_backward(gradient: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `inner`, and what `swiglu` made of it."""
    if by_kernel(inner):
        from pentatron.kernels.swiglu_triton import swiglu_backward as by_triton

        return by_triton(gradient.contiguous(), inner.contiguous())
    gate, up = inner.float().chunk(2, dim=-1)
    sigmoid, wide = gate.sigmoid(), gradient.float()
    of_gate = wide * up * sigmoid * (1 + gate * (1 - sigmoid))
    of_inner = torch.cat((of_gate, wide * gate * sigmoid), dim=-1)
    return of_inner.to(inner.dtype), (gate * sigmoid * up).to(inner.dtype)

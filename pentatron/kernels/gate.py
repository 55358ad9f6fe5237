"""`silu(gate) * up`, and its backward, which also finds the largest element of what it writes: who rounds that to fp8 need not read it for its scale."""

import torch
from torch import Tensor
from torch.nn import functional as F

from pentatron.kernels.choice import by_kernel
from pentatron.kernels.operators import operator


def gated(inner: Tensor) -> Tensor:
    """`silu(gate) * up`, the gate being the first half."""
    gate, up = inner.chunk(2, dim=-1)
    return F.silu(gate) * up


def _like(gradient: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    rows = inner.shape[:-1].numel()
    return inner.new_empty(inner.shape), inner.new_empty(rows, dtype=torch.float32)


@operator("gate_backward", _like)
def gate_backward(gradient: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `inner`, whose first half is the gate; and the largest elements of parts of it, without sign, in fp32."""
    if by_kernel(inner):
        from pentatron.kernels.gate_triton import gate_backward as by_triton

        return by_triton(gradient.contiguous(), inner.contiguous())
    gate, up = inner.float().chunk(2, dim=-1)
    sigmoid, wide = gate.sigmoid(), gradient.float()
    of_gate = wide * up * sigmoid * (1 + gate * (1 - sigmoid))
    made = torch.cat((of_gate, wide * gate * sigmoid), dim=-1).to(inner.dtype)
    return made, made.abs().amax(-1).float().flatten()

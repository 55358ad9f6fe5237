"""Causal attention over sequences that are whole on this rank, all of them or a window of each token."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pentatron.nn.attention_blocks import Block, flash_backward, flash_forward, flash_is_chosen, hidden


def attend_whole(
    q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, dropout: float = 0.0, window: int | None = None
) -> Tensor:
    """Attention to all tokens up to one's own, or with `window` to no more than so many before it."""
    if window is None:
        grouped = q_BNSH.shape[1] > k_BKSH.shape[1]
        return F.scaled_dot_product_attention(
            q_BNSH, k_BKSH, v_BKSH, dropout_p=dropout, is_causal=True, enable_gqa=grouped
        )
    everything = slice(0, q_BNSH.shape[2])
    block = Block(everything, everything, causal=True, left=window)
    if q_BNSH.is_cuda and dropout == 0 and flash_is_chosen(q_BNSH):
        rows = [t if t.stride(-1) == 1 else t.contiguous() for t in (q_BNSH, k_BKSH, v_BKSH)]
        result: Tensor = _InFlashWindow.apply(*rows, block)
        return result
    unseen = hidden(block, q_BNSH.device)
    assert unseen is not None
    # Kernels that take a mask want a key for every query head.
    copies = q_BNSH.shape[1] // k_BKSH.shape[1]
    keys, values = (t.repeat_interleave(copies, dim=1) if copies > 1 else t for t in (k_BKSH, v_BKSH))
    return F.scaled_dot_product_attention(q_BNSH, keys, values, attn_mask=~unseen, dropout_p=dropout)


class _InFlashWindow(torch.autograd.Function):
    """CUDA's flash kernel knows windows, but torch's public function does not ask it for them; it would need a mask."""

    @staticmethod
    def forward(ctx: Any, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, block: Block) -> Tensor:
        out, lse, ctx.generator = flash_forward(q_BNSH, k_BKSH, v_BKSH, block)
        ctx.save_for_backward(q_BNSH, k_BKSH, v_BKSH, out, lse)
        ctx.block = block
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_BNSH, k_BKSH, v_BKSH, out, lse = ctx.saved_tensors
        kept = (q_BNSH, k_BKSH, v_BKSH, out, lse)
        dq, dk, dv = flash_backward(gradients[0].contiguous(), *kept, ctx.block, ctx.generator)
        return dq, dk, dv, None

"""Causal attention over sequences that are whole on this rank: to all tokens, those of a window or of a document."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pentatron.layout.documents import TOGETHER, DocumentStarts, alike, pieces
from pentatron.nn.attention_blocks import Block, flash_backward, flash_forward, flash_is_chosen, hidden


def attend_whole(
    q_BNSH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    dropout: float = 0.0,
    window: int | None = None,
    documents: DocumentStarts | None = None,
) -> Tensor:
    """Attention to all tokens up to one's own, or with `window` to no more than so many before it.

    With `documents` to one's own document: each is attended by itself, as a shorter sequence, so that documents save work and
    every kernel will do. Short neighbours share a call and a mask of at most TOGETHER² elements; there is never one of a
    whole sequence.
    """
    if documents is None:
        return _attend_causal(q_BNSH, k_BKSH, v_BKSH, dropout, window)
    together = TOGETHER if _masks_are_taken(q_BNSH) else 0
    groups = alike(documents)
    counts = [samples.stop - samples.start for samples, _ in groups]
    found = []
    for starts, *of_samples in zip(
        [starts for _, starts in groups], *(t.split(counts) for t in (q_BNSH, k_BKSH, v_BKSH))
    ):
        cut = pieces(starts, 0, q_BNSH.shape[2], together)
        lengths = [piece.end - piece.begin for piece in cut]
        # Split at once rather than sliced one by one: the gradient of a slice is as large as the whole.
        parts = zip(cut, *(t.split(lengths, dim=2) for t in of_samples))
        made = [_attend_causal(q, k, v, dropout, window, piece.cuts) for piece, q, k, v in parts]
        found.append(torch.cat(made, dim=2))
    return torch.cat(found)


def _masks_are_taken(q_BNSH: Tensor) -> bool:
    """Whether the kernels the user allows take a mask; on CUDA flash does not."""
    kernels = torch.backends.cuda
    return not q_BNSH.is_cuda or kernels.mem_efficient_sdp_enabled() or kernels.math_sdp_enabled()


def _attend_causal(
    q_BNSH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    dropout: float,
    window: int | None,
    cuts: tuple[int, ...] = (),
) -> Tensor:
    if window is not None and window >= q_BNSH.shape[2] - 1:
        window = None
    if window is None and not cuts:
        grouped = q_BNSH.shape[1] > k_BKSH.shape[1]
        return F.scaled_dot_product_attention(
            q_BNSH, k_BKSH, v_BKSH, dropout_p=dropout, is_causal=True, enable_gqa=grouped
        )
    everything = slice(0, q_BNSH.shape[2])
    block = Block(everything, everything, causal=True, left=window, cuts=cuts)
    if q_BNSH.is_cuda and dropout == 0 and not cuts and flash_is_chosen(q_BNSH):
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

"""Attention over blocks of queries and keys, whose partial results can be merged (as in flash and ring
attention).

The partial result of a block is its output and, for each query, the log-sum-exp (lse) of its scores. Merging
partial results gives the attention to all keys. In backward each block computes its part of the gradients
from the merged output and lse, and the parts are summed.
"""

import functools
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pentatron.layout.documents import MAX_JOINT_TOKENS, DocumentStarts, document_ranges, group_equal_starts

_aten = torch.ops.aten
# Limits of CUDA's flash kernel.
_WIDEST_HEAD = 256
_HEAD_MULTIPLE = 8


@dataclass(frozen=True)
class Block:
    """A range of queries and a range of keys on this rank.

    `causal`: query i attends to keys 0 ... i of the block, otherwise to all. `left`: to at most this many
    keys before key i. `samples`: the sequences of the batch. `cuts`: in a causal block, starts of documents;
    queries do not attend across them.
    """

    queries: slice
    keys: slice
    causal: bool
    left: int | None = None
    samples: slice = field(default_factory=lambda: slice(None))
    cuts: tuple[int, ...] = ()


def block_mask(block: Block, device: torch.device) -> Tensor | None:
    """Returns the mask of the block, True for hidden keys; None if every query attends to all keys."""
    rows, columns = (s.stop - s.start for s in (block.queries, block.keys))
    query, key = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)
    hidden = [key > query] if block.causal else []
    if block.left is not None:
        hidden.append(key < query - block.left)
    if block.cuts:
        document = torch.bucketize(key, torch.tensor(block.cuts, device=device), right=True)
        hidden.append(document[:, None] != document)
    return functools.reduce(torch.logical_or, hidden) if hidden else None


def flash_is_chosen(q_BNSH: Tensor) -> bool:
    """Whether blocks run in torch's flash kernel.

    Call it in forward: the user's context manager is not active in backward.
    """
    if not torch.backends.cuda.flash_sdp_enabled():
        return False
    if not q_BNSH.is_cuda:
        return True
    supports_width = q_BNSH.shape[-1] in range(_HEAD_MULTIPLE, _WIDEST_HEAD + 1, _HEAD_MULTIPLE)
    return supports_width and q_BNSH.dtype in (torch.bfloat16, torch.float16)


@dataclass
class MergedAttention:
    """The output and the lse of every query over blocks; in fp32 while they are accumulated."""

    q_BNSH: Tensor
    out_BNSH: Tensor
    lse_BNS: Tensor
    flash: bool
    # State of the CUDA kernel's random generator; without dropout it is the same for every block.
    generator: tuple[Tensor, ...] = ()

    @classmethod
    def empty(cls, q_BNSH: Tensor) -> "MergedAttention":
        layout = torch.contiguous_format
        out_BNSH = torch.zeros_like(q_BNSH, dtype=torch.float32, memory_format=layout)
        lse_BNS = torch.full_like(out_BNSH[..., 0], -math.inf, memory_format=layout)
        return cls(q_BNSH, out_BNSH, lse_BNS, flash_is_chosen(q_BNSH))

    def add(self, keys_values: Tensor, blocks: Iterable[Block]) -> None:
        """`keys_values` is [2, B, K, S, H]."""
        for block in blocks:
            rows = block.samples, slice(None), block.queries
            q, (k, v) = self.q_BNSH[rows], keys_values[:, block.samples, :, block.keys]
            forward = flash_forward if self.flash and _fits_flash(q, block) else _plain_forward
            out, lse, generator = forward(q, k, v, block)
            self.generator = generator or self.generator
            merge_(self.out_BNSH[rows], self.lse_BNS[rows], out, lse)

    def add_gradients_(
        self,
        gradient_BNSH: Tensor,
        dq_BNSH: Tensor,
        d_keys_values: Tensor,
        keys_values: Tensor,
        blocks: Iterable[Block],
    ) -> None:
        """Adds the gradients of the blocks, from that of the merged output."""
        for block in blocks:
            rows, columns = ((block.samples, slice(None), each) for each in (block.queries, block.keys))
            gradient, q, out = (t[rows] for t in (gradient_BNSH, self.q_BNSH, self.out_BNSH))
            k, v = (t[columns] for t in keys_values)
            saved = (q, k, v, out, self.lse_BNS[rows].contiguous())
            if self.flash and _fits_flash(q, block):
                dq, dk, dv = flash_backward(gradient, saved, block, self.generator)
            else:
                dq, dk, dv = _plain_backward(gradient, saved, block)
            dq_BNSH[rows] += dq
            d_keys_values[0][columns] += dk
            d_keys_values[1][columns] += dv


def merge_(out_BNSH: Tensor, lse_BNS: Tensor, more_BNSH: Tensor, more_lse_BNS: Tensor) -> None:
    """Merges a partial result into another in place: both are rescaled to the common sum of exponentials."""
    total = torch.logaddexp(lse_BNS, more_lse_BNS)
    out_BNSH.mul_((lse_BNS - total).exp()[..., None])
    out_BNSH.addcmul_(more_BNSH.float(), (more_lse_BNS - total).exp()[..., None])
    lse_BNS.copy_(total)


def _fits_flash(q: Tensor, block: Block) -> bool:
    """CUDA's flash kernel takes no mask, so short documents that share a block use the plain operations."""
    return not (block.cuts and q.is_cuda)


# Output, lse and state of the random generator.
PartialResult = tuple[Tensor, Tensor, tuple[Tensor, ...]]
# Queries, keys, values, output and lse.
Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def flash_forward(q: Tensor, k: Tensor, v: Tensor, block: Block) -> PartialResult:
    if not q.is_cuda:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **_mask_for_cpu(q, block))
        return out, lse, ()
    if block.left is not None:
        rows = (t.transpose(1, 2) for t in (q, k, v))
        lengths = (None, None, q.shape[2], k.shape[2])
        out, lse, *generator, _ = _aten._flash_attention_forward(
            *rows, *lengths, 0.0, block.causal, False, **_window_for_cuda(block)
        )
        return out.transpose(1, 2), lse, tuple(generator)
    out, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, block.causal, False
    )
    return out, lse, (seed, offset)


def flash_backward(
    gradient: Tensor, saved: Saved, block: Block, generator: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse = saved
    if not q.is_cuda:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, lse, **_mask_for_cpu(q, block)
        )
    lengths = (None, None, q.shape[2], k.shape[2])
    if block.left is not None:
        rows = [t.transpose(1, 2) for t in (gradient, q, k, v, out)]
        gradients = _aten._flash_attention_backward(
            *rows, lse, *lengths, 0.0, block.causal, *generator, **_window_for_cuda(block)
        )
        dq, dk, dv = (t.transpose(1, 2) for t in gradients)
        return dq, dk, dv
    return _aten._scaled_dot_product_flash_attention_backward(
        gradient, q, k, v, out, lse, *lengths, 0.0, block.causal, *generator
    )


def _mask_for_cpu(q: Tensor, block: Block) -> dict[str, Any]:
    unseen = None if block.left is None and not block.cuts else block_mask(block, q.device)
    if unseen is None:
        return {"dropout_p": 0.0, "is_causal": block.causal}
    mask = torch.zeros(unseen.shape, dtype=q.dtype, device=q.device).masked_fill(unseen, -math.inf)
    return {"dropout_p": 0.0, "is_causal": False, "attn_mask": mask}


def _window_for_cuda(block: Block) -> dict[str, int]:
    # The kernel aligns windows to the last query and the last key. -1 means unlimited.
    rows, columns = (s.stop - s.start for s in (block.queries, block.keys))
    left = (block.left or 0) + columns - rows
    return {"window_size_left": left, "window_size_right": 0 if block.causal else -1}


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, block: Block) -> PartialResult:
    """Attention of a block in plain fp32 operations, for what the flash kernel does not support."""
    scores_BKGST = _scores(q, k, block)
    lse_BKGS = scores_BKGST.logsumexp(-1)
    weights = (scores_BKGST - lse_BKGS[..., None]).exp()
    return (weights @ v.float()[:, :, None]).flatten(1, 2), lse_BKGS.flatten(1, 2), ()


def _plain_backward(gradient: Tensor, saved: Saved, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse = saved
    groups = k.shape[1]
    gradient, out, q_BKGSH = (t.float().unflatten(1, (groups, -1)) for t in (gradient, out, q))
    k_BK1TH, v_BK1TH = k.float()[:, :, None], v.float()[:, :, None]
    weights = (_scores(q, k, block) - lse.unflatten(1, (groups, -1))[..., None]).exp()
    d_weights = gradient @ v_BK1TH.mT - (gradient * out).sum(-1, keepdim=True)
    d_scores = weights * d_weights * q.shape[-1] ** -0.5
    dk, dv = (d_scores.mT @ q_BKGSH).sum(2), (weights.mT @ gradient).sum(2)
    return (d_scores @ k_BK1TH).flatten(1, 2), dk, dv


def _scores(q: Tensor, k: Tensor, block: Block) -> Tensor:
    """Scaled scores, with queries grouped by their key head: [B, K, G, S, T]."""
    scaled = q.float().unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5
    scores = scaled @ k.float()[:, :, None].mT
    unseen = block_mask(block, q.device)
    return scores if unseen is None else scores.masked_fill(unseen, -math.inf)


# --- blocks of chunks: queries and keys that are not neighbours in the sequence ---
#
# Chunks of `size` tokens are given by their index in the sequence, in memory order.


def chunk_blocks(
    documents: DocumentStarts | None,
    queries: Sequence[int],
    keys: Sequence[int],
    size: int,
    window: int | None,
) -> Iterator[Block]:
    """Blocks of chunks of queries and keys if attention is restricted to documents or a window.

    Blocks need no mask for documents, except for short documents inside a chunk: two different chunks share
    at most one document, whose part is a rectangle.
    """
    groups = [(slice(None), (0,))] if documents is None else group_equal_starts(documents)
    pairs = itertools.product(groups, enumerate(queries), enumerate(keys))
    for (samples, starts), (place, number), (key_place, key_number) in pairs:
        first, after = number * size, (number + 1) * size
        shift, key_shift = place * size - first, (key_place - key_number) * size
        if number == key_number:
            for piece in document_ranges(starts, first, after):
                left = None if window is None or window >= piece.end - piece.begin - 1 else window
                of_queries, of_keys = (slice(piece.begin + by, piece.end + by) for by in (shift, key_shift))
                yield Block(of_queries, of_keys, causal=True, left=left, samples=samples, cuts=piece.cuts)
        elif number > key_number:
            # The document that reaches from the chunk of keys into the chunk of queries.
            after_keys = (key_number + 1) * size
            of_last_key = bisect_right(starts, after_keys - 1) - 1
            first_key = max(key_number * size, starts[of_last_key])
            if of_last_key + 1 < len(starts):
                after = min(after, starts[of_last_key + 1])
            if window is not None:
                # Drop keys that no query sees, and queries that see no key.
                first_key, after = max(first_key, first - window), min(after, after_keys + window)
            if first < after and first_key < after_keys:
                left = (
                    None if window is None or after - 1 - first_key <= window else window - first + first_key
                )
                of_queries = slice(first + shift, after + shift)
                of_keys = slice(first_key + key_shift, after_keys + key_shift)
                yield Block(of_queries, of_keys, causal=False, left=left, samples=samples)


# --- sequences that are whole on this rank ---


def attend_whole(
    q_BNSH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    dropout: float = 0.0,
    window: int | None = None,
    documents: DocumentStarts | None = None,
) -> Tensor:
    """Causal attention over sequences that are whole on this rank, with `window` to at most so many previous
    tokens.

    With `documents`, each document is attended to as a shorter sequence, which saves work and needs no
    special kernel. Short neighbours share a call with a mask of at most TOGETHER² elements; there is never a
    mask of a whole sequence.
    """
    if documents is None:
        return _attend_causal(q_BNSH, k_BKSH, v_BKSH, dropout, window)
    # Of the kernels that the user may have chosen, CUDA's flash kernel does not support a mask.
    kernels = torch.backends.cuda
    takes_masks = not q_BNSH.is_cuda or kernels.mem_efficient_sdp_enabled() or kernels.math_sdp_enabled()
    groups = group_equal_starts(documents)
    counts = [samples.stop - samples.start for samples, _ in groups]
    attended = []
    for (_, starts), *of_samples in zip(groups, *(t.split(counts) for t in (q_BNSH, k_BKSH, v_BKSH))):
        ranges = document_ranges(starts, 0, q_BNSH.shape[2], MAX_JOINT_TOKENS if takes_masks else 0)
        lengths = [piece.end - piece.begin for piece in ranges]
        # `split`, not slices: the gradient of each slice would be as large as the whole tensor.
        parts = zip(ranges, *(t.split(lengths, dim=2) for t in of_samples))
        outputs = [_attend_causal(q, k, v, dropout, window, piece.cuts) for piece, q, k, v in parts]
        attended.append(torch.cat(outputs, dim=2))
    return torch.cat(attended)


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
        return _FlashWindow.apply(*rows, block)
    unseen = block_mask(block, q_BNSH.device)
    assert unseen is not None
    # Kernels with a mask need a key head for every query head.
    copies = q_BNSH.shape[1] // k_BKSH.shape[1]
    keys, values = (t.repeat_interleave(copies, dim=1) if copies > 1 else t for t in (k_BKSH, v_BKSH))
    return F.scaled_dot_product_attention(q_BNSH, keys, values, attn_mask=~unseen, dropout_p=dropout)


class _FlashWindow(torch.autograd.Function):
    """Sliding-window attention in CUDA's flash kernel; `scaled_dot_product_attention` would need a mask."""

    @staticmethod
    def forward(ctx: Any, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, block: Block) -> Tensor:
        out, lse, ctx.generator = flash_forward(q_BNSH, k_BKSH, v_BKSH, block)
        ctx.save_for_backward(q_BNSH, k_BKSH, v_BKSH, out, lse)
        ctx.block = block
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return *flash_backward(gradients[0].contiguous(), ctx.saved_tensors, ctx.block, ctx.generator), None

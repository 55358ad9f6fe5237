"""Attention of some queries to some of their keys, in parts that can be merged.

The part of a block is its output and, for each query, the logarithm of the sum of exponentials (lse) it was divided by. Merged
parts give the attention to all keys together; with the merged output and lse, the backward of each block gives its
part of the gradients, and these only need to be added.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
# What CUDA's flash kernel takes.
_WIDEST_HEAD = 256
_HEAD_MULTIPLE = 8


@dataclass(frozen=True)
class Block:
    """Queries and keys by their place on this rank. `causal`: query i sees keys 0 … i of the block, else all.

    `left`: and of these none that comes more than so many before key i. `samples` are the sequences it is about. `cuts`: in a
    causal block, where new documents begin, whose queries see no key before.
    """

    queries: slice
    keys: slice
    causal: bool
    left: int | None = None
    samples: slice = field(default_factory=lambda: slice(None))
    cuts: tuple[int, ...] = ()


def hidden(block: Block, device: torch.device) -> Tensor | None:
    """True where a query does not see a key; nothing if every query sees all."""
    rows, columns = (s.stop - s.start for s in (block.queries, block.keys))
    query, key = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)
    unseen = key > query if block.causal else None
    if block.left is not None:
        before = key < query - block.left
        unseen = before if unseen is None else unseen | before
    if block.cuts:
        document = torch.bucketize(key, torch.tensor(block.cuts, device=device), right=True)
        other = document[:, None] != document
        unseen = other if unseen is None else unseen | other
    return unseen


def flash_is_chosen(q_BNSH: Tensor) -> bool:
    """Whether blocks run in torch's flash kernel. To be asked in forward: the user's choice is not known in backward."""
    if not torch.backends.cuda.flash_sdp_enabled():
        return False
    if not q_BNSH.is_cuda:
        return True
    width = q_BNSH.shape[-1]
    half = q_BNSH.dtype in (torch.bfloat16, torch.float16)
    return half and width <= _WIDEST_HEAD and width % _HEAD_MULTIPLE == 0


class MergedAttention:
    """Adds up blocks: the output and the lse of every query, in fp32."""

    def __init__(self, q_BNSH: Tensor, flash: bool) -> None:
        self.q_BNSH = q_BNSH
        self.flash = flash
        self.generator: tuple[Tensor, ...] = ()
        self.out_BNSH = torch.zeros_like(q_BNSH, dtype=torch.float32, memory_format=torch.contiguous_format)
        self.lse_BNS = torch.full_like(
            self.out_BNSH[..., 0], -math.inf, memory_format=torch.contiguous_format
        )

    def add(self, keys_values: Tensor, blocks: Iterable[Block]) -> None:
        """`keys_values` is [2, B, K, S, H]."""
        for block in blocks:
            rows = block.samples, slice(None), block.queries
            q, (k, v) = self.q_BNSH[rows], keys_values[:, block.samples, :, block.keys]
            forward = flash_forward if self.flash and _fits_flash(q, block) else _plain_forward
            out, lse, generator = forward(q, k, v, block)
            self.generator = generator or self.generator
            merge_(self.out_BNSH[rows], self.lse_BNS[rows], out, lse)


def merge_(out_BNSH: Tensor, lse_BNS: Tensor, more_BNSH: Tensor, more_lse_BNS: Tensor) -> None:
    """Adds attention to more keys, in place: each part is scaled from its own sum of exponentials to the common one."""
    together = torch.logaddexp(lse_BNS, more_lse_BNS)
    out_BNSH.mul_((lse_BNS - together).exp()[..., None])
    out_BNSH.addcmul_(more_BNSH.float(), (more_lse_BNS - together).exp()[..., None])
    lse_BNS.copy_(together)


@dataclass(frozen=True)
class Attended:
    """What backward needs: the merged result, and the gradient of its output."""

    q_BNSH: Tensor
    out_BNSH: Tensor
    lse_BNS: Tensor
    gradient_BNSH: Tensor
    flash: bool
    # CUDA's kernel wants the state of its generator back, which without dropout is the same for every block.
    generator: tuple[Tensor, ...]

    def add_gradients_(
        self, dq_BNSH: Tensor, d_keys_values: Tensor, keys_values: Tensor, blocks: Iterable[Block]
    ) -> None:
        """Adds the blocks' parts of the gradients."""
        for block in blocks:
            rows, columns = (
                (block.samples, slice(None), block.queries),
                (block.samples, slice(None), block.keys),
            )
            gradient, q, out = (t[rows] for t in (self.gradient_BNSH, self.q_BNSH, self.out_BNSH))
            lse = self.lse_BNS[rows].contiguous()
            k, v = (t[columns] for t in keys_values)
            inputs = (gradient, q, k, v, out, lse, block)
            flash = self.flash and _fits_flash(q, block)
            dq, dk, dv = flash_backward(*inputs, self.generator) if flash else _plain_backward(*inputs)
            dq_BNSH[rows] += dq
            d_keys_values[0][columns] += dk
            d_keys_values[1][columns] += dv


def _fits_flash(q: Tensor, block: Block) -> bool:
    """CUDA's kernel takes no mask, so the few short documents that share a block are computed in plain operations."""
    return not (block.cuts and q.is_cuda)


# Output, lse, and what CUDA's kernel says of its generator.
Part = tuple[Tensor, Tensor, tuple[Tensor, ...]]


def flash_forward(q: Tensor, k: Tensor, v: Tensor, block: Block) -> Part:
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
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block: Block,
    generator: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    if not q.is_cuda:
        found: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, lse, **_mask_for_cpu(q, block)
        )
        return found
    lengths = (None, None, q.shape[2], k.shape[2])
    if block.left is not None:
        rows = [t.transpose(1, 2) for t in (gradient, q, k, v, out)]
        found = _aten._flash_attention_backward(
            *rows, lse, *lengths, 0.0, block.causal, *generator, **_window_for_cuda(block)
        )
        dq, dk, dv = (t.transpose(1, 2) for t in found)
        return dq, dk, dv
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
        gradient, q, k, v, out, lse, *lengths, 0.0, block.causal, *generator
    )
    return dq, dk, dv


def _mask_for_cpu(q: Tensor, block: Block) -> dict[str, Any]:
    unseen = None if block.left is None and not block.cuts else hidden(block, q.device)
    if unseen is None:
        return {"dropout_p": 0.0, "is_causal": block.causal}
    mask = torch.zeros(unseen.shape, dtype=q.dtype, device=q.device).masked_fill(unseen, -math.inf)
    return {"dropout_p": 0.0, "is_causal": False, "attn_mask": mask}


def _window_for_cuda(block: Block) -> dict[str, int]:
    # The kernel counts from the last query and the last key back. -1: as far as there are keys.
    rows, columns = (s.stop - s.start for s in (block.queries, block.keys))
    left = (block.left or 0) + columns - rows
    return {"window_size_left": left, "window_size_right": 0 if block.causal else -1}


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, block: Block) -> Part:
    """In plain operations and fp32, for what the flash kernel does not take."""
    scores_BKGST = _scores(q, k, block)
    lse_BKGS = scores_BKGST.logsumexp(-1)
    weights = (scores_BKGST - lse_BKGS[..., None]).exp()
    return (weights @ v.float()[:, :, None]).flatten(1, 2), lse_BKGS.flatten(1, 2), ()


def _plain_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    groups = k.shape[1]
    gradient, out, q_BKGSH = (t.float().unflatten(1, (groups, -1)) for t in (gradient, out, q))
    k_BK1TH, v_BK1TH = k.float()[:, :, None], v.float()[:, :, None]
    weights = (_scores(q, k, block) - lse.unflatten(1, (groups, -1))[..., None]).exp()
    d_weights = gradient @ v_BK1TH.mT - (gradient * out).sum(-1, keepdim=True)
    d_scores = weights * d_weights * q.shape[-1] ** -0.5
    dk, dv = (d_scores.mT @ q_BKGSH).sum(2), (weights.mT @ gradient).sum(2)
    return (d_scores @ k_BK1TH).flatten(1, 2), dk, dv


def _scores(q: Tensor, k: Tensor, block: Block) -> Tensor:
    """The scaled products of queries and keys, the queries grouped by the key head they share: [B, K, G, S, T]."""
    scaled = q.float().unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5
    scores = scaled @ k.float()[:, :, None].mT
    unseen = hidden(block, q.device)
    return scores if unseen is None else scores.masked_fill(unseen, -math.inf)

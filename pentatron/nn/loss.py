"""Cross entropy per token, with the vocabulary spread over the tensor axis."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pentatron.parallel.collectives import Group, all_reduce_, all_reduce_max_


def token_losses(
    logits_BSV: Tensor, labels_BS: Tensor, vocabulary: int, first: int = 0, group: Group | None = None
) -> Tensor:
    """The loss of every token, [B, S] in fp32. `logits_BSV` are those of this rank's words, from `first` on; words
    from `vocabulary` on are padding and take no probability."""
    if group is None or group.size == 1:
        logits = logits_BSV[..., :vocabulary].float()
        losses = F.cross_entropy(logits.flatten(0, 1), labels_BS.flatten(), reduction="none")
        return losses.view(labels_BS.shape)
    losses = _SplitCrossEntropy.apply(logits_BSV, labels_BS, vocabulary, first, group)
    assert isinstance(losses, Tensor)
    return losses


class _SplitCrossEntropy(torch.autograd.Function):
    """`log Σ exp(z) − z[label]`: the largest logit, then both sums, are agreed on by all ranks."""

    @staticmethod
    def forward(
        ctx: Any, logits_BSV: Tensor, labels_BS: Tensor, vocabulary: int, first: int, group: Group
    ) -> Tensor:
        shifted = logits_BSV.float()
        padding = first + shifted.shape[-1] - vocabulary
        if padding > 0:
            shifted = shifted.clone() if shifted.data_ptr() == logits_BSV.data_ptr() else shifted
            shifted[..., max(0, vocabulary - first) :] = -torch.inf
        largest = all_reduce_max_(shifted.amax(-1), group)
        shifted = shifted - largest[..., None]
        local = labels_BS - first
        elsewhere = (local < 0) | (local >= shifted.shape[-1])
        local = local.masked_fill(elsewhere, 0)
        of_label = shifted.gather(-1, local[..., None]).squeeze(-1).masked_fill(elsewhere, 0.0)
        weights = shifted.exp_()
        sums = all_reduce_(torch.stack((weights.sum(-1), of_label)), group)
        ctx.save_for_backward(weights.div_(sums[0][..., None]), local, elsewhere)
        ctx.dtype = logits_BSV.dtype
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, local, elsewhere = ctx.saved_tensors
        gradient = probabilities.clone()
        gradient.scatter_add_(-1, local[..., None], (elsewhere.float() - 1.0)[..., None])
        return (gradient * gradients[0][..., None]).to(ctx.dtype), None, None, None, None

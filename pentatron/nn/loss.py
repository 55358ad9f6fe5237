"""Cross entropy per token."""

import torch.nn.functional as F
from torch import Tensor


def token_losses(logits_BSV: Tensor, labels_BS: Tensor, vocab_size: int) -> Tensor:
    """The loss of every token, [B, S] in fp32. Padding rows of the vocabulary take no probability."""
    logits = logits_BSV[..., :vocab_size].float()
    return F.cross_entropy(logits.flatten(0, 1), labels_BS.flatten(), reduction="none").view(labels_BS.shape)

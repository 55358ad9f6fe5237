"""The two passes of the cross entropy over logits: one for the loss, one more that turns them into their gradient.

A row is a token; `words` of its entries are words, from number `first` of the vocabulary on, and the others padding. Whatever the
logits are in (bf16, say), sums are in fp32. Here rows are taken some at a time, so that no more than a block of them is there in fp32.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 2**25
# Of a rank without words: finite, so that the difference of two of them is a number.
_NO_LOGIT = -3.0e38


def row_sums(logits: Tensor, labels: Tensor, words: int, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of every row the largest logit, the sum of `exp(logit − largest)`, and the label's logit: 0 if it is not here."""
    found = torch.zeros(3, len(labels), dtype=torch.float32, device=logits.device)
    largest, sums, of_label = found
    if words == 0:
        return largest.fill_(_NO_LOGIT), sums, of_label
    local, elsewhere = _places(labels, words, first)
    for rows in _blocks(logits):
        block = logits[rows, :words]
        largest[rows] = block.amax(-1)
        # The largest logarithm of a share is that of the largest logit: minus the logarithm of the sum.
        sums[rows] = block.log_softmax(-1, dtype=torch.float32).amax(-1).neg_().exp_()
        of_label[rows] = block.gather(-1, local[rows, None]).squeeze(-1)
    return largest, sums, of_label.masked_fill_(elsewhere, 0.0)


def write_gradient(
    gradient: Tensor,
    logits: Tensor,
    labels: Tensor,
    log_sums: Tensor,
    weights: Tensor,
    words: int,
    first: int,
) -> None:
    """`(softmax − 1 at the label) · weight` of every row; `gradient` may be `logits` itself."""
    if words:
        local, elsewhere = _places(labels, words, first)
        at_label = elsewhere.float() - 1.0
        for rows in _blocks(logits):
            block = (logits[rows, :words] - log_sums[rows, None]).float().exp_()
            block.scatter_add_(-1, local[rows, None], at_label[rows, None])
            torch.mul(block, weights[rows, None], out=gradient[rows, :words])
    gradient[:, words:] = 0


def _places(labels: Tensor, words: int, first: int) -> tuple[Tensor, Tensor]:
    """Where each label is among the words here, and which are not."""
    local = labels - first
    elsewhere = (local < 0) | (local >= words)
    return local.masked_fill(elsewhere, 0), elsewhere


def _blocks(logits: Tensor) -> Iterator[slice]:
    rows, width = logits.shape
    count = max(1, _BLOCK_ELEMENTS // width)
    return (slice(start, start + count) for start in range(0, rows, count))

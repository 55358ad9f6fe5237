"""Cross entropy over logits in two passes: one for the loss, one that overwrites the logits with their
gradient.

A row is a token. The first `vocab` columns are vocabulary entries, starting with entry `first`;
the others are padding. Sums are in fp32, also for bf16 logits. This implementation processes blocks of rows,
so that only one block is in fp32.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 2**25
# The maximum on a rank without vocabulary entries: finite, so that a difference of two of them is not NaN.
_NO_LOGIT = -3.0e38


def row_sums(logits: Tensor, labels: Tensor, vocab: int, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns per row the largest logit, the sum of `exp(logit − largest)` and the label's logit (or 0)."""
    results = torch.zeros(3, len(labels), dtype=torch.float32, device=logits.device)
    largest, sums, of_label = results
    if vocab == 0:
        return largest.fill_(_NO_LOGIT), sums, of_label
    local, elsewhere = _local_labels(labels, vocab, first)
    for rows in _blocks(logits):
        block = logits[rows, :vocab]
        largest[rows] = block.amax(-1)
        # The largest log-softmax belongs to the largest logit and is minus the log of the sum.
        sums[rows] = block.log_softmax(-1, dtype=torch.float32).amax(-1).neg_().exp_()
        of_label[rows] = block.gather(-1, local[rows, None]).squeeze(-1)
    return largest, sums, of_label.masked_fill_(elsewhere, 0.0)


def write_gradient(
    output: Tensor, logits: Tensor, labels: Tensor, log_sums: Tensor, weights: Tensor, vocab: int, first: int
) -> None:
    """Writes `(softmax − 1 at the label) · weight` for every row; `output` may be `logits` itself."""
    if vocab:
        local, elsewhere = _local_labels(labels, vocab, first)
        at_label = elsewhere.float() - 1.0
        for rows in _blocks(logits):
            block = (logits[rows, :vocab] - log_sums[rows, None]).float().exp_()
            block.scatter_add_(-1, local[rows, None], at_label[rows, None])
            torch.mul(block, weights[rows, None], out=output[rows, :vocab])
    output[:, vocab:] = 0


def _local_labels(labels: Tensor, vocab: int, first: int) -> tuple[Tensor, Tensor]:
    """Returns the local index of each label, and whether it belongs to another rank."""
    local = labels - first
    elsewhere = (local < 0) | (local >= vocab)
    return local.masked_fill(elsewhere, 0), elsewhere


def _blocks(logits: Tensor) -> Iterator[slice]:
    rows, width = logits.shape
    count = max(1, _BLOCK_ELEMENTS // width)
    return (slice(start, start + count) for start in range(0, rows, count))

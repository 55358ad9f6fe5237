"""Cross entropy per token, with the vocabulary split across the tensor axis.

The logits of a large vocabulary are the largest tensor of a step. The fused implementation (on a GPU;
decision 0050) stores them once, in the model's precision, and backward overwrites them with their gradient.
The plain implementation is torch's, over fp32 logits.
"""

from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from pentatron.errors import UserError
from pentatron.nn.linear import VocabParallelEmbedding
from pentatron.ops import cross_entropy
from pentatron.ops.dispatch import uses_triton
from pentatron.parallel.collectives import Group, all_reduce_, all_reduce_max_
from pentatron.parallel.world import ALONE
from pentatron.settings.decision_types import LossDecision

# torch's label of tokens without a loss.
_IGNORED = -100
# Tokens per chunk without gradients: enough for matrix products at full speed.
_EVALUATION_CHUNK = 4096


@dataclass(frozen=True)
class CrossEntropy:
    """How losses are computed.

    `fusion`: fused or not, `auto` on a GPU. `implementation`: of the fused kernels. `chunk`: maximum number
    of tokens whose logits exist at a time.
    """

    fusion: Literal["auto", "on", "off"] = "auto"
    implementation: Literal["auto", "native", "te"] = "auto"
    chunk: int = 32768

    def fuses(self, x: Tensor) -> bool:
        wanted = self.fusion == "on" or (self.fusion == "auto" and x.is_cuda)
        # A compiled graph generates its own kernels for the plain implementation.
        return wanted and not torch.compiler.is_compiling()

    def from_logits(
        self, logits_BSV: Tensor, labels_BS: Tensor, vocabulary: int, first: int = 0, group: Group = ALONE
    ) -> Tensor:
        """`token_losses` from logits, which are not modified."""
        given = (logits_BSV, labels_BS, vocabulary, first, group)
        if not self.fuses(logits_BSV):
            return token_losses(*given)
        return _FusedCrossEntropy.apply(*given, self.implementation, False)

    def from_hidden_states(
        self, head: VocabParallelEmbedding, x_BSD: Tensor, labels_BS: Tensor, vocabulary: int
    ) -> Tensor:
        """Computes the loss of every token, [B, S] in fp32, from the hidden states after the final norm."""
        group = head.axis.group
        if not self.fuses(x_BSD):
            return token_losses(head.logits(x_BSD), labels_BS, vocabulary, head.first, group)

        def losses(x: Tensor, labels: Tensor) -> Tensor:
            logits, how = head.apply_weight(x), self.implementation
            return _FusedCrossEntropy.apply(logits, labels, vocabulary, head.first, group, how, True)

        x_TD, labels_T = head.axis.enter(x_BSD).flatten(0, 1), labels_BS.flatten()
        run, chunk = losses, min(self.chunk, _EVALUATION_CHUNK)
        if torch.is_grad_enabled():
            run = partial(checkpoint, losses, use_reentrant=False, preserve_rng_state=False)
            # A deferred weight gradient needs the gradients of all logits, so chunks would save no memory.
            chunk = len(labels_T) if head.deferred is not None else self.chunk
        # Saves the logits of the last chunk, where backward begins, and recomputes the others.
        *chunks, last = zip(x_TD.split(chunk), labels_T.split(chunk))
        computed = [*(run(*inputs) for inputs in chunks), losses(*last)]
        return (torch.cat(computed) if chunks else computed[0]).view(labels_BS.shape)


def cross_entropy_of(decided: LossDecision) -> CrossEntropy:
    return CrossEntropy("on" if decided.on else "off", cast(Any, decided.implementation), decided.chunk)


def token_losses(
    logits_BSV: Tensor, labels_BS: Tensor, vocabulary: int, first: int = 0, group: Group | None = None
) -> Tensor:
    """Computes the loss of every token, [B, S] in fp32.

    `logits_BSV` is the shard of the vocabulary from `first` on. Entries from `vocabulary` on are padding with
    probability 0.
    """
    if group is None or group.size == 1:
        logits = logits_BSV[..., :vocabulary].float()
        losses = F.cross_entropy(logits.flatten(0, 1), labels_BS.flatten(), reduction="none")
        return losses.view(labels_BS.shape)
    return _SplitCrossEntropy.apply(logits_BSV, labels_BS, vocabulary, first, group)


def _passes(implementation: str, logits: Tensor) -> ModuleType:
    """Returns the module of the two passes: `ops.cross_entropy`, or its Triton kernels."""
    if implementation != "native" and uses_triton(logits):
        from pentatron.ops import triton_cross_entropy

        return triton_cross_entropy
    if implementation == "te":
        raise UserError(
            "--cross-entropy-fusion-impl te is a Triton kernel, and there is no Triton or no GPU here; leave it out"
        )
    return cross_entropy


class _FusedCrossEntropy(torch.autograd.Function):
    """`log Σ exp(z) − z[label]` with two all-reduces: the largest logit, then both sums.

    With `overwrite`, backward writes the gradient into the memory of the logits, which nothing else reads.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        vocabulary: int,
        first: int,
        group: Group,
        implementation: str,
        overwrite: bool,
    ) -> Tensor:
        passes = _passes(implementation, logits)
        # Logits of users may have any strides; the kernels read row by row.
        rows = logits.flatten(0, -2) if overwrite else logits.flatten(0, -2).contiguous()
        local_vocab = min(max(0, vocabulary - first), rows.shape[-1])
        flat = labels.flatten().contiguous()
        local_largest, local_sums, of_label = passes.row_sums(rows, flat, local_vocab, first)
        largest, sums = local_largest, local_sums
        if group.size > 1:
            largest = all_reduce_max_(local_largest.clone(), group)
            local = torch.stack((local_sums * (local_largest - largest).exp(), of_label))
            sums, of_label = all_reduce_(local, group)
        log_sums = largest + sums.log()
        ctx.save_for_backward(logits if overwrite else rows, flat, log_sums)
        ctx.shape, ctx.local_vocab, ctx.first = logits.shape, local_vocab, first
        ctx.passes, ctx.overwrite, ctx.vocabulary = passes, overwrite, vocabulary
        return _without_ignored(log_sums - of_label, flat, vocabulary).view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        logits, labels, log_sums = ctx.saved_tensors
        weights = gradients[0].flatten().float().masked_fill(~_is_valid(labels, ctx.vocabulary), 0.0)
        rows = logits.flatten(0, -2)
        gradient = rows if ctx.overwrite else torch.empty_like(rows)
        ctx.passes.write_gradient(gradient, rows, labels, log_sums, weights, ctx.local_vocab, ctx.first)
        if ctx.overwrite:
            # Makes autograd raise if the overwritten logits are used afterwards, such as by a second
            # backward.
            torch.autograd.graph.increment_version(logits)
        # Detached, because a deferred weight gradient would keep the graph of the logits alive.
        return gradient.detach().view(ctx.shape), None, None, None, None, None, None


def _is_valid(labels: Tensor, vocabulary: int) -> Tensor:
    return (labels >= 0) & (labels < vocabulary)


def _without_ignored(losses: Tensor, labels: Tensor, vocabulary: int) -> Tensor:
    """Sets the loss of ignored labels to 0, as torch does, and that of invalid labels to NaN."""
    ignored_or_nan = torch.where(labels == _IGNORED, 0.0, torch.nan)
    return torch.where(_is_valid(labels, vocabulary), losses, ignored_or_nan)


class _SplitCrossEntropy(torch.autograd.Function):
    """`log Σ exp(z) − z[label]` with two all-reduces: the largest logit, then both sums."""

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
        ctx.dtype, ctx.invalid = logits_BSV.dtype, ~_is_valid(labels_BS, vocabulary)
        return _without_ignored(sums[0].log() - sums[1], labels_BS, vocabulary)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, local, elsewhere = ctx.saved_tensors
        gradient = probabilities.clone()
        gradient.scatter_add_(-1, local[..., None], (elsewhere.float() - 1.0)[..., None])
        weights = gradients[0].masked_fill(ctx.invalid, 0.0)
        return (gradient * weights[..., None]).to(ctx.dtype), None, None, None, None

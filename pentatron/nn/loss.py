"""Cross entropy per token, with the vocabulary spread over the tensor axis.

Logits of a large vocabulary are the largest thing in a step. The fused way (on a GPU; decision 0050) has them once, in the model's
precision: backward writes their gradient over them. The plain way is torch's own, over logits in fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from pentatron.errors import UserError
from pentatron.nn.linear import VocabularyTable
from pentatron.ops import cross_entropy
from pentatron.ops.dispatch import by_kernel
from pentatron.parallel.collectives import Group, all_reduce_, all_reduce_max_
from pentatron.parallel.world import ALONE
from pentatron.settings.decision_types import LossDecision

# Labels of tokens without a loss, as torch marks them.
_IGNORED = -100
# Tokens at a time where no gradient is wanted: enough for matmuls at full speed.
_EVALUATED = 4096


@dataclass(frozen=True)
class CrossEntropy:
    """How losses are computed: fused or not (`auto`: on a GPU), by which implementation, and of how many tokens the logits may be
    there at a time."""

    fusion: Literal["auto", "on", "off"] = "auto"
    implementation: Literal["auto", "native", "te"] = "auto"
    chunk: int = 32768

    def fuses(self, x: Tensor) -> bool:
        # A compiler that sees the whole model makes its own kernels of the plain way.
        return (
            self.fusion == "on" or (self.fusion == "auto" and x.is_cuda)
        ) and not torch.compiler.is_compiling()

    def of_logits(
        self, logits_BSV: Tensor, labels_BS: Tensor, vocabulary: int, first: int = 0, group: Group = ALONE
    ) -> Tensor:
        """As `token_losses`; the logits stay as they are."""
        if not self.fuses(logits_BSV):
            return token_losses(logits_BSV, labels_BS, vocabulary, first, group)
        return self._fused(logits_BSV, labels_BS, vocabulary, first, group, overwrite=False)

    def of_stream(self, head: VocabularyTable, x_BSD: Tensor, labels_BS: Tensor, vocabulary: int) -> Tensor:
        """The loss of every token, [B, S] in fp32, from the normed stream."""
        group = head.axis.group
        if not self.fuses(x_BSD):
            return token_losses(head.logits(x_BSD), labels_BS, vocabulary, head.first, group)

        def losses(x: Tensor, labels: Tensor) -> Tensor:
            return self._fused(head.multiplied(x), labels, vocabulary, head.first, group, overwrite=True)

        x_TD, labels_T = head.axis.enter(x_BSD).flatten(0, 1), labels_BS.flatten()
        return _in_chunks(losses, x_TD, labels_T, self._at_a_time(head, len(labels_T))).view(labels_BS.shape)

    def _at_a_time(self, head: VocabularyTable, tokens: int) -> int:
        if not torch.is_grad_enabled():
            return min(self.chunk, _EVALUATED)
        # A weight gradient that comes later needs the gradients of all logits, so there is nothing to save.
        return tokens if head.deferred is not None else self.chunk

    def _fused(
        self, logits: Tensor, labels: Tensor, vocabulary: int, first: int, group: Group, overwrite: bool
    ) -> Tensor:
        passes = _passes(self.implementation, logits)
        losses = _FusedCrossEntropy.apply(logits, labels, vocabulary, first, group, passes, overwrite)
        assert isinstance(losses, Tensor)
        return losses


def cross_entropy_of(decided: LossDecision) -> CrossEntropy:
    return CrossEntropy("on" if decided.on else "off", cast(Any, decided.implementation), decided.chunk)


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


def _in_chunks(
    losses: Callable[[Tensor, Tensor], Tensor], x_TD: Tensor, labels_T: Tensor, at_a_time: int
) -> Tensor:
    """The logits of the last chunk are kept for backward, which begins there; those of the others are computed again."""
    parts = list(zip(x_TD.split(at_a_time), labels_T.split(at_a_time)))
    made: list[Tensor] = []
    for number, (x, labels) in enumerate(parts, 1):
        again = torch.is_grad_enabled() and number < len(parts)
        made.append(
            checkpoint(losses, x, labels, use_reentrant=False, preserve_rng_state=False)
            if again
            else losses(x, labels)
        )
    return made[0] if len(made) == 1 else torch.cat(made)


class _Passes(Protocol):
    """The module `kernels.cross_entropy`, or the one of the Triton kernels that do the same."""

    def row_sums(
        self, logits: Tensor, labels: Tensor, words: int, first: int
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def write_gradient(
        self,
        gradient: Tensor,
        logits: Tensor,
        labels: Tensor,
        log_sums: Tensor,
        weights: Tensor,
        words: int,
        first: int,
    ) -> None: ...


def _passes(implementation: str, logits: Tensor) -> _Passes:
    if implementation != "native" and by_kernel(logits):
        from pentatron.ops import triton_cross_entropy

        return triton_cross_entropy
    if implementation == "te":
        raise UserError(
            "--cross-entropy-fusion-impl te is a Triton kernel, and there is no Triton or no GPU here; leave it out"
        )
    return cross_entropy


class _FusedCrossEntropy(torch.autograd.Function):
    """`log Σ exp(z) − z[label]`; the largest logit, then both sums, are agreed on by all ranks. With `overwrite`, nobody reads the
    logits but this."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        vocabulary: int,
        first: int,
        group: Group,
        passes: _Passes,
        overwrite: bool,
    ) -> Tensor:
        # Those of users may lie in any order; the passes go row by row.
        rows = logits.flatten(0, -2) if overwrite else logits.flatten(0, -2).contiguous()
        words = min(max(0, vocabulary - first), rows.shape[-1])
        flat = labels.flatten().contiguous()
        own_largest, own_sums, of_label = passes.row_sums(rows, flat, words, first)
        largest, sums = own_largest, own_sums
        if group.size > 1:
            largest = all_reduce_max_(own_largest.clone(), group)
            sums, of_label = all_reduce_(
                torch.stack((own_sums * (own_largest - largest).exp(), of_label)), group
            )
        log_sums = largest + sums.log()
        ctx.save_for_backward(logits if overwrite else rows, flat, log_sums)
        ctx.shape, ctx.words, ctx.first, ctx.vocabulary = logits.shape, words, first, vocabulary
        ctx.passes, ctx.overwrite = passes, overwrite
        # A label that is no word must be noticed: a loss that is no number is.
        otherwise = torch.where(flat == _IGNORED, 0.0, torch.nan)
        return torch.where(_are_words(flat, vocabulary), log_sums - of_label, otherwise).view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        logits, labels, log_sums = ctx.saved_tensors
        weights = gradients[0].flatten().float().masked_fill(~_are_words(labels, ctx.vocabulary), 0.0)
        rows = logits.flatten(0, -2)
        made = rows if ctx.overwrite else torch.empty_like(rows)
        ctx.passes.write_gradient(made, rows, labels, log_sums, weights, ctx.words, ctx.first)
        if ctx.overwrite:
            # For autograd, which refuses whoever wants the logits after this: a second backward, say.
            torch.autograd.graph.increment_version(logits)
        # Without the graph the logits come from, which a gradient that waits would keep alive.
        return made.detach().view(ctx.shape), None, None, None, None, None, None


def _are_words(labels: Tensor, vocabulary: int) -> Tensor:
    return (labels >= 0) & (labels < vocabulary)


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

"""The MoE router: chooses the experts of each token and their weights, and balances their load.

Load-balancing losses are defined on one process: `aux_loss` and the z-loss per micro-batch, `seq_aux_loss`
per sequence, `global_aux_loss` with the load of the whole previous step. Ranks that share a micro-batch
compute the part of their own tokens with the counts of all tokens, so that summed gradients equal those of
one process. A step's losses are the mean over its micro-batches.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pentatron.nn.linear import ReplicatedWeight
from pentatron.nn.options import Axes
from pentatron.parallel.axes import ExpertAxis
from pentatron.settings.model import MoEConfig
from pentatron.settings.model_sizes import router_shape

Z_LOSS = "z_loss"


def loss_weights(moe: MoEConfig) -> dict[str, float]:
    """Weights of the configured losses by name."""
    kinds = moe.moe_router_load_balancing_type
    each = moe.moe_aux_loss_coeff if len(moe.moe_aux_loss_coeff) > 1 else moe.moe_aux_loss_coeff * len(kinds)
    wanted = {kind: weight for kind, weight in zip(kinds, each, strict=True) if kind != "none" and weight > 0}
    if moe.moe_z_loss_coeff:
        wanted[Z_LOSS] = moe.moe_z_loss_coeff
    return wanted


class RouterLoad(nn.Module):
    """The load of one router's experts in this step, and the state that later steps need.

    Tokens are counted in backward, because recompute runs the forward twice.
    """

    previous: Tensor
    bias: Tensor
    counts: Tensor

    def __init__(self, moe: MoEConfig) -> None:
        super().__init__()
        self.experts, self.topk = moe.experts, moe.moe_router_topk
        self.weights = loss_weights(moe)
        self.bias_rate = moe.moe_router_bias_update_rate
        self.has_bias = moe.moe_router_enable_expert_bias
        # Fraction of the tokens of each expert in the previous step; uniform before the first.
        self.register_buffer("previous", torch.full((self.experts,), 1 / self.experts), persistent=False)
        self.register_buffer("bias", torch.zeros(self.experts), persistent=False)
        self.register_buffer("counts", torch.zeros(self.experts, dtype=torch.float64), persistent=False)
        self.losses: dict[str, Tensor] = {}
        self.share = 1.0
        self.scale = 1.0

    def begin_step(self, micro_batches: int, scale: float = 1.0) -> None:
        """Starts a step with `micro_batches` on all ranks; `scale` multiplies the gradients of the losses."""
        self.share, self.scale = 1 / micro_batches, scale
        self.counts.zero_()
        self.losses = {}

    def tally(self) -> Tensor:
        """This rank's counts and losses of the step. `finish_step` takes their sum over all ranks."""
        zero = self.counts.new_zeros(())
        return torch.cat([self.counts, *(self.losses.get(name, zero).reshape(1) for name in self.weights)])

    def finish_step(self, totals: Tensor) -> None:
        """Finishes the step: updates the load of the previous step and the bias."""
        counts = totals[: self.experts]
        self.previous.copy_(counts / counts.sum().clamp(min=1))
        if self.has_bias:
            self.bias.add_(torch.sign(counts.mean() - counts).to(self.bias), alpha=self.bias_rate)

    def kept(self) -> Mapping[str, Tensor]:
        """Tensors that a checkpoint saves; `previous` always, because the kind of balancing can change on
        resume.
        """
        return {"previous": self.previous, **({"bias": self.bias} if self.has_bias else {})}

    def with_losses(
        self, weights_TK: Tensor, logits_BSE: Tensor, scores_BSE: Tensor, chosen_BSK: Tensor, axis: ExpertAxis
    ) -> Tensor:
        """Returns the weights unchanged. `scores_BSE` are normalized over the experts.

        Their backward adds the gradients of the losses and counts the tokens.
        """
        # Number of tokens of each sequence that chose each expert.
        counts_BE = torch.zeros(len(chosen_BSK), self.experts, device=chosen_BSK.device)
        ones = torch.ones_like(chosen_BSK, dtype=counts_BE.dtype).flatten(1)
        counts_BE.scatter_add_(1, chosen_BSK.flatten(1), ones)
        values = {name: self._loss(name, logits_BSE, scores_BSE, counts_BE, axis) for name in self.weights}
        total = weights_TK.new_zeros((), dtype=torch.float32)
        for name, value in values.items():
            total = total + value * (self.weights[name] * self.share)

        def count() -> None:
            self.counts.add_(counts_BE.sum(0))
            for name, value in values.items():
                added = value.detach().double() * self.share
                self.losses[name] = self.losses[name] + added if name in self.losses else added

        return _WithLoss.apply(weights_TK, total, count, self.scale)

    def _loss(
        self, name: str, logits_BSE: Tensor, scores_BSE: Tensor, counts_BE: Tensor, axis: ExpertAxis
    ) -> Tensor:
        batch, length, _ = scores_BSE.shape
        of_sequence = length * axis.sequence.size
        tokens = batch * of_sequence
        match name:
            case "aux_loss":
                # E · Σ f·P over the experts: fraction of the choices times mean score, both over the
                # micro-batch.
                counts_E = axis.sum_over_micro_batch(counts_BE.sum(0))
                scale = self.experts / (self.topk * tokens * tokens)
                return (scores_BSE.sum((0, 1)) * counts_E).sum() * scale
            case "seq_aux_loss":
                # The same of each sequence, averaged.
                counts_BE = axis.sum_over_micro_batch(counts_BE)
                scale = self.experts / (self.topk * of_sequence * of_sequence * batch)
                return (scores_BSE.sum(1) * counts_BE).sum() * scale
            case "global_aux_loss":
                # With the fractions of the whole previous step, which are known in advance.
                return (scores_BSE.sum((0, 1)) * self.previous).sum() * (self.experts / tokens)
        # The z-loss: mean square of log Σ exp.
        return torch.logsumexp(logits_BSE, -1).square().sum() / tokens


class _WithLoss(torch.autograd.Function):
    """Adds a loss where it arises, because stages before the last have no loss to add it to."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, count: Callable[[], None], scale: float) -> Tensor:
        ctx.count = count
        ctx.seed = loss.new_full((), scale)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ctx.count()
        return gradients[0], ctx.seed, None, None


_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
# As in Megatron and DeepSeek. Sigmoid scores are never all zero, but may be small.
_TINY = 1e-20
# Resolution in which weights are compared.
_STEPS = 4096


@dataclass(frozen=True)
class Routing:
    """The experts of every token and their weights.

    Pairs that are not `kept_TK` are dropped (None: all are kept).
    """

    chosen_TK: Tensor
    weights_TK: Tensor
    kept_TK: Tensor | None = None


class Router(ReplicatedWeight):
    """Scores all experts with a linear layer and chooses the best for each token."""

    def __init__(self, hidden: int, moe: MoEConfig, axes: Axes) -> None:
        super().__init__(router_shape(hidden, moe), axes.tensor)
        self.moe, self.axes = moe, axes
        self.load = RouterLoad(moe)

    def forward(self, x_BSD: Tensor) -> Routing:
        dtype = _DTYPES.get(self.moe.moe_router_dtype or "", x_BSD.dtype)
        logits_BSE = F.linear(x_BSD.to(dtype), self.weight.to(dtype)).float()
        weights_BSK, chosen_BSK = self._choose(logits_BSE)
        chosen_TK, weights_TK = chosen_BSK.flatten(0, 1), weights_BSK.flatten(0, 1)
        kept_TK = self._within_capacity(chosen_BSK, weights_BSK.detach())
        if self.training and torch.is_grad_enabled():
            axis = self.axes.expert
            if self.moe.moe_router_score_function == "softmax":
                scores_BSE = logits_BSE.softmax(-1)
            else:
                scores_BSE = logits_BSE.sigmoid()
                scores_BSE = scores_BSE / (scores_BSE.sum(-1, keepdim=True) + _TINY)
            weights_TK = self.load.with_losses(weights_TK, logits_BSE, scores_BSE, chosen_BSK, axis)
        return Routing(chosen_TK, weights_TK.to(x_BSD.dtype), kept_TK)

    def _choose(self, logits_BSE: Tensor) -> tuple[Tensor, Tensor]:
        moe, scores = self.moe, logits_BSE
        sigmoid = moe.moe_router_score_function == "sigmoid"
        if sigmoid or moe.moe_router_pre_softmax:
            scores = logits_BSE.sigmoid() if sigmoid else logits_BSE.softmax(-1)
        chosen = self._best(scores + self.load.bias if sigmoid and self.load.has_bias else scores)
        weights = scores.gather(-1, chosen)
        if sigmoid and moe.moe_router_topk > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        elif scores is logits_BSE:
            weights = weights.softmax(-1)
        factor = moe.moe_router_topk_scaling_factor
        return (weights if factor is None else weights * factor), chosen

    def _best(self, scores_BSE: Tensor) -> Tensor:
        """Experts with the highest scores; with groups, only from the best groups."""
        moe, scores = self.moe, scores_BSE.detach()
        if moe.moe_router_num_groups is not None:
            grouped = scores.unflatten(-1, (moe.moe_router_num_groups, -1))
            of_groups = grouped.topk(moe.moe_router_topk // moe.moe_router_group_topk, -1).values.sum(-1)
            best = of_groups.topk(moe.moe_router_group_topk, -1).indices
            others = torch.ones_like(of_groups, dtype=torch.bool).scatter(-1, best, False)
            scores = grouped.masked_fill(others[..., None], -torch.inf).flatten(-2)
        return scores.topk(moe.moe_router_topk, -1).indices

    def _within_capacity(self, chosen_BSK: Tensor, weights_BSK: Tensor) -> Tensor | None:
        """Which pairs fit the capacity of their expert: those with the largest weights in the micro-batch, or
        the first ones.

        Ranks that share the micro-batch decide together, so that the same tokens are dropped in every layout.
        """
        moe = self.moe
        if moe.moe_expert_capacity_factor is None:
            return None
        axes, (samples, length) = self.axes, chosen_BSK.shape[:2]
        # Indices of this rank's tokens in the micro-batch, ordered by position.
        in_context = length * (axes.tensor.size if axes.tensor.sequence_parallel else 1)
        positions_S = axes.context.positions(in_context, chosen_BSK.device)
        positions_S = axes.tensor.own_sequence(positions_S[None])[0]
        of_samples = torch.arange(samples, device=chosen_BSK.device)[:, None]
        indices = (positions_S * samples + of_samples).flatten()
        tokens = len(indices) * axes.expert.sequence.size
        equal_share = tokens * moe.moe_router_topk / moe.experts
        capacity = min(tokens, math.ceil(equal_share * moe.moe_expert_capacity_factor))
        # Tokens with equal histories have equal weights except for rounding, which depends on the layout.
        # Weights are therefore compared coarsely; of equal ones the first tokens are kept.
        priority_BSK = torch.ones_like(weights_BSK)
        if moe.moe_token_drop_policy == "probs":
            priority_BSK = (weights_BSK.float() * _STEPS).round() + 1
        priority_TE = priority_BSK.new_zeros(len(indices), moe.experts)
        priority_TE.scatter_(1, chosen_BSK.flatten(0, 1), priority_BSK.flatten(0, 1))
        of_all_TE = torch.zeros_like(priority_TE).repeat(axes.expert.sequence.size, 1)
        gather = axes.expert.gather_micro_batch
        of_all_TE.index_copy_(0, gather(indices), gather(priority_TE))
        best_CE = of_all_TE.sort(dim=0, descending=True, stable=True).indices[:capacity]
        fits_TE = torch.zeros_like(of_all_TE, dtype=torch.bool).scatter(0, best_CE, True)
        return fits_TE[indices].gather(1, chosen_BSK.flatten(0, 1))

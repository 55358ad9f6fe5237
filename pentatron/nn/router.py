"""The router: which experts a token goes to, and with which weights."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pentatron.config.model import MoEConfig
from pentatron.config.parameters import router_shape
from pentatron.nn.axes import Axes
from pentatron.nn.balance import Routed, RouterLoad
from pentatron.parallel.pieces import DeclaringModule, Initial, whole

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
# As in Megatron and DeepSeek; scores of sigmoid are never all zero, but they may be small.
_TINY = 1e-20
# Weights, which are at most 1 or the scaling factor, are compared in steps of 1 / this.
_STEPS = 4096


@dataclass(frozen=True)
class Routing:
    """For every token its experts and their weights; what is not `kept` (all, if None) is dropped."""

    chosen_TK: Tensor
    weights_TK: Tensor
    kept_TK: Tensor | None = None


class Router(DeclaringModule):
    def __init__(self, hidden: int, moe: MoEConfig, axes: Axes) -> None:
        super().__init__()
        self.moe, self.axes = moe, axes
        shape = router_shape(hidden, moe)
        self.weight = self.declare("weight", shape, whole(shape, Initial(), axes.tensor.partial_in_stream))
        self.load = RouterLoad(moe)

    def forward(self, x_BSD: Tensor) -> Routing:
        dtype = _DTYPES.get(self.moe.moe_router_dtype or "", x_BSD.dtype)
        logits_BSE = F.linear(x_BSD.to(dtype), self.weight.to(dtype)).float()
        weights_BSK, chosen_BSK = self._choose(logits_BSE)
        chosen_TK, weights_TK = chosen_BSK.flatten(0, 1), weights_BSK.flatten(0, 1)
        kept_TK = self._within_capacity(chosen_BSK, weights_BSK.detach())
        if self.training and torch.is_grad_enabled():
            routed = Routed(logits_BSE, self._scores(logits_BSE), chosen_BSK)
            weights_TK = self.load.with_losses(weights_TK, routed, self.axes.expert)
        return Routing(chosen_TK, weights_TK.to(x_BSD.dtype), kept_TK)

    def _scores(self, logits_BSE: Tensor) -> Tensor:
        """Of all experts, each token's sum to 1: what balancing losses look at."""
        if self.moe.moe_router_score_function == "softmax":
            return logits_BSE.softmax(-1)
        scores = logits_BSE.sigmoid()
        return scores / (scores.sum(-1, keepdim=True) + _TINY)

    def _choose(self, logits_BSE: Tensor) -> tuple[Tensor, Tensor]:
        moe = self.moe
        if moe.moe_router_score_function == "sigmoid":
            scores = logits_BSE.sigmoid()
            judged = scores + self.load.bias if self.load.has_bias else scores
            chosen = self._best(judged)
            weights = scores.gather(-1, chosen)
            if moe.moe_router_topk > 1:
                weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        elif moe.moe_router_pre_softmax:
            scores = logits_BSE.softmax(-1)
            chosen = self._best(scores)
            weights = scores.gather(-1, chosen)
        else:
            chosen = self._best(logits_BSE)
            weights = logits_BSE.gather(-1, chosen).softmax(-1)
        factor = moe.moe_router_topk_scaling_factor
        return (weights if factor is None else weights * factor), chosen

    def _best(self, scores_BSE: Tensor) -> Tensor:
        """The experts with the highest scores; where they come in groups, those of the best groups alone."""
        moe, scores = self.moe, scores_BSE.detach()
        if moe.moe_router_num_groups is not None:
            grouped = scores.unflatten(-1, (moe.moe_router_num_groups, -1))
            of_groups = grouped.topk(moe.moe_router_topk // moe.moe_router_group_topk, -1).values.sum(-1)
            best = of_groups.topk(moe.moe_router_group_topk, -1).indices
            others = torch.ones_like(of_groups, dtype=torch.bool).scatter(-1, best, False)
            scores = grouped.masked_fill(others[..., None], -torch.inf).flatten(-2)
        return scores.topk(moe.moe_router_topk, -1).indices

    def _within_capacity(self, chosen_BSK: Tensor, weights_BSK: Tensor) -> Tensor | None:
        """What fits: of each expert's tokens in the micro-batch those with the largest weights, or the first ones.

        The ranks that share the micro-batch look at it together, so that the same tokens are dropped in every layout.
        """
        moe = self.moe
        if moe.moe_expert_capacity_factor is None:
            return None
        numbers = self._numbers(*chosen_BSK.shape[:2])
        tokens = len(numbers) * self.axes.expert.sequence.size
        equal = tokens * moe.moe_router_topk / moe.experts
        capacity = min(tokens, math.ceil(equal * moe.moe_expert_capacity_factor))
        # Equal tokens with equal pasts have equal weights but for rounding, which depends on the layout: weights are
        # compared coarsely, and of equal ones the first tokens are kept.
        by_weight = moe.moe_token_drop_policy == "probs"
        worth_BSK = (weights_BSK.float() * _STEPS).round() + 1 if by_weight else torch.ones_like(weights_BSK)
        worth_TE = worth_BSK.new_zeros(len(numbers), moe.experts)
        worth_TE.scatter_(1, chosen_BSK.flatten(0, 1), worth_BSK.flatten(0, 1))
        of_all_TE = torch.zeros_like(worth_TE).repeat(self.axes.expert.sequence.size, 1)
        everyone = self.axes.expert.of_micro_batch
        of_all_TE.index_copy_(0, everyone(numbers), everyone(worth_TE))
        best_CE = of_all_TE.sort(dim=0, descending=True, stable=True).indices[:capacity]
        fits_TE = torch.zeros_like(of_all_TE, dtype=torch.bool).scatter(0, best_CE, True)
        return fits_TE[numbers].gather(1, chosen_BSK.flatten(0, 1))

    def _numbers(self, samples: int, length: int) -> Tensor:
        """Which tokens of the micro-batch this rank's are, counted position by position."""
        axes, device = self.axes, self.weight.device
        in_context = length * (axes.tensor.size if axes.tensor.sequence_parallel else 1)
        positions_S = axes.tensor.own_sequence(axes.context.positions(in_context, device)[None])[0]
        return (positions_S[None] * samples + torch.arange(samples, device=device)[:, None]).flatten()

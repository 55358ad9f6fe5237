"""How a router is led to use its experts equally: losses, a bias, and what is remembered of the load.

Every loss is defined on one process: `aux_loss` and the z-loss by micro-batch, `seq_aux_loss` by sequence, `global_aux_loss`
by the load of the whole step before. Where ranks share a micro-batch each computes the part of its own tokens against
counts over all of them, so that gradients, summed like any others, are those of one process. A step's losses are the
mean over its micro-batches.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pentatron.config.model import MoEConfig
from pentatron.parallel.expert_axis import ExpertAxis

Z_LOSS = "z_loss"


def loss_weights(moe: MoEConfig) -> dict[str, float]:
    """The losses that are asked for, by name, with their weights."""
    kinds = moe.moe_router_load_balancing_type
    each = moe.moe_aux_loss_coeff if len(moe.moe_aux_loss_coeff) > 1 else moe.moe_aux_loss_coeff * len(kinds)
    wanted = {kind: weight for kind, weight in zip(kinds, each, strict=True) if kind != "none" and weight > 0}
    if moe.moe_z_loss_coeff:
        wanted[Z_LOSS] = moe.moe_z_loss_coeff
    return wanted


@dataclass(frozen=True)
class Routed:
    """What a router made of a rank's tokens. `scores_BSE` are those of all experts, each token's sum to 1."""

    logits_BSE: Tensor
    scores_BSE: Tensor
    chosen_BSK: Tensor

    def counts(self) -> Tensor:
        """How many tokens of each sequence chose each expert: [B, E]."""
        batch, _, experts = self.scores_BSE.shape
        counts = torch.zeros(batch, experts, device=self.chosen_BSK.device)
        ones = torch.ones_like(self.chosen_BSK, dtype=counts.dtype).flatten(1)
        return counts.scatter_add_(1, self.chosen_BSK.flatten(1), ones)


class RouterLoad(nn.Module):
    """What one router remembers: this step's load, and what later steps need of it.

    A micro-batch is counted in its backward, which runs once, also where the forward runs twice.
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
        # The share of tokens of each expert in the step before; equal before the first.
        self.register_buffer("previous", torch.full((self.experts,), 1 / self.experts), persistent=False)
        self.register_buffer("bias", torch.zeros(self.experts), persistent=False)
        self.register_buffer("counts", torch.zeros(self.experts, dtype=torch.float64), persistent=False)
        self.losses: dict[str, Tensor] = {}
        self.share = 1.0
        self.scale = 1.0

    def begin_step(self, micro_batches: int, scale: float = 1.0) -> None:
        """Of how many micro-batches, on all ranks, the step's losses are the mean; `scale` times as large are gradients."""
        self.share, self.scale = 1 / micro_batches, scale
        self.counts.zero_()
        self.losses = {}

    def numbers(self) -> Tensor:
        """This rank's part of the step's counts and losses; `settle` takes the sum over all ranks."""
        zero = self.counts.new_zeros(())
        return torch.cat([self.counts, *(self.losses.get(name, zero).reshape(1) for name in self.weights)])

    def settle(self, numbers: Tensor) -> None:
        """The step is done."""
        counts = numbers[: self.experts]
        self.previous.copy_(counts / counts.sum().clamp(min=1))
        if self.has_bias:
            self.bias.add_(torch.sign(counts.mean() - counts).to(self.bias), alpha=self.bias_rate)

    def kept(self) -> Mapping[str, Tensor]:
        """What a checkpoint must have for later steps to be the same, also if they balance in another way."""
        return {"previous": self.previous, **({"bias": self.bias} if self.has_bias else {})}

    def with_losses(self, weights_TK: Tensor, routed: Routed, axis: ExpertAxis) -> Tensor:
        """The weights, unchanged; their backward adds the gradients of the losses and counts the tokens."""
        counts_BE = routed.counts()
        values = {name: _LOSSES[name](self, routed, counts_BE, axis) for name in self.weights}
        total = weights_TK.new_zeros((), dtype=torch.float32)
        for name, value in values.items():
            total = total + value * (self.weights[name] * self.share)

        def count() -> None:
            self.counts.add_(counts_BE.sum(0))
            for name, value in values.items():
                added = value.detach().double() * self.share
                self.losses[name] = self.losses[name] + added if name in self.losses else added

        result = _WithLoss.apply(weights_TK, total, count, self.scale)
        assert isinstance(result, Tensor)
        return result


def _of_micro_batch(load: RouterLoad, routed: Routed, counts_BE: Tensor, axis: ExpertAxis) -> Tensor:
    """E · Σ f·P over the experts: their share of the choices times their mean score, both over the micro-batch."""
    tokens = routed.scores_BSE[..., 0].numel() * axis.sequence.size
    counts_E = axis.over_micro_batch(counts_BE.sum(0))
    sums_E = routed.scores_BSE.sum((0, 1))
    return (sums_E * counts_E).sum() * (load.experts / (load.topk * tokens * tokens))


def _of_sequences(load: RouterLoad, routed: Routed, counts_BE: Tensor, axis: ExpertAxis) -> Tensor:
    """The same for each sequence, and the mean of that."""
    batch, length, _ = routed.scores_BSE.shape
    tokens = length * axis.sequence.size
    counts = axis.over_micro_batch(counts_BE)
    return (routed.scores_BSE.sum(1) * counts).sum() * (load.experts / (load.topk * tokens * tokens * batch))


def _of_step_before(load: RouterLoad, routed: Routed, counts_BE: Tensor, axis: ExpertAxis) -> Tensor:
    """The shares are those of the whole step before, which is known when this one begins."""
    tokens = routed.scores_BSE[..., 0].numel() * axis.sequence.size
    return (routed.scores_BSE.sum((0, 1)) * load.previous).sum() * (load.experts / tokens)


def _of_logits(load: RouterLoad, routed: Routed, counts_BE: Tensor, axis: ExpertAxis) -> Tensor:
    """The mean square of log Σ exp."""
    tokens = routed.logits_BSE[..., 0].numel() * axis.sequence.size
    return torch.logsumexp(routed.logits_BSE, -1).square().sum() / tokens


_LOSSES: dict[str, Callable[[RouterLoad, Routed, Tensor, ExpertAxis], Tensor]] = {
    "aux_loss": _of_micro_batch,
    "seq_aux_loss": _of_sequences,
    "global_aux_loss": _of_step_before,
    Z_LOSS: _of_logits,
}


class _WithLoss(torch.autograd.Function):
    """A stage that is not the last has no loss to add these to; they enter where they arise."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, count: Callable[[], None], scale: float) -> Tensor:
        ctx.count = count
        ctx.seed = loss.new_full((), scale)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ctx.count()
        return gradients[0], ctx.seed, None, None

"""The experts of one rank: small MLPs applied to rows that are sorted by expert."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pentatron.nn.init import residual_scale
from pentatron.nn.linear import WeightedModule
from pentatron.nn.options import Axes
from pentatron.nn.router import Routing
from pentatron.ops import activation, linear
from pentatron.ops.fp8_linear import LinearOptions
from pentatron.parallel.sharding import Initialization, Shape, Shard, ShardingSpec
from pentatron.settings.decisions import wants_grouped_experts
from pentatron.settings.model import MoEConfig, TransformerConfig
from pentatron.settings.model_sizes import expert_sizes, matrices_before_activation

# int16 is enough for any number of experts; shorter keys sort faster.
_KEY = torch.int16


@dataclass(frozen=True)
class SortedPairs:
    """Pairs of token and expert, numbered token by token, in the order of experts.

    Row i is pair `pairs_N[i]`; the pairs of token t are the rows `places_TK[t]`.
    """

    pairs_N: Tensor
    places_TK: Tensor
    groups: linear.DeviceGroups


def sorted_by_expert(chosen_TK: Tensor, kept_TK: Tensor | None, count: int) -> SortedPairs:
    """Sorts the pairs by expert.

    Dropped pairs come last, among the rows of the last expert, with a weight of 0.
    """
    chosen = chosen_TK.flatten()
    if kept_TK is not None:
        chosen = chosen.masked_fill(~kept_TK.flatten(), count)
    keys, pairs = chosen.to(_KEY).sort(stable=True)
    experts = torch.arange(count, dtype=_KEY, device=keys.device)
    ends = torch.searchsorted(keys, experts, right=True, out_int32=True)
    ends[-1:].fill_(len(pairs))
    rows = torch.arange(len(pairs), device=pairs.device)
    positions = torch.empty_like(pairs).scatter_(0, pairs, rows)
    return SortedPairs(pairs, positions.view_as(chosen_TK), linear.DeviceGroups(ends))


class _GroupedExpertsFunction(torch.autograd.Function):
    """Each token's weighted sum of its experts' outputs; all experts are on this device.

    The host never learns how many tokens an expert has: pairs of token and expert are sorted, their rows
    gathered, multiplied for all experts in one kernel, and summed per token. The weights are applied between
    the two matrices. Backward recomputes the activation in the pass that computes its gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TK: Tensor,
        fc1: Tensor,
        fc2: Tensor,
        sort: SortedPairs,
        experts: "Experts",
    ) -> Tensor:
        groups, ctx.experts, ctx.weights = sort.groups, experts, (fc1, fc2)
        # With `moe_act`, backward gathers the rows again. The activation is always recomputed.
        ctx.keeps_rows = "moe_act" not in experts.recompute.wanted.parts
        rows_ND = activation.dispatch_rows(x_TD, sort.places_TK)
        weights_N = weights_TK.flatten().index_select(0, sort.pairs_N)
        inner_NI = groups.matmul(rows_ND, fc1.transpose(1, 2))
        saved = rows_ND if ctx.keeps_rows else x_TD
        ctx.save_for_backward(saved, inner_NI, weights_N, fc1, fc2, sort.places_TK, groups.ends)
        # Freed before the next tensors of this size are allocated.
        del rows_ND, saved
        between_NI = activation.weighted_activation(inner_NI, weights_N, experts.gated)
        return activation.combine_rows(groups.matmul(between_NI, fc2.transpose(1, 2)), sort.places_TK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved, inner_NI, weights_N, fc1, fc2, places_TK, ends = ctx.saved_tensors
        deferred, groups = ctx.experts.linear_fc1.deferred, linear.DeviceGroups(ends)
        product = groups.weight_gradient
        d_output_ND = activation.dispatch_rows(gradients[0], places_TK)
        d_inner_NI, d_weights_N, between_NI = activation.weighted_activation_backward(
            groups.matmul(d_output_ND, fc2), inner_NI, weights_N, ctx.experts.gated
        )
        del inner_NI
        d_fc1 = d_fc2 = d_x_TD = None
        if ctx.needs_input_grad[3]:
            d_fc2 = linear.compute_or_defer(deferred, ctx.weights[1], product, d_output_ND, between_NI)
        del between_NI, d_output_ND
        if ctx.needs_input_grad[0]:
            d_x_TD = activation.combine_rows(groups.matmul(d_inner_NI, fc1), places_TK)
        if ctx.needs_input_grad[2]:
            rows_ND = saved if ctx.keeps_rows else activation.dispatch_rows(saved, places_TK)
            d_fc1 = linear.compute_or_defer(deferred, ctx.weights[0], product, d_inner_NI, rows_ND)
        d_weights_TK = d_weights_N.index_select(0, places_TK.flatten()).view_as(places_TK)
        return d_x_TD, d_weights_TK, d_fc1, d_fc2, None, None


class ExpertLinear(WeightedModule):
    """`y = x Wᵀ` with a matrix for each expert."""

    def __init__(
        self, shape: Shape, local: Shape, shards: tuple[Shard, ...], scale: float, options: LinearOptions
    ) -> None:
        super().__init__(options)
        declared = ShardingSpec(shape, shards, Initialization(scale), replica_axis="expert_data")
        self.weight = self.declare_weight(local, declared)

    def forward(self, rows_ND: Tensor, groups: linear.GroupedRows) -> Tensor:
        return linear.grouped_linear(rows_ND, self.weight, groups, self.deferred)


class Experts(nn.Module):
    """Some of the experts; if several ranks share them, a shard of their intermediate size."""

    # Hooks that gather the weights are on this module: experts on one device use the weights of both matrices
    # without calling their forward.
    runs_whole = True

    def __init__(self, config: TransformerConfig, moe: MoEConfig, axes: Axes) -> None:
        super().__init__()
        axis = axes.expert
        self.gated = config.gated_linear_unit
        self.count = moe.experts
        self.grouped = wants_grouped_experts(moe)
        self.recompute = axes.options.recompute
        whole, shard = expert_sizes(config, moe), expert_sizes(config, moe, axis.ep_size, axis.expert_tp_size)
        first, share, hidden = axis.own(whole.count).start, shard.inner, config.hidden_size
        # A shard has the same rows of gate and up projection, as in a dense layer.
        size = (shard.count, share, hidden)
        rows = tuple(
            Shard((first, half * whole.inner + axis.expert_tp_rank * share, 0), (0, half * share, 0), size)
            for half in range(matrices_before_activation(config))
        )
        columns = Shard((first, 0, axis.expert_tp_rank * share), (0, 0, 0), shard.linear_fc2)
        options, scale = axes.tensor.linear, residual_scale(config.num_layers)
        self.linear_fc1 = ExpertLinear(whole.linear_fc1, shard.linear_fc1, rows, 1.0, options)
        self.linear_fc2 = ExpertLinear(whole.linear_fc2, shard.linear_fc2, (columns,), scale, options)

    def forward(
        self,
        rows_ND: Tensor,
        counts: Sequence[int] = (),
        counts_E: Tensor | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """Applies the experts to rows that are sorted by expert.

        `counts` is the number of rows of each expert, `counts_E` the same on the device of the rows. With
        `routing`, the rows are tokens and the result is the weighted sum over each token's experts, all of
        which are on this rank.
        """
        if routing is not None:
            sort = sorted_by_expert(routing.chosen_TK, routing.kept_TK, self.count)
            weights_TK = routing.weights_TK
            if routing.kept_TK is not None:
                weights_TK = weights_TK.masked_fill(~routing.kept_TK, 0)
            fc1, fc2 = self.linear_fc1.weight, self.linear_fc2.weight
            return _GroupedExpertsFunction.apply(rows_ND, weights_TK, fc1, fc2, sort, self)
        groups = linear.Groups(tuple(counts), self.grouped, counts_E)
        inner = self.linear_fc1(rows_ND, groups)
        activate = partial(activation.mlp_activation, inner, self.gated)
        activated = self.recompute("moe_act", activation.mlp_activation, inner, self.gated)
        with self.recompute.recomputing_output("moe_act", activated, activate):
            output: Tensor = self.linear_fc2(activated, groups)
        return output

    def can_run_on_device(self, x_TD: Tensor) -> bool:
        """Whether the host need not know the groups: all experts are here and the kernel supports
        the sizes.
        """
        widths = (*self.linear_fc1.weight.shape[1:], *self.linear_fc2.weight.shape[1:])
        all_here = len(self.linear_fc1.weight) == self.count
        return self.grouped and all_here and linear.grouped_mm_supports(x_TD, *widths)

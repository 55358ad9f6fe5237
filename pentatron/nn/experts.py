"""The experts of one rank: as many small MLPs, whose tokens come sorted by expert."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pentatron.nn.init import residual_scale
from pentatron.nn.linear import WeightedModule, activated
from pentatron.nn.options import Axes
from pentatron.nn.router import Routing
from pentatron.ops.activation import deal_rows, sum_rows, weighted_activation, weighted_activation_backward
from pentatron.ops.fp8_linear import PLAIN, LinearOptions
from pentatron.ops.linear import (
    DeferredGradients,
    GroupedProduct,
    GroupedRows,
    Groups,
    GroupsOnDevice,
    grouped_linear,
    now_or_later,
    one_kernel_can,
)
from pentatron.parallel.shards import Declared, Initial, Piece, Shape
from pentatron.settings.decisions import wants_grouped_experts
from pentatron.settings.model import MoEConfig, TransformerConfig
from pentatron.settings.parameters import expert_sizes, halves_of

# Tokens to their experts and back on one device, without the host: it never learns how many tokens an expert
# has.
#
# Pairs of token and expert are sorted, their rows dealt out, multiplied in one kernel for all experts, and
# summed up again. Weights are applied between the two matrices. For backward the rows and what the first
# matrix made of them are kept; what lies between the matrices is made again, in the pass that computes its
# gradient.


# Enough for any number of experts; a shorter key is a shorter sort.
_KEY = torch.int16


@dataclass(frozen=True)
class Matrices:
    """Of all experts; of a gated one, the first has the gates' rows before the others. `keeps_rows`: else they are dealt out
    again in backward."""

    fc1: nn.Parameter
    fc2: nn.Parameter
    gated: bool
    keeps_rows: bool = True
    deferred: DeferredGradients | None = None


@dataclass(frozen=True)
class Sorted:
    """Pairs of token and expert, which are numbered token by token, in the order of experts: pair `pairs_N[i]` is row i, and
    the pairs of token t are the rows `places_TK[t]`."""

    pairs_N: Tensor
    places_TK: Tensor
    groups: GroupsOnDevice


def sorted_by_expert(chosen_TK: Tensor, kept_TK: Tensor | None, count: int) -> Sorted:
    """What is not kept comes last, among the rows of the last expert: it costs time, and counts with a weight of 0."""
    chosen = chosen_TK.flatten()
    if kept_TK is not None:
        chosen = chosen.masked_fill(~kept_TK.flatten(), count)
    keys, pairs = chosen.to(_KEY).sort(stable=True)
    experts = torch.arange(count, dtype=_KEY, device=keys.device)
    ends = torch.searchsorted(keys, experts, right=True, out_int32=True)
    ends[-1:].fill_(len(pairs))
    rows = torch.arange(len(pairs), device=pairs.device)
    places = torch.empty_like(pairs).scatter_(0, pairs, rows)
    return Sorted(pairs, places.view_as(chosen_TK), GroupsOnDevice(ends))


def mixed_on_device(x_TD: Tensor, routing: Routing, count: int, matrices: Matrices) -> Tensor:
    """Each token's sum of what its experts make of it, times their weights. `count` experts in all, all of them here."""
    sort = sorted_by_expert(routing.chosen_TK, routing.kept_TK, count)
    weights_TK = routing.weights_TK
    if routing.kept_TK is not None:
        weights_TK = weights_TK.masked_fill(~routing.kept_TK, 0)
    result = _Mixed.apply(x_TD, weights_TK, matrices.fc1, matrices.fc2, sort, matrices)
    assert isinstance(result, Tensor)
    return result


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor, fc1: Tensor, fc2: Tensor, sort: Sorted, matrices: Matrices
    ) -> Tensor:
        groups = sort.groups
        rows_ND = deal_rows(x_TD, sort.places_TK)
        weights_N = weights_TK.flatten().index_select(0, sort.pairs_N)
        inner_NI = groups.times(rows_ND, fc1.transpose(1, 2))
        kept = rows_ND if matrices.keeps_rows else x_TD
        ctx.save_for_backward(kept, inner_NI, weights_N, fc1, fc2, sort.places_TK, groups.ends)
        ctx.matrices = matrices
        del rows_ND, kept
        between_NI = weighted_activation(inner_NI, weights_N, matrices.gated)
        return sum_rows(groups.times(between_NI, fc2.transpose(1, 2)), sort.places_TK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kept, inner_NI, weights_N, fc1, fc2, places_TK, ends = ctx.saved_tensors
        matrices, groups = ctx.matrices, GroupsOnDevice(ends)
        of_made_ND = deal_rows(gradients[0], places_TK)
        of_inner_NI, of_weights_N, between_NI = weighted_activation_backward(
            groups.times(of_made_ND, fc2), inner_NI, weights_N, matrices.gated
        )
        del inner_NI
        of_fc1 = of_fc2 = of_x_TD = None
        if ctx.needs_input_grad[3]:
            product = GroupedProduct(matrices.fc2, between_NI, of_made_ND, groups)
            of_fc2 = now_or_later(product, matrices.deferred)
            del product
        del between_NI, of_made_ND
        if ctx.needs_input_grad[0]:
            of_x_TD = sum_rows(groups.times(of_inner_NI, fc1), places_TK)
        if ctx.needs_input_grad[2]:
            rows_ND = kept if matrices.keeps_rows else deal_rows(kept, places_TK)
            of_fc1 = now_or_later(
                GroupedProduct(matrices.fc1, rows_ND, of_inner_NI, groups), matrices.deferred
            )
        of_weights_TK = of_weights_N.index_select(0, places_TK.flatten()).view_as(places_TK)
        return of_x_TD, of_weights_TK, of_fc1, of_fc2, None, None


class ExpertLinear(WeightedModule):
    """`y = x Wᵀ` with a matrix for each expert."""

    def __init__(
        self,
        shape: Shape,
        local: Shape,
        pieces: tuple[Piece, ...],
        scale: float,
        options: LinearOptions = PLAIN,
    ) -> None:
        super().__init__(options)
        declared = Declared(shape, pieces, Initial(scale), copies="expert_data")
        self.weight = self.declare_weight(local, declared)

    def forward(self, rows_ND: Tensor, groups: GroupedRows) -> Tensor:
        return grouped_linear(rows_ND, self.weight, groups, self.deferred)


class Experts(nn.Module):
    """A rank has some of the experts; of each, where several ranks share it, a part of the inner width."""

    # Weights that are on their way are waited for at its door: a device that mixes all experts does not run their matrices one by one.
    runs_whole = True

    def __init__(self, config: TransformerConfig, moe: MoEConfig, axes: Axes) -> None:
        super().__init__()
        axis = axes.expert
        self.gated = config.gated_linear_unit
        self.count = moe.experts
        self.grouped = wants_grouped_experts(moe)
        self.recompute = axes.options.recompute
        whole, own = expert_sizes(config, moe), expert_sizes(config, moe, axis.holders, axis.cut)
        first, share, hidden = axis.own(whole.count).start, own.inner, config.hidden_size
        # A part of the width is the same rows of gate and up projection, as in a dense layer.
        rows = tuple(
            Piece(
                (first, half * whole.inner + axis.part * share, 0),
                (0, half * share, 0),
                (own.count, share, hidden),
            )
            for half in range(halves_of(config))
        )
        columns = Piece((first, 0, axis.part * share), (0, 0, 0), own.linear_fc2)
        self.linear_fc1 = ExpertLinear(
            whole.linear_fc1,
            own.linear_fc1,
            rows,
            1.0,
            axes.tensor.linear,
        )
        self.linear_fc2 = ExpertLinear(
            whole.linear_fc2,
            own.linear_fc2,
            (columns,),
            residual_scale(config.num_layers),
            axes.tensor.linear,
        )

    def forward(
        self,
        rows_ND: Tensor,
        counts: Sequence[int] = (),
        counts_E: Tensor | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """`counts`: how many rows each expert has, one after the other; `counts_E` are the same where the rows are. With `routing`
        the rows are tokens, and of each the sum of what its experts make of it comes back: all experts are here."""
        if routing is not None:
            return self._mixed(rows_ND, routing)
        groups = Groups(tuple(counts), self.grouped, counts_E)
        inner = self.linear_fc1(rows_ND, groups)
        between = self.recompute("moe_act", activated, inner, self.gated)
        with self.recompute.made_again("moe_act", between, lambda: activated(inner, self.gated)):
            made: Tensor = self.linear_fc2(between, groups)
        return made

    def all_on(self, x_TD: Tensor) -> bool:
        """Whether the device of these tokens can mix all experts by itself, the host not knowing who goes where."""
        widths = (*self.linear_fc1.weight.shape[1:], *self.linear_fc2.weight.shape[1:])
        all_here = len(self.linear_fc1.weight) == self.count
        return self.grouped and all_here and one_kernel_can(x_TD, *widths)

    def _mixed(self, x_TD: Tensor, routing: Routing) -> Tensor:
        # What lies between the matrices is made again in any case; asked to keep less, the rows are too.
        keeps_rows = "moe_act" not in self.recompute.wanted.parts
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        matrices = Matrices(fc1.weight, fc2.weight, self.gated, keeps_rows, fc1.deferred)
        return mixed_on_device(x_TD, routing, self.count, matrices)

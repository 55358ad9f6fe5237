"""Tokens to their experts and back on one device, without the host: it never learns how many tokens an expert has.

Pairs of token and expert are sorted, their rows dealt out, multiplied in one kernel for all experts, and summed up again. Weights are
applied between the two matrices. For backward the rows and what the first matrix made of them are kept; what lies between
the matrices is made again, in the pass that computes its gradient.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pentatron.kernels.activation import weighted_activation, weighted_activation_backward
from pentatron.kernels.rows import deal_rows, sum_rows
from pentatron.nn.router import Routing
from pentatron.parallel.deferral import DeferredGradients, GroupedProduct, now_or_later
from pentatron.parallel.grouped import GroupsOnDevice

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

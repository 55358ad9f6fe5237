"""Mixture-of-experts layers and the dispatch of tokens to experts on other ranks.

`all_to_all` sends every token to the ranks with its experts. `all_gather` gives every rank all tokens, from
which it takes those of its experts: more bytes, one collective each way, and no sizes to exchange. Either may
leave a rank or an expert without tokens. Both compute the same values and sum them in the same order for a
token.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pentatron.errors import UserError
from pentatron.nn.experts import Experts
from pentatron.nn.linear import ReplicatedWeight
from pentatron.nn.mlp import MLP, PLAIN_MLP
from pentatron.nn.options import ONE_PROCESS, Axes
from pentatron.nn.router import Router, Routing
from pentatron.nn.spec import MLPSubmodules
from pentatron.parallel.axes import ExpertAxis
from pentatron.settings.core_config import CoreTransformerConfig
from pentatron.settings.model import MoEConfig, TransformerConfig, moe_layers
from pentatron.settings.model_sizes import has_shared_expert, has_shared_gate, shared_gate_shape

# Maps rows sorted by this rank's experts, and the number of rows of each on the host and on the device, to
# the output of the experts or of this rank's part of them.
ExpertFunction = Callable[[Tensor, Sequence[int], Tensor], Tensor]


def all_to_all(
    x_TD: Tensor, routing: Routing, count: int, axis: ExpertAxis, experts: ExpertFunction
) -> Tensor:
    """Dispatches tokens with all-to-all; `count` is the total number of experts."""
    tokens, topk = routing.chosen_TK.shape
    order, counts_E = _by_expert(routing.chosen_TK, routing.kept_TK, count)
    local_experts = count // axis.ep_size
    # Each rank with a shard of an expert needs all of its tokens.
    sent_GE = counts_E.view(axis.ep_size, local_experts).repeat_interleave(axis.expert_tp_size, dim=0)
    received_GE = axis.all_to_all_counts(sent_GE)
    # The only synchronization of host and device: the host needs the sizes of the all-to-all.
    sizes = torch.stack((sent_GE, received_GE)).tolist()
    sent, received = ([sum(row) for row in rows] for rows in sizes)
    rows_ND = _GatherRows.apply(x_TD, order[: sum(sent) // axis.expert_tp_size], topk)
    if axis.expert_tp_size > 1:
        # Once for each rank that shares an expert.
        blocks = rows_ND.split(sent[:: axis.expert_tp_size])
        rows_ND = torch.cat([block for block in blocks for _ in range(axis.expert_tp_size)])
    arrived_ND = axis.all_to_all(rows_ND, sent, received)
    sorting = _by_local_expert(received_GE, sum(received))
    counts = [sum(column) for column in zip(*sizes[1])]
    output_ND = experts(_GatherRows.apply(arrived_ND, sorting, 1), counts, received_GE.sum(0))
    returned_ND = axis.all_to_all(_scatter_rows(output_ND, sorting, len(sorting)), received, sent)
    if (size := axis.expert_tp_size) > 1:
        blocks = returned_ND.split(sent)
        parts = (blocks[first : first + size] for first in range(0, len(blocks), size))
        returned_ND = torch.cat([torch.stack(of_expert).sum(0) for of_expert in parts])
    order = order[: len(returned_ND)]
    output_TKD = _scatter_rows(returned_ND, order, tokens * topk).unflatten(0, (tokens, topk))
    return _weighted(output_TKD, routing.weights_TK)


def all_gather(
    x_TD: Tensor, routing: Routing, count: int, axis: ExpertAxis, experts: ExpertFunction
) -> Tensor:
    """Dispatches tokens with all-gather; `count` is the total number of experts."""
    topk = routing.chosen_TK.shape[1]
    x_AD, weights_AK = axis.gathered(x_TD), axis.gathered(routing.weights_TK)
    chosen_AK = axis.all_gather_integers(routing.chosen_TK)
    local = axis.own(count)
    here_AK = (chosen_AK >= local.start) & (chosen_AK < local.stop)
    if routing.kept_TK is not None:
        here_AK &= axis.all_gather_integers(routing.kept_TK.to(torch.uint8)).bool()
    order, counts_E = _by_expert(chosen_AK - local.start, here_AK, len(local))
    counts = counts_E.tolist()
    order = order[: sum(counts)]
    output_ND = experts(_GatherRows.apply(x_AD, order, topk), counts, counts_E)
    output_AKD = _scatter_rows(output_ND, order, chosen_AK.numel()).unflatten(0, (-1, topk))
    return axis.summed(_weighted(output_AKD, weights_AK))


DISPATCHERS = {"alltoall": all_to_all, "allgather": all_gather}


def _by_expert(chosen_TK: Tensor, kept_TK: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """Sorts the pairs of token and expert by expert, then token, dropped ones last; counts per expert."""
    chosen = chosen_TK.flatten()
    if kept_TK is not None:
        chosen = chosen.where(kept_TK.flatten(), count)
    counts = torch.zeros(count + 1, dtype=torch.int64, device=chosen.device)
    counts.scatter_add_(0, chosen, torch.ones_like(chosen))
    return chosen.argsort(stable=True), counts[:count]


def _by_local_expert(received_GE: Tensor, rows: int) -> Tensor:
    """The order that sorts rows received by rank and expert by expert and rank."""
    ranks, local_experts = received_GE.shape
    experts = torch.arange(local_experts, device=received_GE.device).repeat(ranks)
    # `output_size` avoids a synchronization of host and device.
    return experts.repeat_interleave(received_GE.flatten(), output_size=rows).argsort(stable=True)


def _weighted(output_TKD: Tensor, weights_TK: Tensor) -> Tensor:
    return (output_TKD * weights_TK[..., None]).sum(1)


def _scatter_rows(rows_ND: Tensor, order: Tensor, count: int) -> Tensor:
    """Scatters row i to row `order[i]` of `count` rows; other rows are zero."""
    return _ScatterRows.apply(rows_ND, order, count)


class _ScatterRows(torch.autograd.Function):
    """Autograd's own backward of this operation would save the rows for their shape."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, order: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(order)
        return rows_ND.new_zeros(count, rows_ND.shape[1]).index_copy_(0, order, rows_ND)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return gradients[0].index_select(0, order), None, None


class _GatherRows(torch.autograd.Function):
    """Row i is the token of pair `order[i]`. Every token has `topk` pairs, and no pair occurs twice.

    Autograd's own backward of indexing adds in no fixed order on a GPU; this one is deterministic.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order: Tensor, topk: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.shape = (len(x_TD), topk)
        return x_TD.index_select(0, order // topk if topk > 1 else order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        tokens, topk = ctx.shape
        rows = _scatter_rows(gradients[0], order, tokens * topk)
        return (rows.unflatten(0, (tokens, topk)).sum(1) if topk > 1 else rows), None, None


class SharedExpert(nn.Module):
    """An expert that every token uses, optionally scaled by a gate."""

    def __init__(
        self, config: TransformerConfig, moe: MoEConfig, axes: Axes, submodules: MLPSubmodules = PLAIN_MLP
    ) -> None:
        super().__init__()
        self.mlp = MLP(config, axes=axes, submodules=submodules, inner=moe.shared_width)
        shape = shared_gate_shape(config.hidden_size)
        self.gate = SharedGate(shape, axes.tensor) if has_shared_gate(moe) else None

    def forward(self, x_BSD: Tensor) -> Tensor:
        output: Tensor = self.mlp(x_BSD)
        return output if self.gate is None else output * self.gate(x_BSD)


class SharedGate(ReplicatedWeight):
    """One gate value for each token."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        return torch.sigmoid(nn.functional.linear(x_BSD, self.weight))


class MoE(nn.Module):
    """A mixture of experts in place of the MLP of a layer.

    `submodules` are those of the shared expert. `num_experts`, if given, must agree with the configuration.
    `grouped` uses a grouped matrix product even if the configuration does not.
    """

    graph_break_reason = ""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        axes: Axes = ONE_PROCESS,
        submodules: MLPSubmodules = PLAIN_MLP,
        num_experts: int | None = None,
        grouped: bool = False,
    ) -> None:
        super().__init__()
        moe = config.moe if isinstance(config, CoreTransformerConfig) else MoEConfig()
        if moe.num_experts is None or (num_experts or moe.num_experts) != moe.num_experts:
            raise UserError(
                f"a spec asks for {num_experts or 'some'} experts in layer {layer_number}, the configuration has "
                f"{moe.num_experts or 'none'}; write the same number in both (--num-experts)"
            )
        if not moe_layers(moe.moe_layer_freq, config.num_layers)[layer_number - 1]:
            raise UserError(
                f"a spec puts experts into layer {layer_number}, which has none by --moe-layer-freq {moe.moe_layer_freq}; "
                "use get_gpt_decoder_block_spec, which has a spec for each layer"
            )
        self.count = moe.num_experts
        if grouped:
            moe = dataclasses.replace(moe, moe_grouped_gemm=True)
        if axes.options.compile is not None:
            self.graph_break_reason = "experts, whose sizes depend on the routing"
            self.forward = axes.options.compile.eager(self.forward)  # type: ignore[method-assign]
            axes = axes.uncompiled()
        self.axis = axes.expert
        self.dispatch = DISPATCHERS[moe.moe_token_dispatcher_type]
        self.recompute = axes.options.recompute
        self.router = Router(config.hidden_size, moe, axes)
        self.experts = Experts(config, moe, axes)
        self.shared = SharedExpert(config, moe, axes, submodules) if has_shared_expert(moe) else None

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.recompute("moe", self._apply_experts, x_BSD)

    def _apply_experts(self, x_BSD: Tensor) -> Tensor:
        routing = self.router(x_BSD)
        x_TD = x_BSD.flatten(0, 1)
        if self.axis.group.size == 1 and self.experts.can_run_on_device(x_TD):
            output_TD = self.experts(x_TD, routing=routing)
        else:
            output_TD = self.dispatch(x_TD, routing, self.count, self.axis, self.experts)
        output_BSD = output_TD.view_as(x_BSD)
        if self.shared is None:
            return output_BSD
        return output_BSD + self.recompute("shared_experts", self.shared, x_BSD)

"""A mixture of experts in place of the feed-forward part of a layer."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pentatron.errors import UserError
from pentatron.nn.experts import Experts
from pentatron.nn.mlp import MLP, PLAIN_MLP
from pentatron.nn.options import ONE_PROCESS, Axes
from pentatron.nn.router import Router, Routing
from pentatron.nn.spec import MLPSubmodules
from pentatron.parallel.axes import ExpertAxis, TensorAxis
from pentatron.parallel.shards import DeclaringModule, Initial, whole
from pentatron.settings.core import CoreTransformerConfig
from pentatron.settings.model import MoEConfig, TransformerConfig, moe_layers
from pentatron.settings.parameters import has_shared_expert, has_shared_gate, shared_gate_shape

# How tokens come to their experts and back.
#
# `all_to_all` sends every token to the ranks that have its experts, and only there. `all_gather` gives every
# rank all tokens, of which it takes those of its experts: more bytes, one collective each way, no sizes to
# agree on. Either may leave a rank or an expert without any token. What is computed, and in which order it is
# summed for a token, is the same for both.


# Rows sorted by this rank's experts and how many each has, on the host and where the rows are → what the experts (or this
# rank's part of them) make of them.
ExpertFunction = Callable[[Tensor, Sequence[int], Tensor], Tensor]


def all_to_all(
    x_TD: Tensor, routing: Routing, count: int, axis: ExpertAxis, experts: ExpertFunction
) -> Tensor:
    """`count` experts in all."""
    tokens, topk = routing.chosen_TK.shape
    order, counts_E = _by_expert(routing.chosen_TK, routing.kept_TK, count)
    own = count // axis.holders
    # Each rank that has a part of an expert needs its tokens whole.
    sent_GE = counts_E.view(axis.holders, 1, own).expand(-1, axis.cut, -1).reshape(axis.group.size, own)
    received_GE = axis.exchanged_counts(sent_GE)
    # The one point where the host must know numbers of the device: the sizes of what is exchanged.
    sizes = torch.stack((sent_GE, received_GE)).tolist()
    sent, received = ([sum(row) for row in rows] for rows in sizes)
    rows_ND = _dealt(x_TD, order[: sum(sent) // axis.cut], topk)
    arrived_ND = axis.exchanged(_for_each_part(rows_ND, sent, axis.cut), sent, received)
    sorting = _by_own_expert(received_GE, sum(received))
    counts = [sum(column) for column in zip(*sizes[1])]
    made_ND = experts(_dealt(arrived_ND, sorting, 1), counts, received_GE.sum(0))
    returned_ND = axis.exchanged(_put_back(made_ND, sorting, len(sorting)), received, sent)
    summed_ND = _sum_of_parts(returned_ND, sent, axis.cut)
    made_TKD = _put_back(summed_ND, order[: len(summed_ND)], tokens * topk).unflatten(0, (tokens, topk))
    return _weighted(made_TKD, routing.weights_TK)


def all_gather(
    x_TD: Tensor, routing: Routing, count: int, axis: ExpertAxis, experts: ExpertFunction
) -> Tensor:
    """`count` experts in all."""
    topk = routing.chosen_TK.shape[1]
    x_AD, weights_AK = axis.gathered(x_TD), axis.gathered(routing.weights_TK)
    chosen_AK = axis.gathered_numbers(routing.chosen_TK)
    own = axis.own(count)
    here_AK = (chosen_AK >= own.start) & (chosen_AK < own.stop)
    if routing.kept_TK is not None:
        here_AK &= axis.gathered_numbers(routing.kept_TK.to(torch.uint8)).bool()
    order, counts_E = _by_expert(chosen_AK - own.start, here_AK, len(own))
    counts = counts_E.tolist()
    order = order[: sum(counts)]
    made_ND = experts(_dealt(x_AD, order, topk), counts, counts_E)
    made_AKD = _put_back(made_ND, order, chosen_AK.numel()).unflatten(0, (-1, topk))
    return axis.summed(_weighted(made_AKD, weights_AK))


DISPATCHERS = {"alltoall": all_to_all, "allgather": all_gather}


def _by_expert(chosen_TK: Tensor, kept_TK: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """The pairs of token and expert in the order of experts, then of tokens, those that are not kept last; and how
    many each expert has."""
    chosen = chosen_TK.flatten()
    if kept_TK is not None:
        chosen = chosen.where(kept_TK.flatten(), count)
    counts = torch.zeros(count + 1, dtype=torch.int64, device=chosen.device)
    counts.scatter_add_(0, chosen, torch.ones_like(chosen))
    return chosen.argsort(stable=True), counts[:count]


def _by_own_expert(received_GE: Tensor, rows: int) -> Tensor:
    """`rows` arrive by rank and expert; this orders them by expert and rank."""
    ranks, own = received_GE.shape
    experts = torch.arange(own, device=received_GE.device).repeat(ranks)
    # Told how many there are, a GPU need not be asked.
    return experts.repeat_interleave(received_GE.flatten(), output_size=rows).argsort(stable=True)


def _for_each_part(rows_ND: Tensor, sent: Sequence[int], cut: int) -> Tensor:
    """The rows of each holder once for each of the ranks that share it."""
    if cut == 1:
        return rows_ND
    blocks = rows_ND.split(list(sent[::cut]))
    return torch.cat([block for block in blocks for _ in range(cut)])


def _sum_of_parts(rows_ND: Tensor, sent: Sequence[int], cut: int) -> Tensor:
    """The parts of an output that come from the ranks which share an expert, added up."""
    if cut == 1:
        return rows_ND
    blocks = rows_ND.split(list(sent))
    return torch.cat([torch.stack(blocks[i : i + cut]).sum(0) for i in range(0, len(blocks), cut)])


def _weighted(made_TKD: Tensor, weights_TK: Tensor) -> Tensor:
    return (made_TKD * weights_TK[..., None]).sum(1)


def _put_back(rows_ND: Tensor, order: Tensor, count: int) -> Tensor:
    """`count` rows: row `order[i]` is row i; those that nobody computed are zero."""
    result = _PutBack.apply(rows_ND, order, count)
    assert isinstance(result, Tensor)
    return result


class _PutBack(torch.autograd.Function):
    """Autograd's own backward of this keeps the rows as well, for their shape."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, order: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(order)
        return rows_ND.new_zeros(count, rows_ND.shape[1]).index_copy_(0, order, rows_ND)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return gradients[0].index_select(0, order), None, None


def _dealt(x_TD: Tensor, order: Tensor, topk: int) -> Tensor:
    """Row i is the token of the pair `order[i]`; every token has `topk` pairs, none of which is dealt twice."""
    result = _Deal.apply(x_TD, order, topk)
    assert isinstance(result, Tensor)
    return result


class _Deal(torch.autograd.Function):
    """Autograd's own backward of indexing adds in no fixed order on a GPU; this one does not."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order: Tensor, topk: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.shape = (len(x_TD), topk)
        return x_TD.index_select(0, order // topk if topk > 1 else order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        tokens, topk = ctx.shape
        rows = _put_back(gradients[0], order, tokens * topk)
        return (rows.unflatten(0, (tokens, topk)).sum(1) if topk > 1 else rows), None, None


class SharedExpert(nn.Module):
    """Every token goes through it; with a gate, it has a say in how much of that it takes."""

    def __init__(
        self,
        config: TransformerConfig,
        moe: MoEConfig,
        axes: Axes,
        submodules: MLPSubmodules = PLAIN_MLP,
    ) -> None:
        super().__init__()
        self.mlp = MLP(config, axes=axes, submodules=submodules, inner=moe.shared_width)
        self.gate = SharedGate(config.hidden_size, axes.tensor) if has_shared_gate(moe) else None

    def forward(self, x_BSD: Tensor) -> Tensor:
        made: Tensor = self.mlp(x_BSD)
        return made if self.gate is None else made * self.gate(x_BSD)


class SharedGate(DeclaringModule):
    """One number for each token of the stream."""

    def __init__(self, hidden: int, axis: TensorAxis) -> None:
        super().__init__()
        shape = shared_gate_shape(hidden)
        self.weight = self.declare("weight", shape, whole(shape, Initial(), axis.partial_in_stream))

    def forward(self, x_BSD: Tensor) -> Tensor:
        return torch.sigmoid(nn.functional.linear(x_BSD, self.weight))


class MoE(nn.Module):
    """`submodules` are those of the shared expert. `num_experts`, if given, must be what the configuration says;
    `grouped` asks for one grouped matmul even where that does not want it."""

    left_out = ""

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
            self.left_out = "experts, whose sizes follow from their tokens"
            self.forward = axes.options.compile.apart(self.forward)  # type: ignore[method-assign]
            axes = axes.out_of_graphs()
        self.axis = axes.expert
        self.dispatch = DISPATCHERS[moe.moe_token_dispatcher_type]
        self.recompute = axes.options.recompute
        self.router = Router(config.hidden_size, moe, axes)
        self.experts = Experts(config, moe, axes)
        self.shared = SharedExpert(config, moe, axes, submodules) if has_shared_expert(moe) else None

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.recompute("moe", self._mixed, x_BSD)

    def _mixed(self, x_BSD: Tensor) -> Tensor:
        routing = self.router(x_BSD)
        x_TD = x_BSD.flatten(0, 1)
        if self.axis.group.size == 1 and self.experts.all_on(x_TD):
            made_TD = self.experts(x_TD, routing=routing)
        else:
            made_TD = self.dispatch(x_TD, routing, self.count, self.axis, self.experts)
        made_BSD = made_TD.view_as(x_BSD)
        return (
            made_BSD
            if self.shared is None
            else made_BSD + self.recompute("shared_experts", self.shared, x_BSD)
        )

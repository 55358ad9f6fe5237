"""Planted bugs: mistakes that real frameworks have made, which the parity net must detect.

A bug breaks its process for good, so bugs are planted on forked ranks only.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import pentatron.nn.attention_blocks as blocks_module
import pentatron.nn.context_attention as context_module
import pentatron.nn.loss as loss_module
import pentatron.nn.transformer_layer as layer_module
import pentatron.ops.cross_entropy as fused_module
import pentatron.ops.linear as deferral_module
import pentatron.parallel.buckets as gathering_module
import pentatron.parallel.reduction as reduction_module
import pentatron.train.model as model_module
import pentatron.train.step as step_module
from pentatron.nn.attention import SelfAttention
from pentatron.nn.attention_blocks import Block
from pentatron.nn.dropout import DropoutKeys
from pentatron.nn.linear import (
    ColumnParallelLinear,
    OutputLayer,
    PositionEmbedding,
    RowParallelLinear,
    Rows,
    VocabParallelEmbedding,
    even_rows,
)
from pentatron.nn.loss import _SplitCrossEntropy
from pentatron.nn.norm import LayerNorm, RMSNorm
from pentatron.ops.linear import DeferredGradients, Product, weight_gradient
from pentatron.optim.optimizer import Optimizer
from pentatron.parallel.axes import TensorAxis
from pentatron.parallel.collectives import Group, Pending
from pentatron.parallel.world import World
from pentatron.train.model import MicroBatches, ParallelModel
from tests.parity.mixture_bugs import MIXTURE_BUGS, forget_partial
from tests.parity.scale_bugs import SCALE_BUGS
from tests.parity.shard_bugs import SHARD_BUGS


def row_output_not_summed() -> None:
    TensorAxis.leave = lambda self, x: x.clone()  # type: ignore[method-assign]


def column_input_gradient_not_summed() -> None:
    TensorAxis.enter = lambda self, x: x.clone()  # type: ignore[method-assign]


def norm_gradients_not_summed() -> None:
    forget_partial(lambda layer, name: isinstance(layer, RMSNorm | LayerNorm))


def row_bias_gradient_not_summed() -> None:
    forget_partial(lambda layer, name: isinstance(layer, RowParallelLinear) and name == "bias")


def position_gradients_not_summed() -> None:
    forget_partial(lambda layer, name: isinstance(layer, PositionEmbedding))


def shared_key_value_gradients_not_summed() -> None:
    forget_partial(lambda layer, name: isinstance(layer, ColumnParallelLinear))


def tied_weights_not_summed() -> None:
    forget_partial(lambda layer, name: isinstance(layer, VocabParallelEmbedding))


def loss_divided_by_a_local_count() -> None:
    step_module.start_all_reduce_ = Pending


def bias_added_on_every_rank() -> None:
    def forward(self: RowParallelLinear, x: Tensor) -> Tensor:
        return self.axis.leave(F.linear(x, self.weight, self.bias))

    RowParallelLinear.forward = forward  # type: ignore[method-assign]


def gate_and_up_cut_as_one() -> None:
    """Rank r takes the r-th share of [gate; up] instead of the r-th share of each."""
    build = ColumnParallelLinear.__init__

    def contiguous(
        self: Any, inputs: int, outputs: int, rows: Sequence[Rows], bias: bool, axis: TensorAxis
    ) -> None:
        if len(rows) == 2 and not any(r.is_replicated for r in rows):
            rows = even_rows(outputs, axis)
        build(self, inputs, outputs, rows, bias, axis)

    ColumnParallelLinear.__init__ = contiguous  # type: ignore[method-assign]


def micro_batch_dropped() -> None:
    forward = MicroBatches.forward

    def dropping(self: MicroBatches, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        made = forward(self, stage, micro_batch, received)
        return made * 0.0 if made.dim() == 0 and micro_batch == len(self.batches) - 1 else made

    MicroBatches.forward = dropping  # type: ignore[method-assign]


def wrong_micro_batch_labels() -> None:
    """The last stage pairs each activation with the labels of the micro-batch before."""
    forward = MicroBatches.forward

    def shifted(self: MicroBatches, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        if received is not None:
            micro_batch = max(0, micro_batch - 1)
        return forward(self, stage, micro_batch, received)

    MicroBatches.forward = shifted  # type: ignore[method-assign]


def gradients_not_reduced() -> None:
    for name in ("start_all_reduce_", "start_reduce_scatter_into"):
        assert hasattr(reduction_module, name)
        setattr(reduction_module, name, lambda *words: Pending(words[0], words[-1]))


def replicated_norm_counted_everywhere() -> None:
    def everything(self: Optimizer) -> Tensor:
        return torch.stack([f.values.square().sum() for f in self.gradients(owned_only=False)]).sum()

    Optimizer.squared_norm = everything  # type: ignore[method-assign]


def stale_shard() -> None:
    """Weights updated by other ranks never arrive."""
    assert hasattr(gathering_module, "start_all_gather_into")
    gathering_module.start_all_gather_into = lambda whole, part, group: Pending(whole, group)


def dropout_by_local_position() -> None:
    keys = model_module.dropout_keys

    def local(seed: int, step: int, first_sample: int, batch: int, positions: Tensor, device: Any) -> Any:
        return keys(seed, step, first_sample, batch, torch.arange(len(positions)), device)

    model_module.dropout_keys = local


def dropout_by_local_sample() -> None:
    keys = model_module.dropout_keys

    def local(seed: int, step: int, first_sample: int, batch: int, positions: Tensor, device: Any) -> Any:
        return keys(seed, step, 0, batch, positions, device)

    model_module.dropout_keys = local


def padding_takes_probability() -> None:
    forward = _SplitCrossEntropy.forward

    def unmasked(
        ctx: Any, logits: Tensor, labels: Tensor, vocabulary: int, first: int, group: Group
    ) -> Tensor:
        return forward(ctx, logits, labels, first + logits.shape[-1], first, group)

    _SplitCrossEntropy.forward = staticmethod(unmasked)  # type: ignore[method-assign]


def padding_takes_probability_fused() -> None:
    sums = fused_module.row_sums

    def unmasked(logits: Tensor, labels: Tensor, words: int, first: int) -> tuple[Tensor, Tensor, Tensor]:
        return sums(logits, labels, logits.shape[-1], first)

    fused_module.row_sums = unmasked


def own_largest_logit() -> None:
    """Every rank's sum is taken relative to its own largest logit."""
    loss_module.all_reduce_max_ = lambda largest, group: largest


def clipped_by_a_local_norm() -> None:
    step = Optimizer.step

    def local(self: Optimizer, learning_rate: float, norm: float, scale: float, *rest: Any) -> None:
        step(self, learning_rate, float(self.squared_norm()) ** 0.5 / scale, scale, *rest)

    Optimizer.step = local  # type: ignore[method-assign]


def heads_interleaved() -> None:
    """Queries are assigned to ranks head by head, but the output projection expects blocks of heads."""
    forward = SelfAttention.forward

    def swapped(self: SelfAttention, x: Tensor, rope: Any, angles: Any) -> Tensor:
        weight = self.linear_proj.weight
        self.linear_proj.weight = torch.nn.Parameter(weight.detach().flip(1))
        out = forward(self, x, rope, angles)
        self.linear_proj.weight = weight
        return out

    SelfAttention.forward = swapped  # type: ignore[method-assign]


def positions_from_zero() -> None:
    """Every context rank numbers its tokens from 0, as if they were a whole sequence."""
    own_tokens = ParallelModel.local_tokens

    def from_zero(self: ParallelModel, batches: Any) -> Any:
        return [
            dataclasses.replace(
                b, position_ids=torch.arange(b.tokens.shape[1]).expand_as(b.tokens).contiguous()
            )
            for b in own_tokens(self, batches)
        ]

    ParallelModel.local_tokens = from_zero  # type: ignore[method-assign]


def later_tokens_visible() -> None:
    """Early queries attend to the keys of a later rank too."""
    visible_of = context_module.ring_block

    def everything(source: int, rank: int, length: int) -> Block:
        block = visible_of(source, rank, length)
        return block if block.causal else Block(slice(0, length), block.keys, causal=False)

    context_module.ring_block = everything


def attention_parts_not_rescaled() -> None:
    """Partial attention outputs are averaged instead of rescaled."""

    def halves(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
        out.copy_(torch.where((lse > -math.inf)[..., None], (out + more) / 2, more))
        lse.copy_(torch.logaddexp(lse, more_lse))

    blocks_module.merge_ = halves


def key_gradients_not_summed() -> None:
    def own_alone(part: Tensor, whole: Tensor, group: Group) -> None:
        part.copy_(whole.unflatten(0, (group.size, -1))[group.rank])

    # Replaced in this module only, because other modules call the collective too.
    broken = {**vars(context_module.collectives), "reduce_scatter_into": own_alone}
    context_module.collectives = SimpleNamespace(**broken)  # type: ignore[assignment]


def key_gradients_left_on_the_way() -> None:
    """Gradients of keys and values stay on each rank instead of moving along the ring."""
    pass_on = context_module.start_ring_exchange

    def stay(tensor: Tensor, group: Group, tag: int) -> Pending:
        if tag == context_module._GRADIENTS:
            return Pending(tensor, group)
        return pass_on(tensor, group, tag)

    context_module.start_ring_exchange = stay


def loss_of_one_context_rank() -> None:
    zero = step_module._zero_unless_first_tensor_rank

    def first_alone(loss: Tensor, world: World) -> Tensor:
        return zero(loss, world) * world.is_first_of(("context",))

    step_module._zero_unless_first_tensor_rank = first_alone


def deferred_weight_gradient_lost() -> None:
    compute = DeferredGradients.compute

    def losing(self: DeferredGradients, cell: tuple[int, int]) -> None:
        if cell[1] == 1:
            self._pending[cell].pop()
        compute(self, cell)

    DeferredGradients.compute = losing  # type: ignore[method-assign]


def weight_gradient_of_another_micro_batch() -> None:
    """The gradients of one micro-batch are multiplied with the inputs of the stage's latest one."""
    compute = DeferredGradients.compute

    def mixing(self: DeferredGradients, cell: tuple[int, int]) -> None:
        latest = self._pending[max(c for c in self.cells if c[0] == cell[0])]
        own = self._pending[cell]
        own[:] = [dataclasses.replace(p, inputs=q.inputs) for p, q in zip(own, latest)]
        compute(self, cell)

    DeferredGradients.compute = mixing  # type: ignore[method-assign]


def tied_head_without_a_gradient() -> None:
    """If first and last stage share a parameter, its use in the head gives no gradient."""
    build = OutputLayer.__init__

    def half_tied(head: OutputLayer, *sizes: Any, **given: Any) -> None:
        build(head, *sizes, **given)
        if given.get("shared") is not None:
            head.apply_weight = lambda x, bias=None: F.linear(x, head.weight.detach())  # type: ignore[method-assign]

    OutputLayer.__init__ = half_tied  # type: ignore[method-assign]


def deferred_gradient_for_a_copy() -> None:
    """A recomputed layer defers the gradient of the unpacked weight, a copy whose gradient is not read."""

    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        assert ctx.deferred.take(Product(weight, weight_gradient, gradients[0], x))
        return gradients[0] @ weight, None, None, None

    deferral_module._Linear.backward = staticmethod(backward)  # type: ignore[method-assign]


def dropout_drawn_anew_in_recompute() -> None:
    """The dropout mask depends on the number of visits, so recompute drops other elements."""
    drop, visited = layer_module.hidden_dropout, list[tuple[DropoutKeys, int]]()

    def counting(x: Tensor, keys: DropoutKeys, site: int, probability: float, stream: Tensor) -> Tensor:
        again = any(seen is keys and place == site for seen, place in visited)
        visited.append((keys, site))
        return drop(x, keys, site + 1000 if again else site, probability, stream)

    layer_module.hidden_dropout = counting


def recomputed_without_a_sum() -> None:
    """Recompute leaves out the all-reduce over the tensor axis."""
    leave = TensorAxis.leave

    def local_in_backward(self: TensorAxis, x: Tensor) -> Tensor:
        in_backward = torch._C._current_graph_task_id() != -1
        return x.clone() if in_backward else leave(self, x)

    TensorAxis.leave = local_in_backward  # type: ignore[method-assign]


# Each bug with a family and a layout on which it acts.
BUGS: dict[str, tuple[Callable[[], None], str, str]] = {
    "row output not summed": (row_output_not_summed, "llama", "tp2"),
    "column input gradient not summed": (column_input_gradient_not_summed, "llama", "tp2"),
    "norm gradients not summed": (norm_gradients_not_summed, "llama", "tp2 sp"),
    "QK-norm gradients not summed": (norm_gradients_not_summed, "qwen3", "tp2"),
    "row bias gradient not summed": (row_bias_gradient_not_summed, "gpt", "tp2 sp"),
    "position gradients not summed": (position_gradients_not_summed, "gpt", "tp2 sp"),
    "shared key/value gradients not summed": (shared_key_value_gradients_not_summed, "qwen2.5", "tp4"),
    "tied weights not summed": (tied_weights_not_summed, "qwen2.5", "pp2"),
    "loss divided by a local count": (loss_divided_by_a_local_count, "llama", "dp2"),
    "bias added on every rank": (bias_added_on_every_rank, "gpt", "tp2 sp"),
    "gate and up cut as one": (gate_and_up_cut_as_one, "llama", "tp2"),
    "micro-batch dropped": (micro_batch_dropped, "llama", "pp2"),
    "labels of another micro-batch": (wrong_micro_batch_labels, "llama", "pp2 gpipe"),
    "gradients not reduced": (gradients_not_reduced, "llama", "dp2"),
    "replicated norm counted everywhere": (replicated_norm_counted_everywhere, "llama", "tp2"),
    "stale ZeRO shard": (stale_shard, "llama", "dp2 zero1"),
    "dropout by local position": (dropout_by_local_position, "gpt", "tp2 sp"),
    "dropout by local sample": (dropout_by_local_sample, "gpt", "dp2"),
    "padding takes probability": (padding_takes_probability, "llama", "tp2"),
    "padding takes probability in a fused loss": (padding_takes_probability_fused, "llama", "tp4"),
    "each rank's own largest logit": (own_largest_logit, "llama", "tp4"),
    "clipped by a local norm": (clipped_by_a_local_norm, "llama", "tp2"),
    "heads in another order": (heads_interleaved, "llama", "tp2"),
    "positions of split sequences from zero": (positions_from_zero, "llama", "cp2"),
    "later tokens visible": (later_tokens_visible, "llama", "cp2"),
    "attention parts not rescaled": (attention_parts_not_rescaled, "qwen3", "cp2"),
    "key gradients not summed": (key_gradients_not_summed, "llama", "cp2 all_gather"),
    "key gradients left on the way": (key_gradients_left_on_the_way, "qwen2.5", "cp2"),
    "loss of one context rank": (loss_of_one_context_rank, "llama", "cp2"),
    "dropout by local position of a split sequence": (dropout_by_local_position, "gpt", "cp2"),
    "a deferred weight gradient lost": (deferred_weight_gradient_lost, "llama", "pp2 zero-bubble"),
    "weight gradient of another micro-batch": (
        weight_gradient_of_another_micro_batch,
        "llama",
        "pp2 zbv dp2 zero1",
    ),
    "tied head without a gradient": (tied_head_without_a_gradient, "qwen2.5", "pp2 zbv dp2 zero2 overlap"),
    "deferred gradient for a copy": (deferred_gradient_for_a_copy, "llama", "pp2 zero-bubble full"),
    "dropout drawn anew in recompute": (dropout_drawn_anew_in_recompute, "llama", "tp2 sp full"),
    "recomputed without a sum": (recomputed_without_a_sum, "llama", "tp2 dp2 overlap full"),
    **MIXTURE_BUGS,
    **SHARD_BUGS,
    **SCALE_BUGS,
}


def plant(bug: str) -> None:
    """Plants a bug in this process; does nothing for an empty name."""
    if bug:
        BUGS[bug][0]()

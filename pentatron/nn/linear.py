"""Linear layers and embedding tables split across the tensor axis; with one rank they are ordinary layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pentatron.devices import FP8_MULTIPLE
from pentatron.layout.ranks import Axis
from pentatron.ops import fp8_linear
from pentatron.ops.activation import gated, gated_linear
from pentatron.ops.linear import linear
from pentatron.parallel import sharding
from pentatron.parallel.axes import TensorAxis
from pentatron.parallel.sharding import Initialization, Shape, Shard, ShardedModule, ShardingSpec


@dataclass(frozen=True)
class Rows:
    """A range of rows of a logical matrix on this rank; if `is_replicated`, kv neighbours hold them too."""

    start: int
    count: int
    is_replicated: bool = False


def even_rows(total: int, axis: TensorAxis) -> tuple[Rows, ...]:
    """The rank's equal share of the rows."""
    share = axis.share(total)
    return (Rows(axis.rank * share, share),)


class WeightedModule(ShardedModule):
    """A module that multiplies by its weight, in fp8 if configured and the sides of the weight allow it.

    `is_split`: other tensor ranks have the rest of the matrix. `graph_break_reason`: why it breaks the graph
    of a compiled layer.
    """

    weight: nn.Parameter
    fp8: fp8_linear.Fp8Format | None = None
    graph_break_reason = ""

    def __init__(
        self, options: fp8_linear.LinearOptions = fp8_linear.DEFAULT_LINEAR, is_split: bool = False
    ) -> None:
        super().__init__()
        self.options = options
        self.deferred = options.deferred
        self.scale = fp8_linear.WeightScale()
        if options.in_graph and options.deferred is not None:
            self.graph_break_reason = "matrix products, whose weight gradients come later in the schedule"
        elif options.in_graph and is_split:
            self.graph_break_reason = "matrix products that communicate with other tensor ranks"
        if self.graph_break_reason:
            self.forward = torch.compiler.disable(self.forward)

    def declare_weight(
        self, local_shape: Shape, declared: ShardingSpec, shared: nn.Parameter | None = None
    ) -> nn.Parameter:
        """Declares the weight, or registers another layer's.

        A 2-D weight uses fp8 if both sides are multiples of FP8_MULTIPLE.
        """
        if shared is None:
            weight = self.declare("weight", local_shape, declared)
        else:
            self.register_parameter("weight", shared)
            weight, self.declared["weight"] = shared, declared
        if len(local_shape) == 2 and all(side % FP8_MULTIPLE == 0 for side in local_shape):
            self.fp8 = self.options.fp8
        if self.fp8 is not None and self.options.scales is not None:
            self.scale = self.options.scales.of(self)
        return weight

    @property
    def is_plain(self) -> bool:
        """Whether products run in the model's precision with immediate weight gradients."""
        return self.deferred is None and self.fp8 is None

    def apply_weight(self, x: Tensor, bias: Tensor | None = None, gates: bool = False) -> Tensor:
        """Returns `x Wᵀ + b`; with `gates`, `silu(gate) * up` of it, with the gate in the first half."""
        if self.fp8 is not None and fp8_linear.fp8_supports(x):
            scale = self.scale.known
            return fp8_linear.fp8_linear(x, self.weight, bias, self.fp8, self.deferred, scale, gates)
        output = linear(x, self.weight, bias, self.deferred)
        return gated(output) if gates else output


class ColumnParallelLinear(WeightedModule):
    """`y = x Wᵀ + b` with the outputs (rows of W) split across ranks; the input is the hidden states."""

    def __init__(self, inputs: int, outputs: int, rows: Sequence[Rows], bias: bool, axis: TensorAxis) -> None:
        super().__init__(axis.linear, is_split=axis.size > 1)
        self.axis = axis
        local = sum(r.count for r in rows)
        declared = ShardingSpec((outputs, inputs), _row_shards(rows, (inputs,)), Initialization())
        self.weight = self.declare_weight((local, inputs), declared)
        of_bias = ShardingSpec((outputs,), _row_shards(rows, ()), sharding.ZEROS)
        self.bias = self.declare("bias", (local,), of_bias) if bias else None

    def forward(self, x: Tensor, gates: bool = False) -> Tensor:
        return self.apply_weight(self.axis.enter(x), self.bias, gates)


def _row_shards(rows: Sequence[Rows], rest: Shape) -> tuple[Shard, ...]:
    """Shards of a matrix (`rest` is its width) or of a bias. Gradients of replicated rows are summed."""
    shards, local = [], 0
    for range_ in rows:
        shared: frozenset[Axis] = frozenset({"kv"}) if range_.is_replicated else frozenset()
        zeros = (0,) * len(rest)
        start, place = (range_.start, *zeros), (local, *zeros)
        shards.append(Shard(start, place, (range_.count, *rest), shared, partial_over=shared))
        local += range_.count
    return tuple(shards)


class RowParallelLinear(WeightedModule):
    """`y = x Wᵀ + b` with the inputs (columns of W) split across ranks; the output is the hidden states."""

    def __init__(self, inputs: int, outputs: int, bias: bool, axis: TensorAxis, scale: float = 1.0) -> None:
        super().__init__(axis.linear, is_split=axis.size > 1)
        self.axis = axis
        share = axis.share(inputs)
        shard = Shard((0, axis.rank * share), (0, 0), (outputs, share))
        declared = ShardingSpec((outputs, inputs), (shard,), Initialization(scale))
        self.weight = self.declare_weight((outputs, share), declared)
        # Added after the reduction, so once; with sequence parallelism each rank adds it to its own tokens.
        of_bias = sharding.replicated((outputs,), sharding.ZEROS, axis.partial_axes)
        self.bias = self.declare("bias", (outputs,), of_bias) if bias else None

    def forward(self, x: Tensor, gates: bool = False) -> Tensor:
        """With `gates`, multiplies `silu(gate) * up` of `x` without saving it.

        Fused here, because hooks that gather the weights are on this module.
        """
        y = self.axis.leave(gated_linear(x, self.weight) if gates else self.apply_weight(x))
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(WeightedModule):
    """A word embedding with the rows split across ranks.

    Rows from `vocabulary` on are padding: they belong to no logical tensor, stay zero and are never looked
    up. A tied table has a copy on the last stage (`tied` here, `tied_to` the name of the first table there),
    and the gradients of both are summed. If both stages are on one rank, the second table uses the parameter
    of the first (`shared`).
    """

    def __init__(
        self,
        rows: int,
        vocabulary: int,
        width: int,
        axis: TensorAxis,
        tied_to: str | None = None,
        tied: bool = False,
        shared: "VocabParallelEmbedding | None" = None,
    ) -> None:
        super().__init__(axis.linear)
        self.axis = axis
        share = axis.share(rows)
        self.first = axis.rank * share
        valid = max(0, min(vocabulary - self.first, share))
        has_copy = tied or (tied_to is not None and shared is None)
        both_ends: frozenset[Axis] = frozenset({"embedding"} if has_copy else ())
        # Declared even if empty, on a rank with padding only: all ranks must reduce a parameter in the same
        # way.
        shard = Shard((min(self.first, vocabulary), 0), (0, 0), (valid, width), both_ends, both_ends)
        declared = ShardingSpec((vocabulary, width), (shard,), Initialization(), tied_to)
        weight = None if shared is None else shared.weight
        self.weight = self.declare_weight((share, width), declared, weight)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Looks up the tokens among this rank's rows; the sum over the ranks is the hidden states."""
        if self.axis.size == 1:
            return F.embedding(tokens_BS, self.weight)
        local = tokens_BS - self.first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        embedded = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.axis.leave(embedded.masked_fill(elsewhere[..., None], 0))

    def logits(self, x_BSD: Tensor) -> Tensor:
        """Returns this rank's shard of the logits of every token."""
        return self.apply_weight(self.axis.enter(x_BSD))


class OutputLayer(VocabParallelEmbedding):
    """The output layer."""

    def forward(
        self, x_BSD: Tensor, function: Callable[[VocabParallelEmbedding, Tensor], Tensor] | None = None
    ) -> Tensor:
        """Returns logits, or `function(self, x_BSD)`.

        The function is called in here, because hooks that gather the weights are on this module.
        """
        return self.logits(x_BSD) if function is None else function(self, x_BSD)


class ReplicatedWeight(ShardedModule):
    """A module with a weight that every tensor rank holds in full."""

    def __init__(self, shape: Shape, axis: TensorAxis) -> None:
        super().__init__()
        declared = sharding.replicated(shape, Initialization(), axis.partial_axes)
        self.weight = self.declare("weight", shape, declared)


class PositionEmbedding(ReplicatedWeight):
    """Learned position embedding."""

    def forward(self, positions_BS: Tensor) -> Tensor:
        return F.embedding(positions_BS, self.weight)

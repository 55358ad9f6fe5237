"""Linear layers and tables, split over the tensor axis. With one rank on it they are the ordinary ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pentatron.devices import FP8_MULTIPLE
from pentatron.layout.ranks import Axis
from pentatron.ops.activation import gated, gated_linear
from pentatron.ops.fp8_linear import (
    PLAIN,
    Fp8Format,
    LinearOptions,
    WeightScale,
    can_be_scaled,
    scaled_linear,
)
from pentatron.ops.linear import linear
from pentatron.parallel.axes import TensorAxis
from pentatron.parallel.shards import ZEROS, Declared, DeclaringModule, Initial, Piece, Shape, whole


def activated(inner: Tensor, has_gate: bool) -> Tensor:
    """What lies between the two matrices of an MLP; a gated one gets the gate's half first."""
    return gated(inner) if has_gate else F.gelu(inner, approximate="tanh")


@dataclass(frozen=True)
class Rows:
    """Some rows of a logical matrix, on this rank; with `copies`, neighbours on the kv axis hold them too."""

    start: int
    count: int
    copies: bool = False


def even_rows(total: int, axis: TensorAxis) -> tuple[Rows, ...]:
    """The rank's equal share of the rows."""
    share = axis.share(total)
    return (Rows(axis.rank * share, share),)


class WeightedModule(DeclaringModule):
    """Multiplies by its weight as the options say; in fp8 if the sides of the weight allow it.

    `is_split`: other tensor ranks hold the rest of the matrix. `left_out` is why a compiled layer around it
    leaves it out.
    """

    weight: nn.Parameter
    fp8: Fp8Format | None = None
    left_out = ""

    def __init__(self, options: LinearOptions = PLAIN, is_split: bool = False) -> None:
        super().__init__()
        self.options = options
        self.deferred = options.deferred
        self.scale = WeightScale()
        if options.in_graph and options.deferred is not None:
            self.left_out = "matrix products, whose weight gradients wait for another part of the schedule"
        elif options.in_graph and is_split:
            self.left_out = "matrix products that talk to other tensor ranks"
        if self.left_out:
            self.forward = torch.compiler.disable(self.forward)

    def declare_weight(
        self, local_shape: Shape, declared: Declared, shared: nn.Parameter | None = None
    ) -> nn.Parameter:
        """The matrix, or one that another layer has too. Its sides decide whether products are in fp8; those
        of experts are not."""
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
        """Nothing but a product in the model's own precision, its gradients at once."""
        return self.deferred is None and self.fp8 is None

    def multiplied(self, x: Tensor, bias: Tensor | None = None, gates: bool = False) -> Tensor:
        """With `gates`, `silu(gate) * up` of it, its first half being the gate."""
        if self.fp8 is not None and can_be_scaled(x):
            return scaled_linear(x, self.weight, bias, self.fp8, self.deferred, self.scale.known, gates)
        made = linear(x, self.weight, bias, self.deferred)
        return gated(made) if gates else made


class ColumnParallelLinear(WeightedModule):
    """`y = x Wᵀ + b` with the outputs, which are the rows of W, spread over the ranks; the input is the stream."""

    def __init__(self, inputs: int, outputs: int, rows: Sequence[Rows], bias: bool, axis: TensorAxis) -> None:
        super().__init__(axis.linear, is_split=axis.size > 1)
        self.axis = axis
        local = sum(r.count for r in rows)
        self.weight = self.declare_weight(
            (local, inputs), Declared((outputs, inputs), _row_pieces(rows, (inputs,)), Initial())
        )
        self.bias = (
            self.declare("bias", (local,), Declared((outputs,), _row_pieces(rows, ()), ZEROS))
            if bias
            else None
        )

    def forward(self, x: Tensor, gates: bool = False) -> Tensor:
        return self.multiplied(self.axis.enter(x), self.bias, gates)


def _row_pieces(rows: Sequence[Rows], rest: Shape) -> tuple[Piece, ...]:
    """The same rows of a matrix (`rest` is its width) or of a bias; a row held twice has a share of its gradient."""
    pieces, local = [], 0
    for held in rows:
        shared: frozenset[Axis] = frozenset({"kv"}) if held.copies else frozenset()
        zeros = (0,) * len(rest)
        pieces.append(
            Piece((held.start, *zeros), (local, *zeros), (held.count, *rest), shared, partial_over=shared)
        )
        local += held.count
    return tuple(pieces)


class RowParallelLinear(WeightedModule):
    """`y = x Wᵀ + b` with the inputs, which are the columns of W, spread over the ranks; the output is the stream."""

    def __init__(self, inputs: int, outputs: int, bias: bool, axis: TensorAxis, scale: float = 1.0) -> None:
        super().__init__(axis.linear, is_split=axis.size > 1)
        self.axis = axis
        share = axis.share(inputs)
        piece = Piece((0, axis.rank * share), (0, 0), (outputs, share))
        self.weight = self.declare_weight(
            (outputs, share), Declared((outputs, inputs), (piece,), Initial(scale))
        )
        # Added once, after the sum; with sequence parallelism each rank adds it to its own tokens.
        self.bias = (
            self.declare("bias", (outputs,), whole((outputs,), ZEROS, axis.partial_in_stream))
            if bias
            else None
        )

    def forward(self, x: Tensor, gates: bool = False) -> Tensor:
        """With `gates`, of `silu(gate) * up` of `x`, of which nothing is kept: here, since weights may be waited for at the door."""
        y = self.axis.leave(gated_linear(x, self.weight) if gates else self.multiplied(x))
        return y if self.bias is None else y + self.bias


class VocabularyTable(WeightedModule):
    """Word vectors, the rows spread over the ranks, looked up by token.

    Rows from `vocabulary` on are padding: they belong to no logical tensor, stay zero and are never looked
    up. A tied table has a second copy on the last stage (`tied` here, `tied_to` the name of the first one
    there), and the gradients of both make one. Where both stages are on one rank there is no copy: the second
    table takes the weight of the first (`shared`).
    """

    def __init__(
        self,
        rows: int,
        vocabulary: int,
        width: int,
        axis: TensorAxis,
        tied_to: str | None = None,
        tied: bool = False,
        shared: "VocabularyTable | None" = None,
    ) -> None:
        super().__init__(axis.linear)
        self.axis = axis
        share = axis.share(rows)
        self.first = axis.rank * share
        meaningful = max(0, min(vocabulary - self.first, share))
        has_copy = tied or (tied_to is not None and shared is None)
        both_ends: frozenset[Axis] = frozenset({"embedding"} if has_copy else ())
        # Also where it is empty, on a rank of padding alone: how a parameter is reduced must be the same on every rank.
        piece = Piece((min(self.first, vocabulary), 0), (0, 0), (meaningful, width), both_ends, both_ends)
        declared = Declared((vocabulary, width), (piece,), Initial(), tied_to)
        given = None if shared is None else shared.weight
        self.weight = self.declare_weight((share, width), declared, given)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Each rank finds the tokens among its rows; the sum over the ranks is the stream."""
        if self.axis.size == 1:
            return F.embedding(tokens_BS, self.weight)
        local = tokens_BS - self.first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.axis.leave(found.masked_fill(elsewhere[..., None], 0))

    def logits(self, x_BSD: Tensor) -> Tensor:
        """Of this rank's part of the vocabulary, for every token of the stream."""
        return self.multiplied(self.axis.enter(x_BSD))


class VocabularyHead(VocabularyTable):
    """Word vectors that are multiplied with the stream."""

    def forward(
        self, x_BSD: Tensor, made: Callable[[VocabularyTable, Tensor], Tensor] | None = None
    ) -> Tensor:
        """Logits, or what `made` makes of the head and the stream: inside, since weights may be waited for at the door."""
        return self.logits(x_BSD) if made is None else made(self, x_BSD)


class PositionTable(DeclaringModule):
    """Learned positions: whole on every rank."""

    def __init__(self, rows: int, width: int, axis: TensorAxis) -> None:
        super().__init__()
        self.weight = self.declare(
            "weight", (rows, width), whole((rows, width), Initial(), axis.partial_in_stream)
        )

    def forward(self, positions_BS: Tensor) -> Tensor:
        return F.embedding(positions_BS, self.weight)

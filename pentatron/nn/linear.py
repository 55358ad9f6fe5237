"""Linear layers and tables, split over the tensor axis. With one rank on it they are the ordinary ones."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor, nn

from pentatron.kernels.gate import gated
from pentatron.layout.ranks import Axis
from pentatron.parallel.deferral import DeferredGradients, linear
from pentatron.parallel.gated_linear import gated_linear
from pentatron.parallel.pieces import ZEROS, Declared, DeclaringModule, Initial, Piece, Shape, whole
from pentatron.parallel.scaled_linear import (
    UNKNOWN,
    Fp8Format,
    Scale,
    can_be_scaled,
    scaled_linear,
)
from pentatron.parallel.tensor_axis import TensorAxis


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
    """Multiplies by its weight; with `deferred`, that weight's gradient may come later than the others; with `fp8`, in fp8, with a
    scale that is known or not."""

    weight: nn.Parameter
    deferred: DeferredGradients | None = None
    fp8: Fp8Format | None = None
    scale: Scale = UNKNOWN

    @property
    def is_plain(self) -> bool:
        """Nothing but a product in the model's own precision, its gradients at once."""
        return self.deferred is None and self.fp8 is None

    def multiplied(self, x: Tensor, bias: Tensor | None = None, gates: bool = False) -> Tensor:
        """With `gates`, `silu(gate) * up` of it, its first half being the gate."""
        if self.fp8 is not None and can_be_scaled(x):
            return scaled_linear(x, self.weight, bias, self.fp8, self.deferred, self.scale, gates)
        made = linear(x, self.weight, bias, self.deferred)
        return gated(made) if gates else made


def defer_weight_gradients(stages: Iterable[nn.Module], deferred: DeferredGradients) -> None:
    """From now on the linear layers of these stages can leave their weight gradients for later."""
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, WeightedModule):
                module.deferred = deferred


class ColumnParallelLinear(WeightedModule):
    """`y = x Wᵀ + b` with the outputs, which are the rows of W, spread over the ranks; the input is the stream."""

    def __init__(self, inputs: int, outputs: int, rows: Sequence[Rows], bias: bool, axis: TensorAxis) -> None:
        super().__init__()
        self.axis = axis
        local = sum(r.count for r in rows)
        self.weight = self.declare(
            "weight", (local, inputs), Declared((outputs, inputs), _row_pieces(rows, (inputs,)), Initial())
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
        super().__init__()
        self.axis = axis
        share = axis.share(inputs)
        piece = Piece((0, axis.rank * share), (0, 0), (outputs, share))
        self.weight = self.declare(
            "weight", (outputs, share), Declared((outputs, inputs), (piece,), Initial(scale))
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

    Rows from `vocabulary` on are padding: they belong to no logical tensor, stay zero and are never looked up.
    """

    def __init__(
        self,
        rows: int,
        vocabulary: int,
        width: int,
        axis: TensorAxis,
        tied_to: str | None = None,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.axis = axis
        share = axis.share(rows)
        self.first = axis.rank * share
        meaningful = max(0, min(vocabulary - self.first, share))
        # A tied table has a second copy on the last stage; the gradients of both make one.
        both_ends: frozenset[Axis] = frozenset({"embedding"}) if tied or tied_to else frozenset()
        # Also where it is empty, on a rank of padding alone: how a parameter is reduced must be the same on every rank.
        piece = Piece((min(self.first, vocabulary), 0), (0, 0), (meaningful, width), both_ends, both_ends)
        declared = Declared((vocabulary, width), (piece,), Initial(), tied_to)
        self.weight = self.declare("weight", (share, width), declared)

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


def tie_on_one_rank(table: VocabularyTable, head: VocabularyHead) -> None:
    """Makes the head multiply with the table's own weight: two stages, one parameter, and no copy on another rank."""
    declared = table.declared["weight"]
    alone: frozenset[Axis] = frozenset()
    pieces = tuple(replace(piece, replicated_over=alone, partial_over=alone) for piece in declared.pieces)
    table.declared["weight"] = replace(declared, pieces=pieces)
    head.declared["weight"] = replace(head.declared["weight"], pieces=pieces)
    head.weight = table.weight


class PositionTable(DeclaringModule):
    """Learned positions: whole on every rank."""

    def __init__(self, rows: int, width: int, axis: TensorAxis) -> None:
        super().__init__()
        self.weight = self.declare(
            "weight", (rows, width), whole((rows, width), Initial(), axis.partial_in_stream)
        )

    def forward(self, positions_BS: Tensor) -> Tensor:
        return F.embedding(positions_BS, self.weight)

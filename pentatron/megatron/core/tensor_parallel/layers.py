"""Linear layers and tables, split over the tensor axis."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pentatron.errors import UserError
from pentatron.megatron.state import current, is_running
from pentatron.nn import linear
from pentatron.nn.linear import RowParallelLinear, Rows, even_rows
from pentatron.nn.linear import VocabularyTable as VocabParallelEmbedding
from pentatron.parallel.axes import TensorAxis
from pentatron.parallel.collectives import Group


class _WithoutOthers(TensorAxis):
    """One of several tensor ranks, whose others are not there: it computes its share and talks to nobody."""

    def enter(self, x_BSD: Tensor) -> Tensor:
        return x_BSD


class ColumnParallelLinear(linear.ColumnParallelLinear):
    """For the slot of a spec, or by itself: `ColumnParallelLinear(in_features, out_features, tp_size)` is one rank's share.

    By itself it is the run's share where a run has that many tensor ranks, else that of the first of so many.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp_size: int | Sequence[Rows] = 1,
        bias: bool = False,
        axis: TensorAxis | None = None,
    ) -> None:
        if not isinstance(tp_size, int):
            assert axis is not None, "a layer gives the rows together with the axis"
            super().__init__(in_features, out_features, tp_size, bias, axis)
        else:
            own = _axis_of(tp_size, out_features)
            super().__init__(in_features, out_features, even_rows(out_features, own), bias, own)
            torch.nn.init.normal_(self.weight, std=0.02)
            if self.bias is not None:
                torch.nn.init.zeros_(self.bias)
        self.tp_size = self.axis.size
        self.out_per_partition = self.weight.shape[0]


def _axis_of(tp_size: int, out_features: int) -> TensorAxis:
    if tp_size < 1 or out_features % tp_size:
        raise UserError(
            f"ColumnParallelLinear: {out_features} outputs cannot be shared by {tp_size} tensor ranks; use a size that divides them"
        )
    if is_running() and current().groups.axes.tensor.size == tp_size:
        return current().groups.axes.tensor
    return _WithoutOthers(Group(0, tp_size))


__all__ = ["ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"]

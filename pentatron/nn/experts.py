"""The experts of one rank: as many small MLPs, whose tokens come sorted by expert."""

from collections.abc import Sequence

from torch import Tensor, nn

from pentatron.config.model import MoEConfig, TransformerConfig
from pentatron.nn.init import residual_scale
from pentatron.nn.linear import WeightedModule
from pentatron.nn.mlp import activated
from pentatron.nn.recompute import NOTHING, Recompute
from pentatron.parallel.deferral import grouped_linear
from pentatron.parallel.expert_axis import ExpertAxis
from pentatron.parallel.pieces import Declared, Initial, Piece, Shape


class ExpertLinear(WeightedModule):
    """`y = x Wᵀ` with a matrix for each expert; `grouped`: in one matmul where the device has such."""

    def __init__(
        self, shape: Shape, local: Shape, pieces: tuple[Piece, ...], scale: float, grouped: bool
    ) -> None:
        super().__init__()
        self.grouped = grouped
        declared = Declared(shape, pieces, Initial(scale), copies="expert_data")
        self.weight = self.declare("weight", local, declared)

    def forward(self, rows_ND: Tensor, counts: Sequence[int]) -> Tensor:
        return grouped_linear(rows_ND, self.weight, counts, self.grouped, self.deferred)


class Experts(nn.Module):
    """A rank has some of the experts; of each, where several ranks share it, a part of the inner width."""

    def __init__(self, config: TransformerConfig, moe: MoEConfig, axis: ExpertAxis) -> None:
        super().__init__()
        assert moe.num_experts and moe.moe_ffn_hidden_size
        self.gated = config.gated_linear_unit
        self.recompute: Recompute = NOTHING
        hidden, inner, own = config.hidden_size, moe.moe_ffn_hidden_size, axis.own(moe.num_experts)
        share, count = inner // axis.cut, len(own)
        halves = 2 if self.gated else 1
        # A part of the width is the same rows of gate and up projection, as in a dense layer.
        rows = tuple(
            Piece(
                (own.start, half * inner + axis.part * share, 0), (0, half * share, 0), (count, share, hidden)
            )
            for half in range(halves)
        )
        columns = Piece((own.start, 0, axis.part * share), (0, 0, 0), (count, hidden, share))
        self.linear_fc1 = ExpertLinear(
            (moe.num_experts, halves * inner, hidden),
            (count, halves * share, hidden),
            rows,
            1.0,
            moe.moe_grouped_gemm,
        )
        self.linear_fc2 = ExpertLinear(
            (moe.num_experts, hidden, inner),
            (count, hidden, share),
            (columns,),
            residual_scale(config.num_layers),
            moe.moe_grouped_gemm,
        )

    def forward(self, rows_ND: Tensor, counts: Sequence[int]) -> Tensor:
        inner = self.linear_fc1(rows_ND, counts)
        between = self.recompute("moe_act", activated, inner, self.gated)
        with self.recompute.made_again("moe_act", between, lambda: activated(inner, self.gated)):
            made: Tensor = self.linear_fc2(between, counts)
        return made

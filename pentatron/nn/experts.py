"""The experts of one rank: as many small MLPs, whose tokens come sorted by expert."""

from collections.abc import Sequence

from torch import Tensor, nn

from pentatron.config.decisions import wants_grouped_experts
from pentatron.config.model import MoEConfig, TransformerConfig
from pentatron.config.parameters import expert_sizes, halves_of
from pentatron.nn.axes import Axes
from pentatron.nn.experts_on_device import Matrices, mixed_on_device
from pentatron.nn.init import residual_scale
from pentatron.nn.linear import WeightedModule, activated
from pentatron.nn.router import Routing
from pentatron.parallel.deferral import grouped_linear
from pentatron.parallel.grouped import GroupedRows, Groups, one_kernel_can
from pentatron.parallel.linear_options import PLAIN, LinearOptions
from pentatron.parallel.pieces import Declared, Initial, Piece, Shape


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

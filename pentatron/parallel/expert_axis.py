"""The ranks that hold the experts of a layer between them, and how tokens come to them and back.

These are `expert × expert tensor` ranks, expert tensor fastest. Ranks with the same place on the expert axis hold the same
experts, each of them a part of their inner width. The tokens of the ranks are all different.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pentatron.parallel.collectives import Group, all_gather_into, all_reduce_, all_to_all_into
from pentatron.parallel.tensor_axis import TensorAxis
from pentatron.parallel.world import ALONE, World


@dataclass(frozen=True)
class ExpertAxis:
    """`cut` ranks share one expert. `sequence` are the ranks that share the tokens of a micro-batch."""

    group: Group = ALONE
    cut: int = 1
    sequence: Group = ALONE

    @property
    def holders(self) -> int:
        """How many times the experts of a layer are divided."""
        return self.group.size // self.cut

    @property
    def holder(self) -> int:
        """Which of these divisions this rank has, whole or in part."""
        return self.group.rank // self.cut

    @property
    def part(self) -> int:
        """Which part of its experts' width this rank has."""
        return self.group.rank % self.cut

    def own(self, experts: int) -> range:
        """The numbers of this rank's experts."""
        share = experts // self.holders
        return range(self.holder * share, (self.holder + 1) * share)

    def gathered(self, x_TD: Tensor) -> Tensor:
        """The tokens of all ranks, in their order; gradients are summed and go back."""
        return self._tokens.enter(x_TD[None])[0]

    def summed(self, x_TD: Tensor) -> Tensor:
        """This rank's tokens, each the sum of what all ranks have for it."""
        return self._tokens.leave(x_TD[None])[0]

    @property
    def _tokens(self) -> TensorAxis:
        """Tokens are cut over these ranks as sequence parallelism cuts them over its own."""
        return TensorAxis(self.group, sequence_parallel=True)

    def exchanged(self, x_ND: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Gives each rank its part of the rows, in the order of ranks, and has what they give; gradients go back."""
        if self.group.size == 1:
            return x_ND
        result = _Exchange.apply(x_ND, tuple(sent), tuple(received), self.group)
        assert isinstance(result, Tensor)
        return result

    def exchanged_counts(self, counts_GE: Tensor) -> Tensor:
        """Row i goes to rank i; what comes from rank i is row i."""
        received = torch.empty_like(counts_GE, memory_format=torch.contiguous_format)
        all_to_all_into(received, counts_GE.contiguous(), self.group)
        return received

    def gathered_numbers(self, x_TK: Tensor) -> Tensor:
        """Whole numbers of all ranks, without gradient."""
        return _all_of(x_TK, self.group)

    def over_micro_batch(self, x: Tensor) -> Tensor:
        """Summed over the ranks that share the micro-batch, without gradient."""
        return all_reduce_(x.clone(), self.sequence)

    def of_micro_batch(self, x_TK: Tensor) -> Tensor:
        """The rows of all ranks that share the micro-batch, without gradient."""
        return _all_of(x_TK, self.sequence)


NO_EXPERTS_ELSEWHERE = ExpertAxis()


def expert_axis(world: World) -> ExpertAxis:
    return ExpertAxis(world.group("experts"), world.grid.expert_tensor, world.group("sequence"))


def _all_of(x: Tensor, group: Group) -> Tensor:
    whole = x.new_empty(group.size * x.shape[0], *x.shape[1:])
    all_gather_into(whole, x.contiguous(), group)
    return whole


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: Group
    ) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return _exchanged(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.sizes
        return _exchanged(gradients[0], received, sent, ctx.group), None, None, None


def _exchanged(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    arrived = x.new_empty(sum(received), *x.shape[1:])
    all_to_all_into(arrived, x.contiguous(), group, received, sent)
    return arrived

"""The tensor axis as layers see it: how the stream enters and leaves the part of a layer that is split over ranks.

Outside that part the residual stream is whole on every rank, or, with sequence parallelism, cut along the sequence.
Each pair below is conjugate: the backward of one is the forward of the other.

    whole stream        enter: nothing, backward all-reduce          leave: all-reduce, backward nothing
    cut along sequence  enter: all-gather, backward reduce-scatter   leave: reduce-scatter, backward all-gather
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pentatron.layout.ranks import Axis
from pentatron.ops.fp8_linear import PLAIN, LinearOptions
from pentatron.parallel.collectives import (
    Group,
    all_gather_into,
    all_reduce_,
    all_to_all_into,
    reduce_scatter_into,
)
from pentatron.parallel.world import ALONE, World


@dataclass(frozen=True)
class TensorAxis:
    """`kv_copies` neighbouring ranks hold the same key/value head, where there are fewer heads than ranks.

    `linear`: how the layers that are built on this axis multiply.
    """

    group: Group = ALONE
    kv_copies: int = 1
    sequence_parallel: bool = False
    linear: LinearOptions = PLAIN

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def partial_in_stream(self) -> frozenset[Axis]:
        """Over which axis gradients of weights that act on the stream are partial: each rank sees a part of it."""
        return frozenset({"tensor"}) if self.sequence_parallel else frozenset()

    def share(self, total: int) -> int:
        """This rank's part of `total` rows or columns."""
        assert total % self.size == 0, f"{total} cannot be shared by {self.size} ranks"
        return total // self.size

    def enter(self, x_BSD: Tensor) -> Tensor:
        """The whole stream, for layers whose output is split."""
        if self.size == 1:
            return x_BSD
        return _result((_GatherSequence if self.sequence_parallel else _Copy).apply(x_BSD, self.group))

    def leave(self, x_BSD: Tensor) -> Tensor:
        """The sum of every rank's part of the output, as the stream wants it."""
        if self.size == 1:
            return x_BSD
        return _result((_ScatterSequence if self.sequence_parallel else _Sum).apply(x_BSD, self.group))

    def own_sequence(self, x_BS: Tensor) -> Tensor:
        """This rank's part of something per token that every rank has whole (positions, say); no gradient."""
        if not self.sequence_parallel or self.size == 1:
            return x_BS
        length = self.share(x_BS.shape[1])
        return x_BS[:, self.rank * length : (self.rank + 1) * length]

    def sequence_in_stream(self, length: int) -> int:
        """How many of `length` tokens of a sequence this rank's part of the stream holds."""
        return self.share(length) if self.sequence_parallel else length


WHOLE_LAYERS = TensorAxis()


def tensor_axis(world: World, sequence_parallel: bool) -> TensorAxis:
    return TensorAxis(world.tensor, world.grid.kv_copies, sequence_parallel and world.tensor.size > 1)


def _result(value: Any) -> Tensor:
    """`Function.apply` is not typed."""
    assert isinstance(value, Tensor)
    return value


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_reduce_(gradients[0].clone(memory_format=torch.contiguous_format), ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce_(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _scattered(gradients[0], ctx.group), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _scattered(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradients[0], ctx.group), None


def _gathered(part_BSD: Tensor, group: Group) -> Tensor:
    """Every rank's part of the sequence, in order."""
    batch, length, width = part_BSD.shape
    parts = part_BSD.new_empty(group.size, batch, length, width)
    all_gather_into(parts.view(group.size * batch, length, width), part_BSD.contiguous(), group)
    # Collectives join along the first dimension; with one sequence in the batch this moves nothing.
    return parts.transpose(0, 1).reshape(batch, group.size * length, width)


def _scattered(whole_BSD: Tensor, group: Group) -> Tensor:
    """This rank's part of the sequence, summed over the ranks."""
    batch, length, width = whole_BSD.shape
    share = length // group.size
    parts = whole_BSD.view(batch, group.size, share, width).transpose(0, 1).contiguous()
    own = whole_BSD.new_empty(batch, share, width)
    reduce_scatter_into(own, parts.view(group.size * batch, share, width), group)
    return own


# The context axis: ranks that share every sequence, and which of its tokens each of them has.
#
# A sequence is cut into 2·CP chunks and rank r has the chunks r and 2·CP − 1 − r, in this order. A later
# token attends to more tokens, so one early chunk and one late chunk give every rank the same work.


@dataclass(frozen=True)
class ContextAxis:
    """`exchange` says how ranks come to the keys and values of other ranks: `p2p`, `all_gather` or `a2a`."""

    group: Group = ALONE
    exchange: str = "p2p"

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def chunks(self) -> tuple[int, int]:
        """The numbers of this rank's two chunks."""
        return self.chunks_of(self.rank)

    def chunks_of(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self.size - 1 - rank

    def own_sequence(self, x_BS: Tensor) -> Tensor:
        """This rank's tokens of something that has all of them."""
        if self.size == 1:
            return x_BS
        assert x_BS.shape[1] % (2 * self.size) == 0, f"{x_BS.shape[1]} tokens for {self.size} ranks"
        chunks = x_BS.chunk(2 * self.size, dim=1)
        return torch.cat([chunks[number] for number in self.chunks], dim=1)

    def positions(self, own_length: int, device: torch.device) -> Tensor:
        """Where this rank's `own_length` tokens are in the whole sequence."""
        return self.own_sequence(torch.arange(own_length * self.size, device=device)[None])[0]


WHOLE_SEQUENCES = ContextAxis()


def context_axis(world: World, exchange: str) -> ContextAxis:
    """`allgather` is another spelling of `all_gather`."""
    return ContextAxis(world.group("context"), "all_gather" if exchange == "allgather" else exchange)


def in_order(parts: Tensor) -> Tensor:
    """The whole sequence in its order, from every rank's part: [CP, …, S / CP, H] becomes […, S, H]."""
    early, late = parts.chunk(2, dim=-2)
    return torch.cat((early, late.flip(0))).movedim(0, -3).flatten(-3, -2)


def in_parts(whole: Tensor, ranks: int) -> Tensor:
    """What `in_order` undoes: […, S, H] becomes [CP, …, S / CP, H]."""
    chunks = whole.unflatten(-2, (2 * ranks, -1)).movedim(-3, 0)
    return torch.cat((chunks[:ranks], chunks[ranks:].flip(0)), dim=-2)


# The ranks that hold the experts of a layer between them, and how tokens come to them and back.
#
# These are `expert × expert tensor` ranks, expert tensor fastest. Ranks with the same place on the expert
# axis hold the same experts, each of them a part of their inner width. The tokens of the ranks are all
# different.


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

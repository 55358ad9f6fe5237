"""The tensor axis as layers see it: how the stream enters and leaves the part of a layer that is split over ranks.

Outside that part the residual stream is whole on every rank, or, with sequence parallelism, cut along the sequence.
Each pair below is conjugate: the backward of one is the forward of the other.

    whole stream        enter: nothing, backward all-reduce          leave: all-reduce, backward nothing
    cut along sequence  enter: all-gather, backward reduce-scatter   leave: reduce-scatter, backward all-gather
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pentatron.layout.ranks import Axis
from pentatron.parallel.collectives import Group, all_gather_into, all_reduce_, reduce_scatter_into
from pentatron.parallel.linear_options import PLAIN, LinearOptions
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

"""Parallel axes as layers use them: tensor, context and expert parallelism, with differentiable
communication.

Outside tensor-parallel layers the hidden states are complete on every rank or, with sequence parallelism,
split along the sequence. `enter` and `leave` are conjugate: the backward of one is the forward of the other.

    complete hidden states   enter: identity, backward all-reduce        leave: all-reduce, backward identity
    sequence-parallel        enter: all-gather, backward reduce-scatter  leave: reduce-scatter, backward
    all-gather
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pentatron.layout.ranks import Axis
from pentatron.ops.fp8_linear import DEFAULT_LINEAR, LinearOptions
from pentatron.parallel import collectives
from pentatron.parallel.collectives import Group
from pentatron.parallel.world import ALONE, World


@dataclass(frozen=True)
class _Axis:
    group: Group = ALONE

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size


@dataclass(frozen=True)
class TensorAxis(_Axis):
    """Tensor-parallel group. `kv_copies` neighbouring ranks share a key/value head if there are fewer heads
    than ranks.

    `linear` are the options of the linear layers built on this axis.
    """

    kv_copies: int = 1
    sequence_parallel: bool = False
    linear: LinearOptions = DEFAULT_LINEAR

    @property
    def partial_axes(self) -> frozenset[Axis]:
        """The axis over which gradients of weights that act on hidden states are partial sums."""
        return frozenset({"tensor"}) if self.sequence_parallel else frozenset()

    def share(self, total: int) -> int:
        """Returns this rank's part of `total` rows or columns."""
        assert total % self.size == 0, f"{total} cannot be shared by {self.size} ranks"
        return total // self.size

    @property
    def _enter_leave_ops(self) -> "tuple[Communication, Communication]":
        if self.sequence_parallel:
            return _all_gather_sequence, _reduce_scatter_sequence
        return _unchanged, _summed

    def enter(self, x_BSD: Tensor) -> Tensor:
        """Returns the complete hidden states, for layers whose output is split."""
        forward_op, backward_op = self._enter_leave_ops
        return _communicate(x_BSD, self.group, forward_op, backward_op)

    def leave(self, x_BSD: Tensor) -> Tensor:
        """Sums the ranks' partial outputs; with sequence parallelism keeps this rank's part."""
        forward_op, backward_op = self._enter_leave_ops
        return _communicate(x_BSD, self.group, backward_op, forward_op)

    def own_sequence(self, x_BS: Tensor) -> Tensor:
        """Returns this rank's part of a per-token tensor that all ranks have in full; no gradient."""
        if not self.sequence_parallel or self.size == 1:
            return x_BS
        length = self.share(x_BS.shape[1])
        return x_BS[:, self.rank * length : (self.rank + 1) * length]

    def local_sequence_length(self, length: int) -> int:
        """Returns the number of tokens in this rank's hidden states, for sequences of `length`."""
        return self.share(length) if self.sequence_parallel else length


NO_TENSOR_PARALLELISM = TensorAxis()


def tensor_axis(world: World, sequence_parallel: bool) -> TensorAxis:
    return TensorAxis(world.tensor, world.grid.kv_copies, sequence_parallel and world.tensor.size > 1)


# Communicates a tensor within a group.
Communication = Callable[[Tensor, Group], Tensor]


class _CommunicationFunction(torch.autograd.Function):
    """Communicates a tensor by `forward_op`, and its gradient by `backward_op`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, forward_op: Communication, backward_op: Communication
    ) -> Tensor:
        ctx.group, ctx.backward_op = group, backward_op
        return forward_op(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.backward_op(gradients[0], ctx.group), None, None, None


def _communicate(x: Tensor, group: Group, forward_op: Communication, backward_op: Communication) -> Tensor:
    return x if group.size == 1 else _CommunicationFunction.apply(x, group, forward_op, backward_op)


def _unchanged(x: Tensor, group: Group) -> Tensor:
    return x


def _summed(x: Tensor, group: Group) -> Tensor:
    return collectives.all_reduce_(x.clone(memory_format=torch.contiguous_format), group)


def _all_gather_sequence(part_BSD: Tensor, group: Group) -> Tensor:
    """Concatenates every rank's part of the sequence."""
    batch, length, width = part_BSD.shape
    parts = part_BSD.new_empty(group.size, batch, length, width)
    collectives.all_gather_into(parts.view(group.size * batch, length, width), part_BSD.contiguous(), group)
    # Collectives concatenate along the first dimension; for a batch of one sequence this moves no data.
    return parts.transpose(0, 1).reshape(batch, group.size * length, width)


def _reduce_scatter_sequence(whole_BSD: Tensor, group: Group) -> Tensor:
    """Sums over the ranks and returns this rank's part of the sequence."""
    batch, length, width = whole_BSD.shape
    own_length = length // group.size
    parts = whole_BSD.view(batch, group.size, own_length, width).transpose(0, 1).contiguous()
    own = whole_BSD.new_empty(batch, own_length, width)
    collectives.reduce_scatter_into(own, parts.view(group.size * batch, own_length, width), group)
    return own


# --- context parallelism ---


@dataclass(frozen=True)
class ContextAxis(_Axis):
    """Context-parallel group. `exchange` of keys and values: `p2p` (ring), `all_gather` or `a2a`.

    A sequence is cut into 2·CP chunks; rank r has chunks r and 2·CP − 1 − r, in this order. Later tokens
    attend to more tokens, so one early and one late chunk balance the work.
    """

    exchange: str = "p2p"

    @property
    def chunks(self) -> tuple[int, int]:
        """The indices of this rank's two chunks."""
        return self.chunks_of(self.rank)

    def chunks_of(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self.size - 1 - rank

    def own_sequence(self, x_BS: Tensor) -> Tensor:
        """Returns this rank's tokens of a tensor that has all of them."""
        if self.size == 1:
            return x_BS
        assert x_BS.shape[1] % (2 * self.size) == 0, f"{x_BS.shape[1]} tokens for {self.size} ranks"
        chunks = x_BS.chunk(2 * self.size, dim=1)
        return torch.cat([chunks[number] for number in self.chunks], dim=1)

    def positions(self, own_length: int, device: torch.device) -> Tensor:
        """Returns the positions of this rank's `own_length` tokens in the sequence."""
        return self.own_sequence(torch.arange(own_length * self.size, device=device)[None])[0]


NO_CONTEXT_PARALLELISM = ContextAxis()


def context_axis(world: World, exchange: str) -> ContextAxis:
    """Returns the context axis; `allgather` is a synonym of `all_gather`."""
    return ContextAxis(world.group("context"), "all_gather" if exchange == "allgather" else exchange)


def gather_order(parts: Tensor) -> Tensor:
    """Reorders all-gathered chunks into the sequence: [CP, …, S / CP, H] becomes […, S, H]."""
    early, late = parts.chunk(2, dim=-2)
    return torch.cat((early, late.flip(0))).movedim(0, -3).flatten(-3, -2)


def chunk_order(whole: Tensor, ranks: int) -> Tensor:
    """Inverse of `gather_order`: […, S, H] becomes [CP, …, S / CP, H]."""
    chunks = whole.unflatten(-2, (2 * ranks, -1)).movedim(-3, 0)
    return torch.cat((chunks[:ranks], chunks[ranks:].flip(0)), dim=-2)


# --- expert parallelism ---


@dataclass(frozen=True)
class ExpertAxis:
    """Expert-parallel group of a layer: expert × expert tensor ranks, expert tensor fastest.

    Ranks with the same index on the expert axis hold the same experts; `expert_tp_size` ranks share one
    expert by splitting its inner dimension. All ranks of the group have different tokens. `sequence` are the
    ranks that share the tokens of a micro-batch.
    """

    group: Group = ALONE
    expert_tp_size: int = 1
    sequence: Group = ALONE

    @property
    def ep_size(self) -> int:
        """The expert parallel size."""
        return self.group.size // self.expert_tp_size

    @property
    def ep_rank(self) -> int:
        """The index of this rank on the expert axis."""
        return self.group.rank // self.expert_tp_size

    @property
    def expert_tp_rank(self) -> int:
        """The index of this rank on the expert tensor axis."""
        return self.group.rank % self.expert_tp_size

    def own(self, experts: int) -> range:
        """Returns the indices of this rank's experts."""
        share = experts // self.ep_size
        return range(self.ep_rank * share, (self.ep_rank + 1) * share)

    def gathered(self, x_TD: Tensor) -> Tensor:
        """All-gathers the tokens of all ranks; backward reduce-scatters the gradients."""
        return self._tokens.enter(x_TD[None])[0]

    def summed(self, x_TD: Tensor) -> Tensor:
        """Reduce-scatters the tokens of all ranks; backward all-gathers the gradients."""
        return self._tokens.leave(x_TD[None])[0]

    @property
    def _tokens(self) -> TensorAxis:
        """Splits tokens over these ranks as sequence parallelism does over the tensor axis."""
        return TensorAxis(self.group, sequence_parallel=True)

    def all_to_all(self, x_ND: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Sends consecutive rows to the ranks and returns the received rows. See `all_to_all`."""
        return all_to_all(x_ND, self.group, sent, received)

    def all_to_all_counts(self, counts_GE: Tensor) -> Tensor:
        """Sends row i to rank i; row i of the result comes from rank i."""
        received = torch.empty_like(counts_GE, memory_format=torch.contiguous_format)
        collectives.all_to_all_into(received, counts_GE.contiguous(), self.group)
        return received

    def all_gather_integers(self, x_TK: Tensor) -> Tensor:
        """All-gathers integers of all ranks, without gradient."""
        return _all_gather_rows(x_TK, self.group)

    def sum_over_micro_batch(self, x: Tensor) -> Tensor:
        """Sums over the ranks that share the micro-batch, without gradient."""
        return collectives.all_reduce_(x.clone(), self.sequence)

    def gather_micro_batch(self, x_TK: Tensor) -> Tensor:
        """All-gathers the rows of the ranks that share the micro-batch, without gradient."""
        return _all_gather_rows(x_TK, self.sequence)


NO_EXPERT_PARALLELISM = ExpertAxis()


def expert_axis(world: World) -> ExpertAxis:
    return ExpertAxis(world.group("experts"), world.grid.expert_tensor, world.group("sequence"))


def _all_gather_rows(x: Tensor, group: Group) -> Tensor:
    whole = x.new_empty(group.size * x.shape[0], *x.shape[1:])
    collectives.all_gather_into(whole, x.contiguous(), group)
    return whole


def all_to_all(x_ND: Tensor, group: Group, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Sends consecutive rows to the ranks of a group and returns the received rows (differentiable)."""
    forward_op = partial(_exchanged, sent=tuple(sent), received=tuple(received))
    backward_op = partial(_exchanged, sent=tuple(received), received=tuple(sent))
    return _communicate(x_ND, group, forward_op, backward_op)


def _exchanged(x: Tensor, group: Group, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    received_rows = x.new_empty(sum(received), *x.shape[1:])
    collectives.all_to_all_into(received_rows, x.contiguous(), group, received, sent)
    return received_rows

"""The context axis: ranks that share every sequence, and which of its tokens each of them has.

A sequence is cut into 2·CP chunks and rank r has the chunks r and 2·CP − 1 − r, in this order. A later token attends to
more tokens, so one early chunk and one late chunk give every rank the same work.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pentatron.parallel.collectives import Group
from pentatron.parallel.world import ALONE, World


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

"""Where documents begin in sequences that hold several, and which stretches of a sequence are attended at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

# For every sequence of a micro-batch, the places where its documents begin: 0 first, the others after it in order.
DocumentStarts = tuple[tuple[int, ...], ...]

# Short neighbours are attended together, with a mask, up to so many tokens; it is small beside what a kernel starts with.
TOGETHER = 512


@dataclass(frozen=True)
class Piece:
    """Neighbouring documents of a sequence; `cuts` are where all but the first begin, counted from `begin`."""

    begin: int
    end: int
    cuts: tuple[int, ...] = ()


def pieces(starts: Sequence[int], begin: int, end: int, together: int = TOGETHER) -> list[Piece]:
    """The documents between two places: each by itself, or several that have no more than `together` tokens."""
    bounds = [begin, *(start for start in starts if begin < start < end), end]
    found: list[Piece] = []
    for first, last in pairwise(bounds):
        before = found[-1] if found else None
        if before is not None and last - before.begin <= together:
            found[-1] = Piece(before.begin, last, (*before.cuts, first - before.begin))
        else:
            found.append(Piece(first, last))
    return found


def alike(documents: DocumentStarts) -> list[tuple[slice, tuple[int, ...]]]:
    """Neighbouring sequences whose documents begin at the same places, which can be computed together."""
    found, first = [], 0
    for starts, same in groupby(documents):
        after = first + len(list(same))
        found.append((slice(first, after), starts))
        first = after
    return found

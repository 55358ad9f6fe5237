"""Boundaries of packed documents in sequences, and the ranges that attention computes at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

# For every sequence of a micro-batch, the sorted positions where its documents begin; the first is 0.
DocumentStarts = tuple[tuple[int, ...], ...]

# Short documents of together at most this many tokens share one masked attention call.
MAX_JOINT_TOKENS = 512


@dataclass(frozen=True)
class DocumentRange:
    """Neighbouring documents of a sequence; `cuts` are where all but the first begin, relative to `begin`."""

    begin: int
    end: int
    cuts: tuple[int, ...] = ()


def document_ranges(
    starts: Sequence[int], begin: int, end: int, max_joint_tokens: int = MAX_JOINT_TOKENS
) -> list[DocumentRange]:
    """Splits the range [begin, end) into documents, or groups of at most `max_joint_tokens`."""
    bounds = [begin, *(start for start in starts if begin < start < end), end]
    merged: list[DocumentRange] = []
    for first, last in pairwise(bounds):
        if merged and last - (begun := merged[-1].begin) <= max_joint_tokens:
            merged[-1] = DocumentRange(begun, last, (*merged[-1].cuts, first - begun))
        else:
            merged.append(DocumentRange(first, last))
    return merged


def group_equal_starts(documents: DocumentStarts) -> list[tuple[slice, tuple[int, ...]]]:
    """Groups neighbouring sequences with equal document starts, which can be computed in one batch."""
    groups, first = [], 0
    for starts, same in groupby(documents):
        last = first + len(list(same))
        groups.append((slice(first, last), starts))
        first = last
    return groups

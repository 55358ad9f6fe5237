"""In which order several datasets are drawn from, so that at every moment each has given its share.

Draw i comes from the dataset that is furthest behind, the one with the largest weight × max(i, 1) − draws so far (the first of equals).
Each draw depends on all before it, and one at a time a million would take seconds. But two histories that differ at some
draw come together again: where they choose differently, each takes what the other has more of. So the draws are cut into stretches,
each begins some draws early with counts that are a good guess, all advance side by side, and a stretch whose beginning is not
the end of the one before it is done again from there. What remains is exactly the order of one draw after the other.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int16]

MOST_DATASETS = 32767
# Draws made one by one, which also show how far behind each dataset is when it is chosen.
_ONE_BY_ONE = 2048
_EARLY = 256


def greedy_order(weights: Sequence[float], size: int) -> Ids:
    """The dataset of each of `size` draws."""
    shares = np.asarray(weights, dtype=np.float64)
    order = np.empty(size, dtype=np.int16)
    counts = np.zeros(len(shares))
    first = min(size, _ONE_BY_ONE)
    behind = _draw_one_by_one(shares, counts, order[:first])
    if first == size:
        return order
    length = max(_EARLY, int((size - first) ** 0.5))
    starts = first + np.arange(-(-(size - first) // length)) * length
    begun = _guess(shares, starts - _EARLY, behind)
    _draw_side_by_side(shares, begun, starts - _EARLY, np.empty((len(starts), _EARLY), dtype=np.int16))
    begun[0] = counts
    draws = np.empty((len(starts), length), dtype=np.int16)
    ends = np.empty_like(begun)
    again = np.arange(len(starts))
    while len(again):
        part, after = np.empty((len(again), length), dtype=np.int16), begun[again]
        _draw_side_by_side(shares, after, starts[again], part)
        draws[again], ends[again] = part, after
        again = np.flatnonzero((ends[:-1] != begun[1:]).any(axis=1)) + 1
        begun[again] = ends[again - 1]
    order[first:] = draws.reshape(-1)[: size - first]
    return order


def exhaustive_order(sizes: Sequence[int]) -> Ids:
    """Every sample of datasets of these sizes once, in proportion as long as it lasts: the spent ones are passed over."""
    total = sum(sizes)
    shares = np.array(sizes, dtype=np.float64) / float(total)
    order = greedy_order(shares.tolist(), total)
    beyond = places_within(order, len(sizes)) >= np.array(sizes, dtype=np.int64)[order]
    end = int(beyond.argmax()) if beyond.any() else total
    counts = np.bincount(order[:end], minlength=len(sizes)).astype(np.float64)
    for i in range(end, total):
        error = shares * max(i, 1) - counts
        error[counts >= sizes] = -np.inf
        order[i] = number = int(error.argmax())
        counts[number] += 1
    return order


def places_within(order: Ids, datasets: int) -> npt.NDArray[np.int64]:
    """For each draw, how many draws from the same dataset came before it."""
    places = np.empty(len(order), dtype=np.int64)
    # Sorted by dataset, the draws from each lie together in their order; numbers of 16 bits take one pass, however many there are.
    together = np.argsort(order, kind="stable")
    counts = np.bincount(order, minlength=datasets)
    places[together] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    return places


def _draw_one_by_one(shares: Floats, counts: Floats, order: Ids) -> Floats:
    """Fills `order` and `counts`; returns how far behind each dataset was when last chosen (or might have been)."""
    behind = np.full(len(shares), np.nan)
    least = np.inf
    for i in range(len(order)):
        error = shares * max(i, 1) - counts
        number = int(error.argmax())
        order[i] = number
        counts[number] += 1
        if 2 * i >= len(order):
            behind[number] = error[number]
            least = min(least, error[number])
    return np.where(np.isnan(behind), least, behind)


def _guess(shares: Floats, starts: npt.NDArray[np.integer], behind: Floats) -> Floats:
    """Counts after `starts` draws, about: every one is chosen when it is as far behind as it was before."""
    counts = np.maximum(np.floor(shares * starts[:, None] - behind) + 1, 0)
    for row, start in zip(counts, starts, strict=True):
        while missing := int(start - row.sum()):
            error = shares * start - row
            if missing > 0:
                row[error.argmax()] += 1
            else:
                row[np.where(row > 0, error, np.inf).argmin()] -= 1
    return counts


def _draw_side_by_side(shares: Floats, counts: Floats, starts: npt.NDArray[np.integer], draws: Ids) -> None:
    """Advances every row of `counts` from its start by the draws that fill its row of `draws`."""
    rows, at = np.arange(len(starts)), starts.astype(np.float64)
    for step in range(draws.shape[1]):
        error = np.maximum(at, 1.0)[:, None] * shares
        error -= counts
        chosen = error.argmax(axis=1)
        counts[rows, chosen] += 1
        draws[:, step] = chosen
        at += 1

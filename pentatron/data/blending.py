"""One dataset out of several: how many samples each is built for, and from which of them sample i comes.

With weights, n samples in all are ceil(n × weight) of each, built with a surplus; without, every dataset is built for one epoch and weighs
as much as it has samples. Both follow the order that Megatron users' blends already have. A blend that asks a dataset for more than
it was built for, which is an error there, goes on with further epochs of it here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pentatron.data.gpt_dataset import GPTDataset, TokenSource
from pentatron.data.sampling import Arrays, Boundaries, IndexCache, Sample, epoch_samples, require_memory
from pentatron.errors import UserError

# In which order several datasets are drawn from, so that at every moment each has given its share.
#
# Draw i comes from the dataset that is furthest behind, the one with the largest weight × max(i, 1) − draws
# so far (the first of equals). Each draw depends on all before it, and one at a time a million would take
# seconds. But two histories that differ at some draw come together again: where they choose differently, each
# takes what the other has more of. So the draws are cut into stretches, each begins some draws early with
# counts that are a good guess, all advance side by side, and a stretch whose beginning is not the end of the
# one before it is done again from there. What remains is exactly the order of one draw after the other.


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


SURPLUS = 0.005


@dataclass(frozen=True)
class Member:
    """A corpus of a blend, the part of it that is read, and what the ends of its documents mean."""

    source: TokenSource
    documents: range
    boundaries: Boundaries | None = None


@dataclass(frozen=True)
class SampleRecipe:
    """What the samples of every dataset have in common."""

    sequence_length: int
    seed: int
    vocab_size: int | None = None
    surplus: float = SURPLUS
    cache: IndexCache | None = None

    def build(self, member: Member, number: int | None, later: Sequence[int] = ()) -> GPTDataset:
        return GPTDataset(
            member.source,
            member.documents,
            number,
            self.sequence_length,
            self.seed,
            self.vocab_size,
            member.boundaries,
            later,
            self.cache,
        )


class BlendedDataset:
    """Sample i is sample `places[i]` of dataset `order[i]`."""

    def __init__(self, datasets: Sequence[GPTDataset], order: Arrays) -> None:
        self.datasets = tuple(datasets)
        self.order, self.places = order["order"], order["places"]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a blend of {len(self)} samples")
        return self.datasets[int(self.order[i])][int(self.places[i])]

    def origins(self, samples: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
        """Which dataset each of these samples comes from."""
        return self.order[samples]


def build_blend(
    members: Sequence[Member],
    weights: Sequence[float] | None,
    numbers: Sequence[int] | None,
    recipe: SampleRecipe,
) -> GPTDataset | BlendedDataset:
    """At least `numbers[-1]` samples, in an order that was built for `numbers[0]` and has grown to each of the others since.

    Without numbers, every sample of every dataset once.
    """
    if len(members) > MOST_DATASETS:
        raise UserError(f"a blend of {len(members)} datasets is too large; merge some of them")
    if len(members) == 1 and weights is None:
        return recipe.build(members[0], *((numbers[0], numbers[1:]) if numbers else (None,)))
    if weights is None:
        return _by_size(members, numbers, recipe)
    if not numbers:
        raise UserError("a blend with weights has no natural end; leave the weights out to read all of it")
    return _by_weight(members, normalised(weights), numbers, recipe)


def normalised(weights: Sequence[float]) -> list[float]:
    found = np.array(weights, dtype=np.float64)
    shares: list[float] = (found / np.sum(found)).tolist()
    return shares


def targets(number: int, weights: Sequence[float], surplus: float = 0.0) -> list[int]:
    """How many samples each dataset gives to (or, with the surplus, is built for) `number` samples in all."""
    return [math.ceil(math.ceil(number * weight) * (1 + surplus)) for weight in weights]


def _by_weight(
    members: Sequence[Member], weights: list[float], numbers: Sequence[int], recipe: SampleRecipe
) -> BlendedDataset:
    sizes = [sum(targets(number, weights)) for number in numbers]
    # Normalised once more, as the order that users' blends already have was.
    order = _cached_order(normalised(weights), sizes[-1], recipe.cache)
    built = [targets(number, weights, recipe.surplus) for number in numbers]
    drawn = [_drawn(order, size, len(members)) for size in sizes]
    return BlendedDataset(
        [
            recipe.build(member, built[0][k], _interleaved(built, drawn, k))
            for k, member in enumerate(members)
        ],
        order,
    )


def _interleaved(built: list[list[int]], drawn: list[list[int]], k: int) -> list[int]:
    """Every number that dataset k had to reach, in the order in which it had to: rebuilt later, it must grow the same way."""
    return [number for pair in zip(built, drawn, strict=True) for number in (pair[0][k], pair[1][k])]


def _by_size(
    members: Sequence[Member], numbers: Sequence[int] | None, recipe: SampleRecipe
) -> BlendedDataset:
    lengths = [epoch_samples(m.source.sequence_lengths, m.documents, recipe.sequence_length) for m in members]
    if numbers is None:
        order = exhaustive_order(lengths)
        places = places_within(order, len(members))
        return BlendedDataset([recipe.build(m, None) for m in members], {"order": order, "places": places})
    cached = _cached_order(normalised(lengths), numbers[-1], recipe.cache)
    drawn = [_drawn(cached, number, len(members)) for number in numbers]
    return BlendedDataset(
        [recipe.build(member, None, [row[k] for row in drawn]) for k, member in enumerate(members)], cached
    )


def _drawn(order: Arrays, size: int, datasets: int) -> list[int]:
    counts: list[int] = np.bincount(order["order"][:size], minlength=datasets).tolist()
    return counts


def _cached_order(weights: list[float], size: int, cache: IndexCache | None) -> Arrays:
    # The dataset of each sample and its place there.
    require_memory(size, 10 * size)

    def build() -> Arrays:
        order = greedy_order(weights, size)
        return {"order": order, "places": places_within(order, len(weights))}

    return (cache or IndexCache()).get({"weights": weights, "size": size}, size, build)

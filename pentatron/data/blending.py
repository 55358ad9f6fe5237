"""Blends several datasets into one: the samples drawn from each, and their order.

With weights, n samples need ceil(n × weight) samples of each dataset, built with a surplus. Without
weights, every dataset is built for one epoch and weighted by its number of samples. Both orders are those
of Megatron-LM's blended dataset. If a blend draws more samples from a dataset than it was built for, which
is an error in Megatron-LM, further epochs of the dataset are appended.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from pentatron.data import sample_index
from pentatron.data.gpt_dataset import GPTDataset, TokenSource
from pentatron.data.sample_index import NO_CACHE, Arrays, Boundaries, IndexCache, Sample
from pentatron.errors import UserError

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int16]

# Dataset numbers are stored as int16.
MAX_DATASETS = 32767
SURPLUS = 0.005
# Draws computed sequentially; they also show how far behind its share each dataset is when it is chosen.
_SEQUENTIAL_DRAWS = 2048
# Draws by which each chunk starts early, so that an inexact initial count has usually converged at its start.
_WARM_UP_DRAWS = 256


@dataclass(frozen=True)
class BlendMember:
    """A corpus of a blend, the documents read from it, and its treatment of document boundaries."""

    source: TokenSource
    documents: range
    boundaries: Boundaries | None = None


@dataclass(frozen=True)
class SampleRecipe:
    """The settings shared by the samples of all datasets of a blend."""

    sequence_length: int
    seed: int
    vocab_size: int | None = None
    surplus: float = SURPLUS
    cache: IndexCache = NO_CACHE

    def build(self, member: BlendMember, number: int | None, later: Sequence[int] = ()) -> GPTDataset:
        settings = self.sequence_length, self.seed, self.vocab_size, member.boundaries
        return GPTDataset(member.source, member.documents, number, *settings, later, self.cache)


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
        """Returns the dataset number of each of the given samples."""
        return self.order[samples]


def build_blend(
    members: Sequence[BlendMember],
    weights: Sequence[float] | None,
    numbers: Sequence[int] | None,
    recipe: SampleRecipe,
) -> GPTDataset | BlendedDataset:
    """Builds a dataset of at least `numbers[-1]` samples, or of every sample once without `numbers`.

    The order is built for `numbers[0]` samples and extended to each later number in turn, so that a longer
    run keeps the samples it has already drawn.
    """
    if len(members) > MAX_DATASETS:
        raise UserError(f"a blend of {len(members)} datasets is too large; merge some of them")
    if len(members) == 1 and weights is None:
        return recipe.build(members[0], *((numbers[0], numbers[1:]) if numbers else (None,)))
    if weights is None:
        length = recipe.sequence_length
        sizes = [sample_index.epoch_samples(m.source.sequence_lengths, m.documents, length) for m in members]
        if numbers is None:
            order = _with_places(exhaustive_order(sizes), len(members))
            return BlendedDataset([recipe.build(m, None) for m in members], order)
        cached = _cached_order(normalize_weights(sizes), numbers[-1], recipe.cache)
        drawn = zip(*(_count_draws(cached, number, len(members)) for number in numbers))
        return BlendedDataset([recipe.build(m, None, later) for m, later in zip(members, drawn)], cached)
    if not numbers:
        raise UserError("a blend with weights has no epochs; leave the weights out to read each dataset once")
    shares = normalize_weights(weights)
    totals = [sum(samples_per_dataset(number, shares)) for number in numbers]
    # Normalised a second time, as in Megatron-LM: the rounding affects the order.
    cached = _cached_order(normalize_weights(shares), totals[-1], recipe.cache)
    built = [samples_per_dataset(number, shares, recipe.surplus) for number in numbers]
    drawn_of = [_count_draws(cached, total, len(members)) for total in totals]
    # For each dataset the sizes in the order in which it had to reach them: rebuilt on resume, it must grow
    # the same way.
    reached = zip(*chain.from_iterable(zip(built, drawn_of)))
    return BlendedDataset([recipe.build(m, later[0], later) for m, later in zip(members, reached)], cached)


def normalize_weights(weights: Sequence[float]) -> list[float]:
    array = np.array(weights, dtype=np.float64)
    return (array / np.sum(array)).tolist()


def samples_per_dataset(number: int, weights: Sequence[float], surplus: float = 0.0) -> list[int]:
    """Returns the samples of each dataset in a blend of `number` samples, increased by `surplus`."""
    return [math.ceil(math.ceil(number * weight) * (1 + surplus)) for weight in weights]


def _count_draws(order: Arrays, size: int, datasets: int) -> list[int]:
    return np.bincount(order["order"][:size], minlength=datasets).tolist()


def _cached_order(weights: list[float], size: int, cache: IndexCache) -> Arrays:
    sample_index.require_memory(size, 10 * size)
    key = {"weights": weights, "size": size}
    return cache.get(key, size, lambda: _with_places(greedy_order(weights, size), len(weights)))


def _with_places(order: Ids, datasets: int) -> Arrays:
    """Returns the dataset of each sample and the sample's position in that dataset."""
    return {"order": order, "places": positions_in_datasets(order, datasets)}


def greedy_order(weights: Sequence[float], size: int) -> Ids:
    """Returns the dataset of each of `size` draws, such that every prefix has the datasets in proportion.

    Draw i takes the dataset with the largest error weight × max(i, 1) − draws so far (the first of equals).
    Each draw depends on all before it, so a plain loop takes seconds for a million draws. But two histories
    that differ converge: where they choose differently, each takes what the other has more of. The draws
    are therefore cut into chunks that start some draws early from estimated counts and advance in parallel.
    A chunk whose initial counts are not the final counts of the chunk before it is computed again from
    those, until all agree: the result equals the sequential loop.
    """
    shares = np.asarray(weights, dtype=np.float64)
    order = np.empty(size, dtype=np.int16)
    counts = np.zeros(len(shares))
    first = min(size, _SEQUENTIAL_DRAWS)
    errors = _draw_sequentially(shares, counts, order[:first])
    if first == size:
        return order
    length = max(_WARM_UP_DRAWS, int((size - first) ** 0.5))
    starts = first + np.arange(-(-(size - first) // length)) * length
    begin_counts = _estimate_counts(shares, starts - _WARM_UP_DRAWS, errors)
    _draw_in_parallel(shares, begin_counts, starts - _WARM_UP_DRAWS, _WARM_UP_DRAWS)
    begin_counts[0] = counts
    draws = np.empty((len(starts), length), dtype=np.int16)
    end_counts = np.empty_like(begin_counts)
    pending = np.arange(len(starts))
    while len(pending):
        chunk_counts = begin_counts[pending]
        draws[pending] = _draw_in_parallel(shares, chunk_counts, starts[pending], length)
        end_counts[pending] = chunk_counts
        pending = np.flatnonzero((end_counts[:-1] != begin_counts[1:]).any(axis=1)) + 1
        begin_counts[pending] = end_counts[pending - 1]
    order[first:] = draws.reshape(-1)[: size - first]
    return order


def exhaustive_order(sizes: Sequence[int]) -> Ids:
    """Returns an order with every sample once, in proportion until a dataset is exhausted."""
    total = sum(sizes)
    shares = np.array(sizes, dtype=np.float64) / float(total)
    order = greedy_order(shares.tolist(), total)
    beyond = positions_in_datasets(order, len(sizes)) >= np.array(sizes, dtype=np.int64)[order]
    end = int(beyond.argmax()) if beyond.any() else total
    counts = np.bincount(order[:end], minlength=len(sizes)).astype(np.float64)
    for i in range(end, total):
        error = shares * max(i, 1) - counts
        error[counts >= sizes] = -np.inf
        order[i] = number = int(error.argmax())
        counts[number] += 1
    return order


def positions_in_datasets(order: Ids, datasets: int) -> npt.NDArray[np.int64]:
    """Returns for each draw the number of earlier draws from the same dataset."""
    places = np.empty(len(order), dtype=np.int64)
    # A stable sort groups the draws by dataset in their order. NumPy sorts int16 by radix, in linear time.
    by_dataset = np.argsort(order, kind="stable")
    counts = np.bincount(order, minlength=datasets)
    places[by_dataset] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    return places


def _draw_sequentially(shares: Floats, counts: Floats, order: Ids) -> Floats:
    """Fills `order` and updates `counts`; returns the error of each dataset when it was last chosen.

    A dataset that was not chosen in the second half gets the smallest of the others' errors.
    """
    chosen_errors = np.full(len(shares), np.nan)
    least = np.inf
    for i in range(len(order)):
        error = shares * max(i, 1) - counts
        number = int(error.argmax())
        order[i] = number
        counts[number] += 1
        if 2 * i >= len(order):
            chosen_errors[number] = error[number]
            least = min(least, error[number])
    return np.where(np.isnan(chosen_errors), least, chosen_errors)


def _estimate_counts(shares: Floats, starts: npt.NDArray[np.integer], errors: Floats) -> Floats:
    """Estimates the counts after each of `starts` draws, if each dataset is chosen at its error."""
    counts = np.maximum(np.floor(shares * starts[:, None] - errors) + 1, 0)
    for row, start in zip(counts, starts, strict=True):
        while missing := int(start - row.sum()):
            error = shares * start - row
            if missing > 0:
                row[error.argmax()] += 1
            else:
                row[np.where(row > 0, error, np.inf).argmin()] -= 1
    return counts


def _draw_in_parallel(shares: Floats, counts: Floats, starts: npt.NDArray[np.integer], number: int) -> Ids:
    """Returns a row of `number` draws for each draw of `starts`, and advances the same row of `counts`."""
    draws = np.empty((len(starts), number), dtype=np.int16)
    rows, draw = np.arange(len(starts)), starts.astype(np.float64)
    for step in range(number):
        error = np.maximum(draw, 1.0)[:, None] * shares
        error -= counts
        chosen = error.argmax(axis=1)
        counts[rows, chosen] += 1
        draws[:, step] = chosen
        draw += 1
    return draws

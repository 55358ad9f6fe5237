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

from pentatron.data.boundaries import Boundaries, Sample
from pentatron.data.gpt_dataset import GPTDataset, TokenSource
from pentatron.data.greedy import MOST_DATASETS, exhaustive_order, greedy_order, places_within
from pentatron.data.index_cache import Arrays, IndexCache
from pentatron.data.sampling import epoch_samples, require_memory
from pentatron.errors import UserError

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

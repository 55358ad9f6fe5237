"""Division of the layers into pipeline stages: by cost, by given numbers, or by a written layout."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from pentatron.text import plural

Layer = TypeVar("Layer")

_FIRST, _LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
_LAYOUT = "--pipeline-model-parallel-layout"


@dataclass(frozen=True)
class StagePart:
    """The part of the model in one stage: consecutive layers and, at the ends, embedding and head."""

    layers: tuple[int, ...]
    embedding: bool
    head: bool


@dataclass(frozen=True)
class Costs:
    """Cost of computing each kind of layer, in any unit."""

    layer: float = 1.0
    embedding: float = 0.0
    head: float = 0.0

    def of(self, part: StagePart) -> float:
        return len(part.layers) * self.layer + part.embedding * self.embedding + part.head * self.head


@dataclass(frozen=True)
class StageDivision:
    """Settings for the division of the layers over `ranks` pipeline ranks with `virtual` stages each.

    `first` and `last` fix the layers of the first and the last rank. `count_embedding` and `count_head` make
    the embedding and the head count as one layer each. `even`: only layers count, so that all stages have the
    same number. `written` is a complete layout such as `Et|tt|tL`. `folded`: stages run down the ranks and
    back up (V shape).
    """

    ranks: int = 1
    virtual: int = 1
    first: int | None = None
    last: int | None = None
    count_embedding: bool = False
    count_head: bool = False
    even: bool = False
    written: str | None = None
    folded: bool = False

    @property
    def stages(self) -> int:
        return self.ranks * self.virtual

    def rank_of(self, stage: int) -> int:
        turn, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.folded and turn % 2 else place


def split_layers(
    num_layers: int, stages: int, layer_cost: float, embedding_cost: float, head_cost: float
) -> tuple[StagePart, ...]:
    """Divides the layers so that the most expensive stage costs as little as possible; every stage gets a
    layer.

    Among equally good divisions the most even one is chosen, then the one with more layers in later stages,
    as early stages hold more micro-batches in memory.
    """
    if num_layers < stages:
        problem = f"{num_layers} {plural(num_layers, 'layer')} cannot fill {stages} stages"
        raise ValueError(f"{problem}; use {stages} layers or more, or fewer stages")
    costs = Costs(layer_cost, embedding_cost, head_cost)
    return _parts(_fill_cheapest(num_layers, [1] * stages, costs, range(stages)))


def stage_parts(num_layers: int, division: StageDivision, costs: Costs) -> tuple[StagePart, ...]:
    """Returns the parts of all stages in model order. Raises ValueError with a message for the user."""
    if division.written is not None:
        return _written_parts(num_layers, division)
    if division.first is not None or division.last is not None:
        return _parts(_counts_with_ends(num_layers, division, costs))
    if division.even or division.count_embedding or division.count_head:
        return split_layers(num_layers, division.stages, 1, division.count_embedding, division.count_head)
    return split_layers(num_layers, division.stages, costs.layer, costs.embedding, costs.head)


def _fill_cheapest(num_layers: int, counts: list[int], costs: Costs, stages: Sequence[int]) -> list[int]:
    """Gives the remaining layers, one at a time, to the stage that is cheapest with one more; on a tie to the
    latest.

    As all layers cost the same, this greedy order minimizes the cost of the most expensive stage.
    """
    extra = [0.0] * len(counts)
    extra[0] += costs.embedding
    extra[-1] += costs.head
    for _ in range(num_layers - sum(counts)):
        counts[min(stages, key=lambda s: ((counts[s] + 1) * costs.layer + extra[s], -s))] += 1
    return counts


def _parts(counts: Sequence[int]) -> tuple[StagePart, ...]:
    bounds = itertools.pairwise(itertools.accumulate(counts, initial=0))
    last = len(counts) - 1
    return tuple(StagePart(tuple(range(*b)), stage == 0, stage == last) for stage, b in enumerate(bounds))


def _counts_with_ends(num_layers: int, division: StageDivision, costs: Costs) -> list[int]:
    """Returns the layers of every stage if those of the first or the last rank are fixed."""
    ranks, virtual = division.ranks, division.virtual
    ends = ((0, _FIRST, division.first), (ranks - 1, _LAST, division.last))
    fixed = {rank: (flag, count) for rank, flag, count in ends if count is not None}
    flags = " and ".join(f"{flag} {count}" for flag, count in fixed.values())
    if ranks == 1:
        raise ValueError(f"{flags}: there is one pipeline rank, which has all layers")
    counts = [1] * division.stages
    for rank, (flag, count) in fixed.items():
        if count % virtual:
            down = count - count % virtual
            problem = f"{flag} {count} is not divisible by the {virtual} virtual stages of a rank"
            raise ValueError(f"{problem}; use {max(virtual, down)} or {down + virtual}")
        for stage in range(division.stages):
            if division.rank_of(stage) == rank:
                counts[stage] = count // virtual
    open_stages = [s for s in range(division.stages) if division.rank_of(s) not in fixed]
    fixed_layers = sum(count for _, count in fixed.values())
    remaining = num_layers - fixed_layers
    if not open_stages and remaining:
        problem = f"{flags} have {fixed_layers} layers together, but --num-layers is {num_layers}"
        raise ValueError(f"{problem}; leave one of them out")
    if remaining < len(open_stages):
        left = f"{num_layers} − {fixed_layers} = {remaining} layers"
        problem = f"{flags} leave {left} for the {len(open_stages)} other stages, which need one each"
        raise ValueError(f"{problem}; the sum of all must be --num-layers {num_layers}")
    # A fixed end accounts for its embedding or head already; their costs matter for open ends only.
    return _fill_cheapest(num_layers, counts, costs, open_stages)


def _written_parts(num_layers: int, division: StageDivision) -> tuple[StagePart, ...]:
    assert division.written is not None
    text = division.written
    stages = parse_layout(text)
    layers = sum(stage.count("t") for stage in stages)
    if layers != num_layers:
        has = f"has {layers} layers in its {len(stages)} stages, but --num-layers is {num_layers}"
        fix = f"{'add' if layers < num_layers else 'remove'} {abs(num_layers - layers)} t"
        raise ValueError(f"{_LAYOUT} {text} {has}; {fix}")
    if len(stages) != division.stages:
        product = f"{division.ranks} (pipeline) × {division.virtual} (virtual) = {division.stages}"
        fix = f"write {division.stages} stages, or change the sizes"
        raise ValueError(f"{_LAYOUT} {text} has {len(stages)} stages, but {product}; {fix}")
    return _parts([stage.count("t") for stage in stages])


def parse_layout(text: str) -> list[str]:
    """Parses a layout: `Et|(tt|)*2tL` → `Et`, `tt`, `tt`, `tL` (E: embedding, t: layer, L: head, |: next
    stage).

    A repetition `*n` applies to the letter or the parentheses before it; commas and spaces are ignored.
    """
    stages = _expanded(text).split("|")
    for i, stage in enumerate(stages):
        if not stage:
            raise ValueError(f"{_LAYOUT} {text}: stage {i} is empty; put a layer (t) in, or remove its |")
    joined = "|".join(stages)
    if joined.count("E") != 1 or not joined.startswith("E"):
        raise ValueError(f"{_LAYOUT} {text}: the embedding (E) must appear once, as the first element")
    if joined.count("L") != 1 or not joined.endswith("L"):
        raise ValueError(f"{_LAYOUT} {text}: the head (L) must appear once, as the last element")
    return stages


def _expanded(text: str) -> str:
    """Expands repetitions and parentheses and removes commas and spaces."""
    stack: list[list[str]] = [[]]
    for token in re.findall(r"\*[0-9]*|[^*]", text):
        letter, digits = token[0], token[1:]
        if letter in "EtL|":
            stack[-1].append(letter)
        elif letter == "(":
            stack.append([])
        elif letter == ")" and len(stack) > 1:
            group = "".join(stack.pop())
            stack[-1].append(group)
        elif letter == "*":
            if not digits or not stack[-1]:
                raise ValueError(f"{_LAYOUT} {text}: * needs a letter or ) before it and a number after it")
            stack[-1][-1] *= int(digits)
        elif letter == "m":
            missing = "m (multi-token prediction) is not available in this version"
            raise ValueError(f"{_LAYOUT} {text}: {missing}; leave it out")
        elif letter not in ", ":
            raise ValueError(f"{_LAYOUT} {text}: '{letter}' has no meaning here; use E, t, L, |, *, ( and )")
    if len(stack) > 1:
        raise ValueError(f"{_LAYOUT} {text}: a ( is not closed")
    return "".join(stack[0])


def recompute_groups(
    layers: Sequence[Layer], chunk: int, first: int | None
) -> tuple[list[Sequence[Layer]], Sequence[Layer]]:
    """Splits the layers of a stage into those recomputed in backward, in groups that save one input each, and
    the rest.

    Groups have `chunk` layers and cover the `first` layers, or all.
    """
    covered = len(layers) if first is None else min(first, len(layers))
    runs = [layers[start : min(start + chunk, covered)] for start in range(0, covered, chunk)]
    return runs, layers[covered:]

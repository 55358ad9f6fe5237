"""Which layers a pipeline stage holds: divided by cost, by numbers the user gives, or by a layout written out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from pentatron.text import plural

Item = TypeVar("Item")

_FIRST, _LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
_LAYOUT = "--pipeline-model-parallel-layout"


@dataclass(frozen=True)
class StagePart:
    """What one stage holds of the model: some layers in a row, and at the ends the embedding and the head."""

    layers: tuple[int, ...]
    embedding: bool
    head: bool


@dataclass(frozen=True)
class Costs:
    """What computing each part takes, in any unit."""

    layer: float = 1.0
    embedding: float = 0.0
    head: float = 0.0

    def of(self, part: StagePart) -> float:
        return len(part.layers) * self.layer + part.embedding * self.embedding + part.head * self.head


@dataclass(frozen=True)
class Division:
    """How the layers are to be divided over `ranks` pipeline ranks with `virtual` stages each.

    `first` and `last` fix the layers of the first and the last rank. `count_embedding` and `count_head` make the
    embedding and the head weigh as much as one layer. `even`: only layers count, so that all stages have the same
    number. `written` is a whole layout such as `Et|tt|tL`. `folded`: the stages go down the ranks and come back.
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
    """Divides the layers so that the most expensive stage is as cheap as it can be; every stage gets a layer.

    Among equally good divisions the most even one is taken, and then the one with more layers in later stages, as
    early stages keep more micro-batches in memory.
    """
    if num_layers < stages:
        raise ValueError(too_few_layers(num_layers, stages))
    extra = [0.0] * stages
    extra[0] += embedding_cost
    extra[-1] += head_cost
    return _parts(_filled(num_layers, [1] * stages, layer_cost, extra, list(range(stages))))


def too_few_layers(num_layers: int, stages: int) -> str:
    return (
        f"{num_layers} {plural(num_layers, 'layer')} cannot fill {stages} stages; "
        f"use {stages} layers or more, or fewer stages"
    )


def stage_parts(num_layers: int, division: Division, costs: Costs) -> tuple[StagePart, ...]:
    """The parts of all stages, in the order of the model; ValueError says what does not add up."""
    if division.written is not None:
        return _written_parts(num_layers, division)
    if division.first is not None or division.last is not None:
        return _parts(_counts_with_ends(num_layers, division, costs))
    if division.even or division.count_embedding or division.count_head:
        return split_layers(num_layers, division.stages, 1, division.count_embedding, division.count_head)
    return split_layers(num_layers, division.stages, costs.layer, costs.embedding, costs.head)


def _filled(
    num_layers: int, counts: list[int], layer_cost: float, extra: Sequence[float], open_stages: list[int]
) -> list[int]:
    """Gives the layers that are left, one at a time, to the open stage that is cheapest with it, the latest of several.

    All layers cost the same, so no other order can end with a cheaper most expensive stage.
    """
    for _ in range(num_layers - sum(counts)):
        chosen = min(open_stages, key=lambda s: ((counts[s] + 1) * layer_cost + extra[s], -s))
        counts[chosen] += 1
    return counts


def _parts(counts: Sequence[int]) -> tuple[StagePart, ...]:
    found, first = [], 0
    for stage, count in enumerate(counts):
        layers = tuple(range(first, first + count))
        found.append(StagePart(layers, embedding=stage == 0, head=stage == len(counts) - 1))
        first += count
    return tuple(found)


def _counts_with_ends(num_layers: int, division: Division, costs: Costs) -> list[int]:
    """Layers of every stage when those of the first or the last rank are given; the others share the rest."""
    ranks, virtual = division.ranks, division.virtual
    fixed = {
        rank: (flag, count)
        for rank, flag, count in ((0, _FIRST, division.first), (ranks - 1, _LAST, division.last))
        if count is not None
    }
    if ranks == 1:
        raise ValueError(f"{' and '.join(_asked(fixed))}: there is one pipeline rank, which has all layers")
    counts = [1] * division.stages
    for rank, (flag, count) in fixed.items():
        if count % virtual:
            raise ValueError(
                f"{flag} {count} is not divisible by the {virtual} virtual stages of a rank; "
                f"use {max(virtual, count - count % virtual)} or {count - count % virtual + virtual}"
            )
        for stage in range(division.stages):
            if division.rank_of(stage) == rank:
                counts[stage] = count // virtual
    open_stages = [s for s in range(division.stages) if division.rank_of(s) not in fixed]
    given = sum(count for _, count in fixed.values())
    rest = num_layers - given
    if not open_stages and rest:
        raise ValueError(
            f"{' and '.join(_asked(fixed))} have {given} layers together, but --num-layers is {num_layers}; "
            f"leave one of them out"
        )
    if rest < len(open_stages):
        raise ValueError(
            f"{' and '.join(_asked(fixed))} leave {num_layers} − {given} = {rest} layers for the {len(open_stages)} other "
            f"stages, which need one each; the sum of all must be --num-layers {num_layers}"
        )
    # What the user fixed says that the ends are dealt with; the head then weighs on an open end only.
    extra = [0.0] * division.stages
    extra[0], extra[-1] = extra[0] + costs.embedding, extra[-1] + costs.head
    return _filled(num_layers, counts, costs.layer, extra, open_stages)


def _asked(fixed: dict[int, tuple[str, int]]) -> list[str]:
    return [f"{flag} {count}" for flag, count in fixed.values()]


def _written_parts(num_layers: int, division: Division) -> tuple[StagePart, ...]:
    assert division.written is not None
    text = division.written
    stages = written_stages(text)
    layers = sum(stage.count("t") for stage in stages)
    if layers != num_layers:
        raise ValueError(
            f"{_LAYOUT} {text} has {layers} layers in its {len(stages)} stages, but --num-layers is {num_layers}; "
            f"{'add' if layers < num_layers else 'remove'} {abs(num_layers - layers)} t"
        )
    if len(stages) != division.stages:
        raise ValueError(
            f"{_LAYOUT} {text} has {len(stages)} stages, but {division.ranks} (pipeline) × {division.virtual} "
            f"(virtual) = {division.stages}; write {division.stages} stages, or change the sizes"
        )
    return _parts([stage.count("t") for stage in stages])


def written_stages(text: str) -> list[str]:
    """`Et|(tt|)*2tL` → `Et`, `tt`, `tt`, `tL`: E the embedding, t a layer, L the head, | between stages.

    A repetition `*n` belongs to the letter or the parentheses before it; commas and spaces mean nothing.
    """
    stages = _expanded(text).split("|")
    for i, stage in enumerate(stages):
        if not stage:
            raise ValueError(f"{_LAYOUT} {text}: stage {i} is empty; put a layer (t) in, or remove its |")
    whole = "|".join(stages)
    if whole.count("E") != 1 or not whole.startswith("E"):
        raise ValueError(f"{_LAYOUT} {text}: the embedding (E) must stand once, at the very beginning")
    if whole.count("L") != 1 or not whole.endswith("L"):
        raise ValueError(f"{_LAYOUT} {text}: the head (L) must stand once, at the very end")
    return stages


def _expanded(text: str) -> str:
    """The layout without repetitions, parentheses, commas and spaces."""
    open_parts: list[list[str]] = [[]]
    at = 0
    while at < len(text):
        letter = text[at]
        at += 1
        if letter in "EtL|":
            open_parts[-1].append(letter)
        elif letter == "(":
            open_parts.append([])
        elif letter == ")" and len(open_parts) > 1:
            inside = "".join(open_parts.pop())
            open_parts[-1].append(inside)
        elif letter == "*":
            digits = text[at : at + len(text[at:]) - len(text[at:].lstrip("0123456789"))]
            if not digits or not open_parts[-1]:
                raise ValueError(f"{_LAYOUT} {text}: * needs a letter or ) before it and a number behind it")
            at += len(digits)
            open_parts[-1][-1] *= int(digits)
        elif letter == "m":
            raise ValueError(
                f"{_LAYOUT} {text}: m (multi-token prediction) is not available in this version; leave it out"
            )
        elif letter not in ", ":
            raise ValueError(f"{_LAYOUT} {text}: '{letter}' has no meaning here; use E, t, L, |, *, ( and )")
    if len(open_parts) > 1:
        raise ValueError(f"{_LAYOUT} {text}: a ( is not closed")
    return "".join(open_parts[0])


def recomputed_runs(
    layers: Sequence[Item], chunk: int, first: int | None
) -> tuple[list[Sequence[Item]], Sequence[Item]]:
    """The layers of a stage that run again in backward, in the runs that keep one input each, and the other layers.

    Runs of `chunk` layers, over the `first` layers or over all.
    """
    covered = len(layers) if first is None else min(first, len(layers))
    runs = [layers[start : min(start + chunk, covered)] for start in range(0, covered, chunk)]
    return runs, layers[covered:]

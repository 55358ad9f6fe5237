"""Division of layers: each belongs to one stage, and the most expensive stage is as cheap as possible."""

import itertools

import pytest

from pentatron.layout.stages import Costs, StageDivision, StagePart, parse_layout, split_layers, stage_parts


def counts(parts: tuple[StagePart, ...]) -> list[int]:
    return [len(part.layers) for part in parts]


def assert_whole(parts: tuple[StagePart, ...], layers: int) -> None:
    """Asserts that every layer occurs once and in order, with the embedding first and the head last."""
    assert list(itertools.chain(*(part.layers for part in parts))) == list(range(layers))
    assert [part.embedding for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.head for part in parts] == [False] * (len(parts) - 1) + [True]


def all_divisions(layers: int, stages: int) -> list[tuple[int, ...]]:
    return [c for c in itertools.product(range(1, layers + 1), repeat=stages) if sum(c) == layers]


@pytest.mark.parametrize("layers", range(1, 10))
@pytest.mark.parametrize("stages", range(1, 5))
@pytest.mark.parametrize(
    "costs", [(1, 0, 0), (1, 0, 0.5), (1, 0, 3.5), (2, 1, 1), (1, 4, 0), (1.5, 0.3, 2.2)], ids=str
)
def test_no_division_has_a_cheaper_most_expensive_stage(
    layers: int, stages: int, costs: tuple[float, float, float]
) -> None:
    """Compares with all possible divisions."""
    if layers < stages:
        return
    parts = split_layers(layers, stages, *costs)
    assert_whole(parts, layers)

    def spread(numbers: tuple[int, ...]) -> list[float]:
        each = [number * costs[0] for number in numbers]
        each[0] += costs[1]
        each[-1] += costs[2]
        return sorted(each, reverse=True)

    best = min(spread(numbers) for numbers in all_divisions(layers, stages))
    assert spread(tuple(counts(parts))) == pytest.approx(best)


@pytest.mark.parametrize(("layers", "stages"), [(8, 1), (8, 2), (32, 8), (28, 4), (96, 16), (4, 4)])
def test_equal_costs_divide_evenly(layers: int, stages: int) -> None:
    assert counts(split_layers(layers, stages, 7.0, 0, 0)) == [layers // stages] * stages


def test_layers_that_are_left_go_to_later_stages() -> None:
    """Early stages keep more micro-batches alive."""
    assert counts(split_layers(30, 4, 1, 0, 0)) == [7, 7, 8, 8]
    assert counts(split_layers(5, 4, 1, 0, 1)) == [1, 1, 2, 1]


def test_an_expensive_head_takes_layers_from_the_last_stage() -> None:
    assert counts(split_layers(32, 8, 1, 0, 2.5)) == [4, 4, 4, 4, 4, 5, 5, 2]
    assert counts(split_layers(8, 2, 1, 2, 0)) == [3, 5]


def test_every_stage_gets_a_layer() -> None:
    assert counts(split_layers(4, 3, 1, 0, 100)) == [1, 2, 1]
    with pytest.raises(
        ValueError, match="3 layers cannot fill 4 stages; use 4 layers or more, or fewer stages"
    ):
        split_layers(3, 4, 1, 0, 0)


@pytest.mark.parametrize(
    ("layers", "division", "expected"),
    [
        (14, StageDivision(4, first=3), [3, 3, 4, 4]),
        (14, StageDivision(4, last=2), [4, 4, 4, 2]),
        (14, StageDivision(4, first=3, last=5), [3, 3, 3, 5]),
        (8, StageDivision(2, first=3, last=5), [3, 5]),
        (12, StageDivision(4, 2, first=4, last=2), [2, 1, 1, 1, 2, 2, 2, 1]),
        (14, StageDivision(4, count_embedding=True, count_head=True), [3, 4, 4, 3]),
        (15, StageDivision(4, count_embedding=True), [3, 4, 4, 4]),
        (15, StageDivision(4, count_head=True), [4, 4, 4, 3]),
        (14, StageDivision(4, 2, count_embedding=True, count_head=True), [1, 2, 2, 2, 2, 2, 2, 1]),
        (8, StageDivision(4, written="Et*3|(tt|)*2,tL"), [3, 2, 2, 1]),
        (61, StageDivision(31, written="Et*3|(tt|)*29L"), [3, *[2] * 29, 0]),
        (4, StageDivision(4, written="E|tt|tt|L"), [0, 2, 2, 0]),
        (6, StageDivision(2, 2, written="Et|tt|(t)*2|tL"), [1, 2, 2, 1]),
        (1, StageDivision(1, written="EtL"), [1]),
    ],
)
def test_written_stage_divisions(layers: int, division: StageDivision, expected: list[int]) -> None:
    parts = stage_parts(layers, division, Costs(1, 0, 0))
    assert counts(parts) == expected
    assert_whole(parts, layers)


def test_costs_decide_where_nothing_is_written() -> None:
    assert counts(stage_parts(8, StageDivision(2), Costs(1, 0, 2))) == [5, 3]
    assert counts(stage_parts(8, StageDivision(2), Costs(1, 0, 0))) == [4, 4]
    assert counts(stage_parts(8, StageDivision(2, even=True), Costs(1, 0, 2))) == [4, 4]
    assert Costs(2, 3, 5).of(StagePart((0, 1), embedding=True, head=True)) == 12


LAYOUT = "--pipeline-model-parallel-layout"


@pytest.mark.parametrize(
    ("layers", "division", "sentence"),
    [
        (30, StageDivision(4, written="Et*7|t*7|t*7|t*7L"),
         f"{LAYOUT} Et*7|t*7|t*7|t*7L has 28 layers in its 4 stages, but --num-layers is 30; add 2 t"),
        (6, StageDivision(2, written="Et*4|t*4L"),
         f"{LAYOUT} Et*4|t*4L has 8 layers in its 2 stages, but --num-layers is 6; remove 2 t"),
        (8, StageDivision(4, 2, written="Et*4|t*4L"),
         f"{LAYOUT} Et*4|t*4L has 2 stages, but 4 (pipeline) × 2 (virtual) = 8; write 8 stages, or change the sizes"),
        (8, StageDivision(4, first=4, last=4),
         "--decoder-first-pipeline-num-layers 4 and --decoder-last-pipeline-num-layers 4 leave 8 − 8 = 0 layers for the "
         "2 other stages, which need one each; the sum of all must be --num-layers 8"),
        (9, StageDivision(2, first=4, last=4),
         "--decoder-first-pipeline-num-layers 4 and --decoder-last-pipeline-num-layers 4 have 8 layers together, but "
         "--num-layers is 9; leave one of them out"),
        (8, StageDivision(2, 2, first=3),
         "--decoder-first-pipeline-num-layers 3 is not divisible by the 2 virtual stages of a rank; use 2 or 4"),
        (8, StageDivision(1, first=3),
         "--decoder-first-pipeline-num-layers 3: there is one pipeline rank, which has all layers"),
        (3, StageDivision(4), "3 layers cannot fill 4 stages; use 4 layers or more, or fewer stages"),
    ],
)  # fmt: skip
def test_impossible_stage_divisions_are_refused(layers: int, division: StageDivision, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        stage_parts(layers, division, Costs())
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("EtL", ["EtL"]),
        ("Et|tL", ["Et", "tL"]),
        ("E t , t | t L", ["Ett", "tL"]),
        ("Et*3|(tt|)*2L", ["Ettt", "tt", "tt", "L"]),
        ("E(t|(tt|)*2)*2tL", ["Et", "tt", "tt", "t", "tt", "tt", "tL"]),
        ("E(tt)*2|t*10L", ["Etttt", "t" * 10 + "L"]),
    ],
)
def test_layouts_written_out(text: str, stages: list[str]) -> None:
    assert parse_layout(text) == stages


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("Et||tL", "stage 1 is empty"),
        ("Et|tL|", "stage 2 is empty"),
        ("", "stage 0 is empty"),
        ("tt|tL", "the embedding (E) must appear once, as the first element"),
        ("tE|tL", "the embedding (E) must appear once, as the first element"),
        ("Et|EtL", "the embedding (E) must appear once, as the first element"),
        ("Et|t", "the head (L) must appear once, as the last element"),
        ("EtL|t", "the head (L) must appear once, as the last element"),
        ("Et|m|L", "m (multi-token prediction) is not available in this version"),
        ("Et|x|L", "'x' has no meaning here"),
        ("Et*|L", "* needs a letter or ) before it and a number after it"),
        ("*2Et|L", "* needs a letter or ) before it and a number after it"),
        ("E(t|tL", "a ( is not closed"),
        ("Et)|tL", "')' has no meaning here"),
    ],
)
def test_layouts_that_mean_nothing(text: str, complaint: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_layout(text)
    assert str(error.value).startswith(f"{LAYOUT} {text}: ")
    assert complaint in str(error.value)

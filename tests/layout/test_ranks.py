"""The grid of ranks: every rank has one place, the tensor axis is fastest, groups cover the world once."""

import itertools

import pytest

from pentatron.layout.ranks import Coordinates, Grid, world_size_problem

GRIDS = [
    Grid(),
    Grid(data=5),
    Grid(tensor=2, data=2),
    Grid(tensor=2, pipeline=2, data=2),
    Grid(tensor=4, pipeline=2, data=2),
    Grid(tensor=2, context=3, data=2, pipeline=3),
    Grid(tensor=8, pipeline=16),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_rank_has_exactly_one_place(grid: Grid) -> None:
    places = [grid.coordinates(rank) for rank in range(grid.world_size)]
    assert len(set(places)) == grid.world_size == grid.model_size * grid.data
    assert [grid.rank(place) for place in places] == list(range(grid.world_size))
    for place in places:
        assert 0 <= place.tensor < grid.tensor and 0 <= place.context < grid.context
        assert 0 <= place.data < grid.data and 0 <= place.pipeline < grid.pipeline


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_order_is_tensor_context_data_pipeline(grid: Grid) -> None:
    axes = (range(grid.pipeline), range(grid.data), range(grid.context), range(grid.tensor))
    # The last of a product runs fastest.
    expected = [Coordinates(t, c, d, p) for p, d, c, t in itertools.product(*axes)]
    assert [grid.coordinates(rank) for rank in range(grid.world_size)] == expected


def test_a_grid_of_one() -> None:
    assert Grid() == Grid(tensor=1, context=1, data=1, pipeline=1)
    assert Grid().world_size == 1


def test_neighbouring_ranks_share_a_layer() -> None:
    grid = Grid(tensor=2, context=2, data=2, pipeline=2)
    assert [grid.coordinates(rank) for rank in (0, 1, 2, 4, 8)] == [
        Coordinates(0, 0, 0, 0),
        Coordinates(1, 0, 0, 0),
        Coordinates(0, 1, 0, 0),
        Coordinates(0, 0, 1, 0),
        Coordinates(0, 0, 0, 1),
    ]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_data_groups_cover_the_world_once(grid: Grid) -> None:
    groups = {tuple(grid.data_group(rank)) for rank in range(grid.world_size)}
    assert sorted(itertools.chain(*groups)) == list(range(grid.world_size))
    for group in groups:
        assert len(group) == grid.data
        parts = {(p.tensor, p.context, p.pipeline) for p in map(grid.coordinates, group)}
        assert len(parts) == 1, "all hold the same part of the model"
        assert [grid.coordinates(rank).data for rank in group] == list(range(grid.data))


def test_data_groups_of_two_by_two_by_two() -> None:
    grid = Grid(tensor=2, data=2, pipeline=2)
    assert [grid.data_group(rank) for rank in (0, 1, 2, 7)] == [[0, 2], [1, 3], [0, 2], [5, 7]]


@pytest.mark.parametrize("rank", [-1, 8, 100])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is outside a world of 8"):
        Grid(tensor=2, data=4).coordinates(rank)


@pytest.mark.parametrize(
    ("world", "tensor", "pipeline", "data"),
    [
        (4, 1, 1, 4), (4, 2, 1, 2), (8, 2, 2, 2), (16, 4, 2, 2), (32, 4, 4, 2), (64, 8, 4, 2), (128, 8, 16, 1), (8, 4, 2, 1),
    ],
)  # fmt: skip
def test_the_guides_layouts_fit(world: int, tensor: int, pipeline: int, data: int) -> None:
    """GPUs = TP × PP × DP, for every row of the guides' tables."""
    assert world_size_problem(world, tensor, pipeline, 1) is None
    assert Grid(tensor=tensor, pipeline=pipeline, data=data).world_size == world


@pytest.mark.parametrize(
    ("world", "sizes", "sentence"),
    [
        (1, (2, 1, 1),
         "1 process is too few: one copy of the model needs 2 (tensor) × 1 (pipeline) × 1 (context) = 2; "
         "start 2 processes or a multiple, or lower the parallel sizes"),
        (8, (8, 16, 1),
         "8 processes are too few: one copy of the model needs 8 (tensor) × 16 (pipeline) × 1 (context) = 128; "
         "start 128 processes or a multiple, or lower the parallel sizes"),
        (10, (2, 2, 1),
         "10 processes cannot be divided into copies of the model of 2 (tensor) × 2 (pipeline) × 1 (context) = 4 "
         "processes each; use 8 or 12 processes, or other parallel sizes"),
        (9, (2, 1, 2),
         "9 processes cannot be divided into copies of the model of 2 (tensor) × 1 (pipeline) × 2 (context) = 4 "
         "processes each; use 8 or 12 processes, or other parallel sizes"),
    ],
)  # fmt: skip
def test_layouts_that_do_not_fit(world: int, sizes: tuple[int, int, int], sentence: str) -> None:
    assert world_size_problem(world, *sizes) == sentence

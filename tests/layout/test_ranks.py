"""The rank grid: each rank has one place, the tensor axis is fastest, groups cover the world once."""

import itertools
import typing

import pytest

from pentatron.layout.ranks import Axis, Coordinates, Grid, expert_size_problem, world_size_problem

GRIDS = [
    Grid(),
    Grid(data=5),
    Grid(tensor=2, data=2),
    Grid(tensor=2, pipeline=2, data=2),
    Grid(tensor=4, pipeline=2, data=2),
    Grid(tensor=2, context=3, data=2, pipeline=3),
    Grid(tensor=8, pipeline=16),
    Grid(tensor=4, data=2, kv_copies=2),
    Grid(tensor=2, data=4, pipeline=2, expert=4),
    Grid(tensor=2, context=2, data=2, pipeline=3, expert=2, expert_tensor=2, kv_copies=2),
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
    # The last factor of `itertools.product` varies fastest.
    expected = list(itertools.product(*axes))
    places = [grid.coordinates(rank) for rank in range(grid.world_size)]
    assert [(p.pipeline, p.data, p.context, p.tensor) for p in places] == expected


def test_a_grid_of_one() -> None:
    assert Grid() == Grid(tensor=1, context=1, data=1, pipeline=1)
    assert Grid().world_size == 1


def test_neighbouring_ranks_share_a_layer() -> None:
    grid = Grid(tensor=2, context=2, data=2, pipeline=2)
    assert [grid.coordinates(rank) for rank in (0, 1, 2, 4, 8)] == [
        Coordinates(0, 0, 0, 0),
        Coordinates(1, 0, 0, 0, expert_data=1),
        Coordinates(0, 1, 0, 0, expert_data=2),
        Coordinates(0, 0, 1, 0, expert_data=4),
        Coordinates(0, 0, 0, 1),
    ]


AXES: tuple[Axis, ...] = typing.get_args(Axis)


def company(grid: Grid, axis: Axis) -> int:
    """Returns the size of the largest group along an axis; only those of the embedding differ in size."""
    sizes = {
        "kv": grid.kv_copies,
        "replicas": grid.data * grid.context,
        "embedding": min(2, grid.pipeline),
        "sequence": grid.tensor * grid.context,
        "experts": grid.expert * grid.expert_tensor,
        "shards": grid.data * grid.context // grid.instances,
        "expert_shards": grid.expert_data // grid.instances,
        "expert_instances": grid.instances,
    }
    return int(sizes.get(axis) or getattr(grid, axis))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_groups_of_every_axis_cover_the_world_once(grid: Grid, axis: Axis) -> None:
    groups = grid.groups(axis)
    assert sorted(itertools.chain(*groups)) == list(range(grid.world_size))
    sizes = {len(members) for members in groups}
    assert max(sizes) == company(grid, axis)
    assert len(sizes) == 1 or axis == "embedding"
    for members in groups:
        assert list(members) == sorted(members)


@pytest.mark.parametrize("axis", ["tensor", "context", "data", "pipeline"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_members_of_a_dense_group_differ_along_its_axis_alone(grid: Grid, axis: Axis) -> None:
    for members in grid.groups(axis):
        places = [grid.coordinates(rank) for rank in members]
        assert [getattr(place, axis) for place in places] == list(range(len(members)))
        others = [a for a in ("tensor", "context", "data", "pipeline") if a != axis]
        assert len({tuple(getattr(place, a) for a in others) for place in places}) == 1


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_experts_cut_the_ranks_of_one_stage_with_expert_tensor_fastest(grid: Grid) -> None:
    axes = (range(grid.pipeline), range(grid.expert_data), range(grid.expert), range(grid.expert_tensor))
    expected = list(itertools.product(*axes))
    places = [grid.coordinates(rank) for rank in range(grid.world_size)]
    assert [(p.pipeline, p.expert_data, p.expert, p.expert_tensor) for p in places] == expected
    for axis in ("expert_tensor", "expert", "expert_data"):
        for members in grid.groups(axis):
            assert len({grid.coordinates(rank).pipeline for rank in members}) == 1, "experts stay in a stage"
            assert [getattr(grid.coordinates(rank), axis) for rank in members] == list(range(len(members)))


# Written down by hand, in Megatron's order.
EIGHT = Grid(tensor=2, context=1, data=2, pipeline=2, expert=2, expert_tensor=1, kv_copies=2)


@pytest.mark.parametrize(
    ("axis", "groups"),
    [
        ("tensor", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("context", [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)]),
        ("data", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("pipeline", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("expert_tensor", [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)]),
        ("expert", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("expert_data", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("replicas", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("kv", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("embedding", [(0, 4), (1, 5), (2, 6), (3, 7)]),
    ],
)
def test_groups_of_eight_ranks(axis: Axis, groups: list[tuple[int, ...]]) -> None:
    assert EIGHT.groups(axis) == groups


def test_replicas_are_data_times_context() -> None:
    grid = Grid(tensor=2, context=2, data=2)
    assert grid.groups("replicas") == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_instances_are_groups_of_neighbouring_replicas() -> None:
    grid = Grid(tensor=2, context=2, data=2, instances=2)
    assert grid.groups("shards") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert grid.groups("instances") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    one = Grid(tensor=2, context=2, data=2)
    assert one.groups("shards") == one.groups("replicas") and max(map(len, one.groups("instances"))) == 1


def test_instances_of_experts_are_groups_of_neighbours_that_hold_the_same_ones() -> None:
    grid = Grid(data=8, expert=2, instances=2)
    assert grid.groups("expert_shards") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert grid.groups("expert_instances") == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_neighbours_on_the_tensor_axis_share_a_key_value_head() -> None:
    assert Grid(tensor=4, data=2, kv_copies=2).groups("kv") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert Grid(tensor=4, kv_copies=4).groups("kv") == [(0, 1, 2, 3)]
    assert Grid(tensor=4, kv_copies=1).groups("kv") == [(0,), (1,), (2,), (3,)]


def test_the_first_and_the_last_stage_share_the_embedding() -> None:
    assert Grid(tensor=2, pipeline=4).groups("embedding") == [(0, 6), (1, 7), (2,), (3,), (4,), (5,)]
    assert Grid(tensor=2, pipeline=1).groups("embedding") == [(0,), (1,)]


def test_a_grid_numbered_otherwise_would_be_seen() -> None:
    """Control: with the data axis fastest, groups differ from those written down by hand."""

    class DataFirst(Grid):
        def coordinates(self, rank: int) -> Coordinates:
            rest, data = divmod(rank, self.data)
            pipeline, tensor = divmod(rest, self.tensor)
            return Coordinates(tensor, 0, data, pipeline)

    other = DataFirst(tensor=2, data=2, pipeline=2)
    assert other.groups("tensor") == EIGHT.groups("data") != EIGHT.groups("tensor")


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ((2, 1, 4, 8, 1), None),
        ((2, 1, 4, 2, 4), None),
        ((2, 3, 4, 4, 2), None),
        ((2, 1, 4, 3, 1),
         "2 (data) × 1 (context) × 4 (tensor) = 8 ranks of a stage are no multiple of 3 (expert) × 1 (expert tensor) = 3; "
         "use sizes of which the second divides the first"),
        ((1, 1, 4, 4, 4),
         "1 (data) × 1 (context) × 4 (tensor) = 4 ranks of a stage are no multiple of 4 (expert) × 4 (expert tensor) = 16; "
         "use sizes of which the second divides the first"),
    ],
)  # fmt: skip
def test_experts_must_fit_the_ranks_of_a_stage(sizes: tuple[int, ...], sentence: str | None) -> None:
    assert expert_size_problem(*sizes) == sentence
    if sentence is None:
        data, context, tensor, expert, expert_tensor = sizes
        grid = Grid(tensor, context, data, expert=expert, expert_tensor=expert_tensor)
        assert grid.expert_data * grid.expert * grid.expert_tensor == grid.stage_size


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

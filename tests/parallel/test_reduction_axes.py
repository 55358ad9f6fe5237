"""Partial gradients over axes other than the replicas, and a norm that counts each element once."""

import zlib
from typing import Any

import pytest
import torch
from torch import Tensor

import pentatron.optim.optimizer as optimizer_module
from pentatron.layout.ranks import Axis, Coordinates, Grid
from pentatron.optim.optimizer import Optimizer
from pentatron.parallel.buckets import _plan
from pentatron.parallel.gradients import PartialGradientReduction
from pentatron.parallel.sharding import Initialization, Shape, Shard, ShardingSpec, region, sharded_parameters
from pentatron.parallel.world import World
from tests.harness import RanksFailed, run_distributed
from tests.optim.tiny import OPTIM, Prescribed, collected, fill, global_norm, here, parallel, rows

TENSOR = Grid(tensor=2, data=2, kv_copies=2)
TIED = Grid(pipeline=2, data=2)
ALL = Grid(tensor=2, data=2, pipeline=2, kv_copies=2)
PADDING = 5.0

Parameters = dict[str, tuple[Shape, ShardingSpec]]


def columns(at: int) -> ShardingSpec:
    """Two of four columns, in the middle of a parameter: a shard that is not contiguous in memory."""
    return ShardingSpec((4, 4), (Shard((0, 2 * at), (0, 1), (4, 2)),), Initialization())


def block(at: Coordinates) -> Parameters:
    """Parameters of every kind on the tensor axis."""
    t = at.tensor
    on = f"{at.pipeline}."
    kinds: Parameters = {
        "split": ((4, 6), rows((8, 6), (4 * t, 0, 4, (), ()))),
        "copied": ((5,), rows((5,), (0, 0, 5, ("tensor",), ()))),
        "partial": ((7,), rows((7,), (0, 0, 7, ("tensor",), ("tensor",)))),
        # Each rank has its own three rows of queries; both hold the row of keys, each with a partial
        # gradient.
        "fused": ((4, 6), rows((7, 6), (3 * t, 0, 3, (), ()), (6, 3, 1, ("kv",), ("kv",)))),
        # Seven rows over two ranks: the last row of the second is padding.
        "padded": ((4, 3), rows((7, 3), (4 * t, 0, 4 - t, (), ()))),
        "columns": ((4, 4), columns(t)),
    }
    return {n: (s, ShardingSpec(d.shape, d.shards, d.initial, on + n)) for n, (s, d) in kinds.items()}


def tied(at: Coordinates, grid: Grid) -> Parameters:
    """Parameters that two stages share, on each in another order and with other neighbours."""
    t, both = at.tensor, ("embedding",)
    half = 10 // grid.tensor
    table = ((half, 3), rows((10, 3), (half * t, 0, half, both, both), tensor="table"))
    scale = ((6,), rows((6,), (0, 0, 6, ("tensor", *both), ("tensor", *both)), tensor="scale"))
    if at.pipeline == 0:
        small = ((3,), rows((3,), (0, 0, 3, ("tensor",), ()), tensor="first.small"))
        return {"table": table, "small": small, "scale": scale}
    large = ((11, 5), rows((11, 5), (0, 0, 11, ("tensor",), ()), tensor="last.large"))
    norm = ((11,), rows((11,), (0, 0, 11, ("tensor",), ()), tensor="last.norm"))
    return {"large": large, "scale": scale, "norm": norm, "table": table}


def parameters(grid: Grid, at: Coordinates) -> Parameters:
    found = block(at) if grid.tensor > 1 else {}
    return {**found, **(tied(at, grid) if grid.pipeline > 1 else {})}


def index(grid: Grid, at: Coordinates, axis: Axis) -> int:
    places: dict[Axis, int] = {
        "tensor": at.tensor,
        "kv": at.tensor % grid.kv_copies,
        "embedding": 0 if at.pipeline == 0 else 1,
    }
    return places[axis]


def contribution(grid: Grid, at: Coordinates, tensor: str, shape: Shape, shard: Shard, number: int) -> Tensor:
    """Draws one rank's gradient of a logical tensor: small integers, so that sums are exact."""
    places = [index(grid, at, axis) for axis in sorted(shard.partial_over)]
    text = f"{tensor} {at.data} {at.context} {places} {number}"
    generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
    return torch.randint(-9, 10, shape, generator=generator).float()


def local_gradients(grid: Grid, at: Coordinates, model: Prescribed, number: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for param in sharded_parameters(model):
        found[param.name] = torch.full(param.parameter.shape, PADDING)
        for shard in param.declared.shards:
            logical = contribution(grid, at, param.tensor, param.declared.shape, shard, number)
            region(found[param.name], shard.local, shard.size).copy_(region(logical, shard.start, shard.size))
    return found


def expected_gradients(grid: Grid, numbers: int) -> dict[str, Tensor]:
    """Sums the contributions of all ranks, without any collective."""
    found: dict[str, Tensor] = {}
    for rank in range(grid.world_size):
        at = grid.coordinates(rank)
        for param in sharded_parameters(Prescribed(parameters(grid, at))):
            total = found.setdefault(f"gradients/{param.tensor}", torch.zeros(param.declared.shape))
            for shard in param.declared.shards:
                if any(index(grid, at, axis) for axis in shard.replicated_over - shard.partial_over):
                    continue
                for number in range(numbers):
                    logical = contribution(grid, at, param.tensor, param.declared.shape, shard, number)
                    region(total, shard.start, shard.size).add_(region(logical, shard.start, shard.size))
    return found


def train(
    grid: Grid, zero: int, overlap: bool, steps: int, bug: str = "", bucket: int = 40
) -> dict[str, Any]:
    plant(bug)
    world = here(grid)
    model = fill(Prescribed(parameters(grid, world.at)))
    stage = world.at.pipeline
    optimizer = Optimizer(
        {stage: model}, world, OPTIM, parallel(zero, overlap, overlap, bucket), torch.float32
    )
    norms = []
    for step in range(steps):
        optimizer.zero_gradients()
        for number in (2 * step, 2 * step + 1):
            optimizer.begin_backward(stage, last=number % 2 == 1)
            model(local_gradients(grid, world.at, model, number)).backward()
            optimizer.end_backward(stage, last=number % 2 == 1)
        optimizer.reduce(stage)
        optimizer.finish_reduction()
        norms.append(global_norm(optimizer))
        if step == 0:
            gradients = collected(optimizer.gradients(owned_only=True), world)
            check_own(optimizer, gradients)
        optimizer.step(1e-2, norms[-1])
    state = collected(optimizer.fragments(owned_only=True), world)
    check_weights(model, state)
    return {"gradients": gradients, "norms": norms, "state": state}


def check_own(optimizer: Optimizer, gradients: dict[str, Tensor]) -> None:
    """Checks that all ranks with a copy have the sums, not only the owners."""
    for fragment in optimizer.gradients(owned_only=False):
        wanted = region(gradients[fragment.tensor], fragment.start, tuple(fragment.values.shape))
        assert torch.equal(fragment.values, wanted), fragment.tensor


def check_weights(model: Prescribed, state: dict[str, Tensor]) -> None:
    for param in sharded_parameters(model):
        uncovered = param.parameter.detach().clone()
        for shard in param.declared.shards:
            mine = region(uncovered, shard.local, shard.size)
            assert torch.equal(mine, region(state[f"weights/{param.tensor}"], shard.start, shard.size)), (
                param.name
            )
            mine.zero_()
        assert uncovered.abs().sum() == 0, f"the padding of {param.name} moved"


def plant(bug: str) -> None:
    """Plants a bug in the optimizer of this process."""
    if bug == "no partial sums":
        PartialGradientReduction.all_reduce = lambda self: None  # type: ignore[method-assign]
    if bug == "one set of axes":
        real = PartialGradientReduction.all_reduce

        def only_first(self: PartialGradientReduction) -> None:
            self._runs = dict(sorted(self._runs.items())[:1])
            real(self)

        PartialGradientReduction.all_reduce = only_first  # type: ignore[method-assign]
    if bug == "counted twice":
        World.is_first_of = lambda self, axes: True  # type: ignore[method-assign]
    if bug == "tied among others":
        optimizer_module.plan_buckets = lambda params, limit, group_of: [_plan(params, group_of("replicas"))]


def assert_right(found: dict[str, Any], grid: Grid) -> None:
    expected = expected_gradients(grid, numbers=2)
    assert found["gradients"].keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found["gradients"][name], value), name
    norm = torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt()
    assert found["norms"][0] == pytest.approx(float(norm), rel=1e-6)


GRIDS = {"tensor": TENSOR, "tied": TIED, "all": ALL}
CASES = [(g, z, o) for g in ("tensor", "tied") for z in (0, 1, 2) for o in (False, True)] + [
    ("all", 2, False)
]


@pytest.mark.parametrize(("grid", "zero", "overlap"), CASES)
def test_gradients_and_norm_are_those_of_the_whole_model(grid: str, zero: int, overlap: bool) -> None:
    size = GRIDS[grid].world_size
    for found in run_distributed(train, size, grid=GRIDS[grid], zero=zero, overlap=overlap, steps=2):
        assert_right(found, GRIDS[grid])


@pytest.mark.parametrize("grid", ["tensor", "tied"])
def test_stages_of_zero_agree_to_the_bit_after_several_steps(grid: str) -> None:
    size = GRIDS[grid].world_size
    first, *others = (
        run_distributed(train, size, grid=GRIDS[grid], zero=zero, overlap=False, steps=3)[0]
        for zero in (0, 1, 2)
    )
    for other in others:
        assert other["norms"] == first["norms"]
        assert all(torch.equal(value, other["state"][name]) for name, value in first["state"].items())


@pytest.mark.parametrize(
    ("bug", "grid", "zero"),
    [
        ("no partial sums", "tensor", 0),
        ("no partial sums", "tied", 2),
        ("one set of axes", "tensor", 1),
        ("counted twice", "tensor", 0),
        ("counted twice", "tied", 1),
        ("tied among others", "tied", 1),
    ],
)
def test_planted_bugs_are_caught(bug: str, grid: str, zero: int) -> None:
    """A bug is detected by the comparison or by the ranks: an element saved twice, copies that differ."""
    size = GRIDS[grid].world_size
    with pytest.raises((AssertionError, RanksFailed)):
        results = run_distributed(
            train, size, grid=GRIDS[grid], zero=zero, overlap=False, steps=1, bug=bug, bucket=1000
        )
        for found in results:
            assert_right(found, GRIDS[grid])


def doubled_norm(zero: int) -> float:
    World.is_first_of = lambda self, axes: True  # type: ignore[method-assign]
    world = here(TENSOR)
    model = fill(Prescribed(parameters(TENSOR, world.at)))
    optimizer = Optimizer({0: model}, world, OPTIM, parallel(zero), torch.float32)
    optimizer.zero_gradients()
    for number in (0, 1):
        optimizer.begin_backward(0, last=number == 1)
        model(local_gradients(TENSOR, world.at, model, number)).backward()
        optimizer.end_backward(0, last=number == 1)
    optimizer.reduce(0)
    optimizer.finish_reduction()
    return global_norm(optimizer)


def test_a_norm_that_counts_copies_would_be_seen() -> None:
    expected = torch.stack([g.square().sum() for g in expected_gradients(TENSOR, 2).values()]).sum().sqrt()
    assert run_distributed(doubled_norm, 4, zero=1)[0] > float(expected) * 1.01


def count_of_partial_sums(grid: Grid) -> list[tuple[str, ...]]:
    world = here(grid)
    model = fill(Prescribed(parameters(grid, world.at)))
    optimizer = Optimizer({0: model}, world, OPTIM, parallel(bucket=1), torch.float32)
    return sorted(optimizer._partial_sums._runs)


def test_one_collective_for_every_set_of_axes() -> None:
    sets = {("kv",), ("tensor",), ("embedding",), ("embedding", "tensor")}
    expected = {
        "tensor": sets - {("embedding",), ("embedding", "tensor")},
        "all": sets,
        "tied": {("embedding",)},
    }
    for name in ("tensor", "tied", "all"):
        found = run_distributed(count_of_partial_sums, GRIDS[name].world_size, grid=GRIDS[name])
        assert all(set(axes) == expected[name] for axes in found), "axes of size one cost nothing"


def build_at_odds() -> str:
    """Builds an optimizer whose second tensor rank declares a partial gradient as complete."""
    world = here(TENSOR)
    mine = parameters(TENSOR, world.at)
    if world.at.tensor == 1:
        shape, declared = mine["partial"]
        whole_sums = tuple(Shard(p.start, p.local, p.size, p.replicated_over) for p in declared.shards)
        mine["partial"] = (shape, ShardingSpec(declared.shape, whole_sums, declared.initial, declared.tensor))
    try:
        Optimizer({0: fill(Prescribed(mine))}, world, OPTIM, parallel(0), torch.float32)
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_disagree_about_sums_are_refused() -> None:
    assert all("tensor axis hold different parts" in said for said in run_distributed(build_at_odds, 4))

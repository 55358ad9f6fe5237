"""A parameter of two stages of a rank has one gradient, which is reduced once.

The order in which the stages finish does not matter.
"""

from collections import Counter

import pytest
import torch
from torch import Tensor

import pentatron.parallel.reduction as reduction_module
from pentatron.layout.actions import Kind
from pentatron.layout.ranks import Grid
from pentatron.optim.optimizer import Optimizer
from pentatron.parallel.sharding import sharded_parameters
from pentatron.parallel.world import World
from tests.harness import distributed
from tests.optim.tiny import OPTIM, Prescribed, collected, fill, global_norm, here, parallel, rows

# "table" is used by both stages.
SHAPES = {"table": (9, 3), "first": (4, 4), "last": (7,)}
STAGES = {0: ("table", "first"), 3: ("table", "last")}
# Stage and kind of the backward passes of a step, whole or in halves.
WHOLE, INPUT, WEIGHT = Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT
ORDERS = {
    "first stage done last": ((3, WHOLE), (0, WHOLE), (3, WHOLE), (0, WHOLE)),
    "last stage done last": (
        (3, INPUT),
        (0, INPUT),
        (0, WEIGHT),
        (3, INPUT),
        (0, INPUT),
        (0, WEIGHT),
        (3, WEIGHT),
        (3, WEIGHT),
    ),
    "halves and wholes": ((3, INPUT), (0, INPUT), (3, WEIGHT), (3, WHOLE), (0, WHOLE), (0, WEIGHT)),
}


def two_stages() -> dict[int, Prescribed]:
    stages = {
        stage: Prescribed(
            {n: (SHAPES[n], rows(SHAPES[n], (0, 0, SHAPES[n][0], ("tensor",), ()))) for n in names}
        )
        for stage, names in STAGES.items()
    }
    stages[3].register_parameter("table", stages[0].table)
    for stage in stages.values():
        fill(stage)
    return stages


def gradients(rank: int, number: int, stage: int) -> dict[str, Tensor]:
    """Draws small integers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(100 * rank + 10 * number + stage)
    return {n: torch.randint(-9, 10, SHAPES[n], generator=generator).float() for n in STAGES[stage]}


def run(stages: dict[int, Prescribed], optimizer: Optimizer, order: str, rank: int) -> None:
    optimizer.zero_gradients()
    passes = ORDERS[order]
    for number, (stage, kind) in enumerate(passes):
        last = kind is not INPUT and not any(s == stage and k is not INPUT for s, k in passes[number + 1 :])
        optimizer.begin_backward(stage, last, kind)
        stages[stage](gradients(rank, number, stage)).backward()
        optimizer.end_backward(stage, last, kind)
        if last:
            optimizer.reduce(stage)
    optimizer.finish_reduction()


def expected(order: str, ranks: int) -> dict[str, Tensor]:
    sums = {f"gradients/{n}": torch.zeros(s) for n, s in SHAPES.items()}
    for rank in range(ranks):
        for number, (stage, _) in enumerate(ORDERS[order]):
            for name, gradient in gradients(rank, number, stage).items():
                sums[f"gradients/{name}"] += gradient
    return sums


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 2])
@distributed(world=2)
def test_the_gradient_is_the_sum_of_both_uses(zero: int, overlap: bool, order: str) -> None:
    world = here(Grid(data=2))
    stages = two_stages()
    optimizer = Optimizer(stages, world, OPTIM, parallel(zero, overlap, overlap, bucket=8), torch.float32)
    for step in range(2):
        run(stages, optimizer, order, world.all_ranks.rank)
        found = collected(optimizer.gradients(owned_only=True), world)
        wanted = expected(order, 2)
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert torch.equal(found[name], gradient), (step, name)
        norm = sum(float(g.square().sum()) for g in wanted.values()) ** 0.5
        assert global_norm(optimizer) == pytest.approx(norm, rel=1e-6)
    assert stages[0].table is stages[3].table
    assert len(sharded_parameters(*stages.values())) == len(SHAPES)


def reductions_of_the_table(world: World, order: str) -> Counter[int]:
    """Counts the reductions of a step by the number of elements of their bucket."""
    seen: Counter[int] = Counter()
    for name in ("start_all_reduce_", "start_reduce_scatter_into"):
        real = getattr(reduction_module, name)

        def counting(*words: Tensor, real: object = real) -> object:
            seen[words[-2].numel()] += 1
            return real(*words)  # type: ignore[operator]

        setattr(reduction_module, name, counting)
    stages = two_stages()
    optimizer = Optimizer(stages, world, OPTIM, parallel(2, bucket=8), torch.float32)
    run(stages, optimizer, order, world.all_ranks.rank)
    return seen


@distributed(world=2)
def test_it_is_reduced_once_in_a_step_even_where_each_pass_reduces() -> None:
    """Runs ZeRO 2 with two micro-batches.

    With alignment the table has 32 elements, the other parameter of a stage 16.
    """
    seen = reductions_of_the_table(here(Grid(data=2)), "last stage done last")
    assert seen == {32: 1, 16: 2 + 2}

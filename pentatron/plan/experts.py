"""What expert parallelism saves: the memory of a device for every size it could have."""

import dataclasses

from pentatron.layout.divisors import divisors
from pentatron.plan.memory import largest_of
from pentatron.plan.search import Layout
from pentatron.plan.shape import Shape


def by_expert_size(layout: Layout) -> list[tuple[int, int, int]]:
    """Expert-parallel size, bytes on a device, and those of its experts' weights; all other settings as they are."""
    shape = layout.shape
    experts = shape.config.moe.num_experts
    if not experts:
        return []
    ranks = shape.grid.stage_size // shape.grid.expert_tensor
    found = []
    for size in divisors(experts):
        if ranks % size:
            continue
        parallel = dataclasses.replace(shape.config.parallel, expert_model_parallel_size=size)
        other = Shape(dataclasses.replace(shape.config, parallel=parallel), on_gpu=shape.on_gpu)
        found.append((size, largest_of(other).total, _experts_weights(other)))
    return found


def _experts_weights(shape: Shape) -> int:
    """Of the pipeline rank that has most."""
    each = sum(p.elements for p in shape.parameters.experts.parameters)
    layers = max(
        sum(len(shape.sparse_layers.intersection(part.layers)) for part in shape.parts(rank).values())
        for rank in range(shape.grid.pipeline)
    )
    return shape.width * each * layers

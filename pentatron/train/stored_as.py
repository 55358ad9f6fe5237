"""What each rank of a layout would write into a checkpoint, found by one process without any of the values.

The stages are those of training, made on a device that keeps shapes alone; what a rank owns of them follows from the same plans of
buckets and the same cuts into shards.
"""

import dataclasses
import itertools
import typing
from collections.abc import Iterator, Mapping

import torch

from pentatron.checkpoint.load import WEIGHTS
from pentatron.config.run import RunConfig
from pentatron.layout.ranks import Axis, Grid
from pentatron.models.causal_lm import CausalLM, build_stages
from pentatron.nn.axes import axes_of
from pentatron.optim.build import has_copies
from pentatron.optim.optimizer import plans_of
from pentatron.parallel.collectives import Group
from pentatron.parallel.pieces import Fragment, fragments_in, held_parameters
from pentatron.parallel.world import World
from pentatron.train.router_loads import RouterLoads

_SHAPES_ALONE = torch.device("meta")


def fragments_of_rank(config: RunConfig, rank: int) -> Iterator[Fragment]:
    """What this rank would save of weights and routers; the values have a shape and nothing else.

    What an optimizer remembers of a weight is cut like it.
    """
    world = _world(config.grid, rank)
    parts = {number: config.stages[number] for number in config.placement.stages_of(world.at.pipeline)}
    axes = axes_of(world, config.parallel)
    stages = build_stages(config.model, config.moe, parts, axes, None, _SHAPES_ALONE)
    if config.parallel.zero_stage == 3 and has_copies(stages, world):
        owned = _shards(stages, world)
    else:
        owned = _shares(stages, world, config)
    for fragment in owned:
        yield dataclasses.replace(fragment, tensor=f"{WEIGHTS}{fragment.tensor}")
    yield from RouterLoads(config, world, stages).fragments(owned_only=True)


def _world(grid: Grid, rank: int) -> World:
    """A rank that knows its place in every group, and cannot talk to anybody."""
    groups: dict[Axis, Group] = {}
    for axis in typing.get_args(Axis):
        members = next(group for group in grid.groups(axis) if rank in group)
        if len(members) > 1:
            groups[axis] = Group(members.index(rank), len(members))
    everyone = Group(rank, grid.world_size)
    return World(grid, grid.coordinates(rank), everyone, 0, _SHAPES_ALONE, groups)


def _shares(stages: Mapping[int, CausalLM], world: World, config: RunConfig) -> Iterator[Fragment]:
    """Whatever is divided between the ranks with copies of a bucket, each of them saves its share."""
    plans = plans_of(stages, world, config.parallel.ddp_bucket_size)
    for plan in itertools.chain.from_iterable(plans.values()):
        share = plan.own_share()
        values = torch.empty(len(share), device=_SHAPES_ALONE)
        for piece, fragment in plan.pieces(share, values, share.first):
            if world.is_first_of(piece.replicated_over):
                yield fragment


def _shards(stages: Mapping[int, CausalLM], world: World) -> Iterator[Fragment]:
    # Torch's sharding brings its compiler along, which other layouts need not wait for.
    from pentatron.parallel.sharding import SHARED_OVER, share_of

    for held in itertools.chain.from_iterable(held_parameters(stage) for stage in stages.values()):
        shared, instances = SHARED_OVER[held.declared.copies]
        group = world.group(shared)
        start, size = share_of(tuple(held.parameter.shape), group.rank, group.size)
        for piece, fragment in fragments_in(held, torch.empty(size, device=_SHAPES_ALONE), start):
            if world.is_first_of({instances, *piece.replicated_over}):
                yield fragment

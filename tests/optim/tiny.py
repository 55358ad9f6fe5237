"""A small network of declared layers, and its training with every option of the optimizer."""

import itertools
import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pentatron.layout.ranks import Axis, Grid
from pentatron.optim.build import AnyOptimizer, build_optimizer
from pentatron.parallel.collectives import all_reduce_
from pentatron.parallel.sharding import (
    ONES,
    Fragment,
    Initialization,
    Shape,
    Shard,
    ShardedModule,
    ShardingSpec,
    region,
    replicated,
    sharded_parameters,
)
from pentatron.parallel.world import World, create_groups
from pentatron.settings.decision_types import OptimizerOptions
from pentatron.settings.training import OptimConfig

Model = TypeVar("Model", bound=nn.Module)

CPU = torch.device("cpu")
BATCH = 12
WIDTHS = (6, 9, 4)
RATE = 1e-2
OPTIM = OptimConfig(lr=RATE, weight_decay=0.3, adam_beta2=0.95, adam_eps=1e-6, clip_grad=0.5)
# Gives the network five buckets: matrices with vectors, vectors alone, and matrices above the limit.
BUCKET = 60


class Linear(ShardedModule):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.weight = self.declare("weight", (out, into), replicated((out, into), Initialization()))
        self.bias = self.declare("bias", (out,), replicated((out,), Initialization()))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Scale(ShardedModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = self.declare("weight", (width,), replicated((width,), ONES))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.weight


def network(seed: int = 3) -> nn.Sequential:
    model = nn.Sequential(Linear(6, 9), Scale(9), Linear(9, 9), Scale(9), Linear(9, 4))
    return fill(model, seed)


def fill(model: Model, seed: int = 3) -> Model:
    """Fills shards with values that depend on the logical tensor alone, in any layout."""
    for param in sharded_parameters(model):
        param.parameter.data.zero_()
        logical = torch.randn(
            param.declared.shape,
            generator=torch.Generator().manual_seed(seed + zlib.crc32(param.tensor.encode())),
        )
        for shard in param.declared.shards:
            region(param.parameter.data, shard.local, shard.size).copy_(
                0.3 * region(logical, shard.start, shard.size)
            )
    return model


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 4, generator=generator)


def micro_batches(step: int, count: int, rank: int, ranks: int) -> Iterable[tuple[Tensor, Tensor]]:
    x, y = data(step)
    mine = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    return zip(x[mine].chunk(count), y[mine].chunk(count))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    like = next(model.parameters())
    return (model(x.to(like.device, like.dtype)).float() - y.to(like.device)).square().sum() * (
        10 / (BATCH * 4)
    )


def here(grid: Grid, device: torch.device = CPU) -> World:
    return create_groups(grid, dist.get_rank(), dist.get_rank(), device)


def parallel(
    zero: int = 0, grad: bool = False, param: bool = False, bucket: int = BUCKET
) -> OptimizerOptions:
    return OptimizerOptions(zero, bucket, overlap_reduce=grad, overlap_gather=param, fused=True)


def global_norm(optimizer: AnyOptimizer) -> float:
    return math.sqrt(float(all_reduce_(optimizer.squared_norm(), optimizer.world.all_ranks)))


def one_step(
    model: nn.Module,
    optimizer: AnyOptimizer,
    step: int,
    count: int = 1,
    rate: float = RATE,
    scale: float = 1.0,
    gradients: dict[str, Tensor] | None = None,
) -> float:
    """Runs one step and returns the gradient norm; `gradients` receives the unclipped gradients."""
    replicas = optimizer.world.replicas
    optimizer.zero_gradients()
    for number, (x, y) in enumerate(micro_batches(step, count, replicas.rank, replicas.size), 1):
        loss = loss_of(model, x, y) * scale
        optimizer.begin_backward(0, last=number == count)
        loss.backward()
        optimizer.end_backward(0, last=number == count)
    optimizer.reduce(0)
    optimizer.finish_reduction()
    norm = global_norm(optimizer) / scale
    if gradients is not None:
        gradients |= collected(optimizer.gradients(owned_only=True), optimizer.world)
    optimizer.step(rate, norm, scale)
    return norm


def trajectory(
    world: World,
    config: OptimizerOptions,
    count: int = 1,
    steps: int = 5,
    dtype: torch.dtype = torch.float32,
    optim: OptimConfig = OPTIM,
    scale: float = 1.0,
) -> dict[str, Any]:
    """Returns norms, weights and state of some steps, and the unclipped gradients of the last."""
    model = network().to(world.device)
    optimizer = build_optimizer({0: model}, world, optim, config, dtype)
    gradients: dict[str, Tensor] = {}
    norms = [
        one_step(model, optimizer, step, count, RATE / (step + 1), scale, gradients) for step in range(steps)
    ]
    with torch.no_grad():
        output = model(data(99)[0].to(world.device, dtype)).float().cpu()
    optimizer.wait_for_weights()
    return {
        "norms": norms,
        "output": output,
        "weights": {f.tensor: f.values.clone().cpu() for f in optimizer.model_weights()},
        "gradients": {name: gradient / scale for name, gradient in gradients.items()},
        "state": collected(optimizer.fragments(owned_only=True), world),
    }


def collected(fragments: Iterable[Fragment], world: World) -> dict[str, Tensor]:
    """Assembles logical tensors from all ranks' fragments, which must cover each element once."""
    mine = [(f.tensor, f.shape, f.start, f.values.clone().cpu()) for f in fragments]
    found: list[Any] = [mine]
    if world.all_ranks.size > 1:
        found = [None] * world.all_ranks.size
        dist.all_gather_object(found, mine)
    return assembled(itertools.chain.from_iterable(found))


def assembled(pieces: Iterable[tuple[str, Shape, Shape, Tensor]]) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    times: dict[str, Tensor] = {}
    for name, shape, start, part in pieces:
        values.setdefault(name, torch.zeros(shape))
        times.setdefault(name, torch.zeros(shape))
        assert values[name].shape == shape
        region(values[name], start, tuple(part.shape)).copy_(part)
        region(times[name], start, tuple(part.shape)).add_(1)
    for name, count in times.items():
        assert torch.equal(count, torch.ones_like(count)), f"{name} is not covered exactly once"
    return values


class Prescribed(ShardedModule):
    """Parameters whose gradients are the tensors that forward is given."""

    def __init__(self, parameters: dict[str, tuple[Shape, ShardingSpec]]) -> None:
        super().__init__()
        for name, (local, declared) in parameters.items():
            self.declare(name, local, declared)

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return torch.stack([(getattr(self, n) * g).sum() for n, g in gradients.items()]).sum()


def rows(
    shape: Shape, *blocks: tuple[int, int, int, Sequence[Axis], Sequence[Axis]], tensor: str | None = None
) -> ShardingSpec:
    """Returns the sharding spec of blocks of whole rows.

    A block is (row in the logical tensor, row here, number of rows, replicated over, partial over).
    """
    rest = shape[1:]
    zeros = (0,) * len(rest)
    shards = tuple(
        Shard((start, *zeros), (local, *zeros), (count, *rest), frozenset(replicated), frozenset(partial))
        for start, local, count, replicated, partial in blocks
    )
    return ShardingSpec(shape, shards, Initialization(), tensor)

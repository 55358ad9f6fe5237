"""Sharding specification: the rectangles of logical tensors that each parameter of a rank holds.

A logical tensor is a parameter of the whole model, as a single process would hold it. On a rank, a parameter
is a plain local tensor that holds some rectangles of it. Each rectangle is a `Shard`, with the axes over
which it is replicated and those over which its gradient is a partial sum. Initialization, gradient norm,
reduction, parameter counts and checkpoints are derived from shards, never from parameter names. Elements
outside all shards (padding) stay zero and belong to no logical tensor.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pentatron.layout.ranks import Axis

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """A rectangle of `size`, at `start` in the logical tensor and at `local` in the parameter.

    Data-parallel replicas of the parameter are not among the axes here: they are the same for all of its
    shards (`ShardingSpec.replica_axis`).
    """

    start: Shape
    local: Shape
    size: Shape
    replicated_over: frozenset[Axis] = frozenset()
    partial_over: frozenset[Axis] = frozenset()

    @property
    def elements(self) -> int:
        return math.prod(self.size)


@dataclass(frozen=True)
class Initialization:
    """Initialization: a constant, or normal with `scale` times the configured standard deviation."""

    scale: float = 1.0
    constant: float | None = None


ZEROS = Initialization(constant=0.0)
ONES = Initialization(constant=1.0)


@dataclass(frozen=True)
class ShardingSpec:
    """Sharding of one parameter: the `shape` of its logical tensor and the shards of it.

    `tensor` names the logical tensor if it is not the parameter's own name. `replica_axis` is the axis of the
    data-parallel replicas: the gradient is summed over them, and they may partition the optimizer state.
    """

    shape: Shape
    shards: tuple[Shard, ...]
    initial: Initialization
    tensor: str | None = None
    replica_axis: Axis = "replicas"


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of a model on this rank, its name and sharding, and the name of its logical tensor."""

    name: str
    tensor: str
    parameter: nn.Parameter
    declared: ShardingSpec

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, not to norms and biases, which have one dimension."""
        return len(self.declared.shape) > 1


class ShardedModule(nn.Module):
    """Base class of layers, which declare the sharding of each parameter when they create it."""

    def __init__(self) -> None:
        super().__init__()
        self.declared: dict[str, ShardingSpec] = {}

    def declare(self, name: str, local_shape: Shape, declared: ShardingSpec) -> nn.Parameter:
        """Registers an uninitialized parameter under `name`."""
        parameter = nn.Parameter(torch.empty(local_shape))
        self.register_parameter(name, parameter)
        self.declared[name] = declared
        return parameter


def replicated(
    shape: Shape, initial: Initialization, partial_over: frozenset[Axis] = frozenset()
) -> ShardingSpec:
    """Declares a parameter that every tensor-parallel rank holds in full."""
    origin = (0,) * len(shape)
    return ShardingSpec(shape, (Shard(origin, origin, shape, frozenset({"tensor"}), partial_over),), initial)


def sharded_parameters(*models: nn.Module) -> list[ShardedParameter]:
    """Returns the trainable parameters in model order; shared ones once, under their first name."""
    parameters: dict[int, ShardedParameter] = {}
    for path, module in (named for model in models for named in model.named_modules()):
        for name, parameter in module.named_parameters(path, recurse=False):
            if id(parameter) in parameters or not parameter.requires_grad:
                continue
            if not isinstance(module, ShardedModule):
                raise TypeError(f"{name}: {type(module).__name__} does not declare its parameters")
            declared = module.declared[name.rpartition(".")[2]]
            parameters[id(parameter)] = ShardedParameter(name, declared.tensor or name, parameter, declared)
    return list(parameters.values())


@dataclass(frozen=True)
class Fragment:
    """A rectangle of a logical tensor in this rank's memory; `values` is a view of it."""

    tensor: str
    shape: Shape
    start: Shape
    values: Tensor


def rectangles(first: int, last: int, shape: Shape) -> Iterator[tuple[Shape, Shape]]:
    """Cuts the elements [first, last) of a row-major tensor into rectangles; yields their (start, size)."""
    if first >= last:
        return
    if not shape:
        yield (), ()
        return
    row_size = math.prod(shape[1:])
    while first < last:
        row, offset = divmod(first, row_size)
        if offset or last - first < row_size:
            end = min(last, (row + 1) * row_size)
            for start, size in rectangles(offset, offset + end - first, shape[1:]):
                yield (row, *start), (1, *size)
            first = end
        else:
            rows = (last - first) // row_size
            yield (row, *(0 for _ in shape[1:])), (rows, *shape[1:])
            first += rows * row_size


def overlap(start_a: Shape, size_a: Shape, start_b: Shape, size_b: Shape) -> tuple[Shape, Shape] | None:
    """Returns the intersection of two rectangles as (start, size), or None."""
    start = tuple(map(max, start_a, start_b))
    stop = tuple(min(a + m, b + n) for a, m, b, n in zip(start_a, size_a, start_b, size_b))
    if any(i >= j for i, j in zip(start, stop)):
        return None
    return start, tuple(j - i for i, j in zip(start, stop))


def region(tensor: Tensor, start: Shape, size: Shape) -> Tensor:
    """Returns a rectangle of a tensor as a view."""
    return tensor[tuple(slice(i, i + n) for i, n in zip(start, size))]


def fragments_of(
    param: ShardedParameter, values: Tensor, first: int = 0, last: int | None = None
) -> Iterator[tuple[Shard, Fragment]]:
    """Yields the shards of a parameter within the elements [first, last) of its memory, as views of `values`.

    `values` is one-dimensional and holds those elements of the parameter, or of another tensor of the same
    layout.
    """
    shape = tuple(param.parameter.shape)
    last = math.prod(shape) if last is None else last
    begin = 0
    for start, size in rectangles(first, last, shape):
        # Rectangles lie one after the other in memory.
        end = begin + math.prod(size)
        yield from fragments_in(param, values[begin:end].view(size), start)
        begin = end


def fragments_in(param: ShardedParameter, values: Tensor, start: Shape) -> Iterator[tuple[Shard, Fragment]]:
    """Yields the shards of a parameter within its rectangle `values`, which begins at `start`, as views."""
    for shard in param.declared.shards:
        common = overlap(start, tuple(values.shape), shard.local, shard.size)
        if common is not None:
            at, extent = common
            inside = tuple(i - j for i, j in zip(at, start))
            where = tuple(g + i - j for g, i, j in zip(shard.start, at, shard.local))
            yield shard, Fragment(param.tensor, param.declared.shape, where, region(values, inside, extent))


def true_runs(chosen: Tensor) -> list[tuple[int, int]]:
    """Returns (first, last) of each run of true elements in a one-dimensional boolean tensor."""
    edges = torch.nn.functional.pad(chosen.to(torch.int8), (1, 1)).diff()
    starts, stops = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
    return list(zip(starts, stops))

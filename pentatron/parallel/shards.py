"""A layer declares what it holds: for every parameter, which rectangles of which logical tensor.

A logical tensor is a parameter of the whole model, as one process would hold it. On a rank, a parameter is a plain
local tensor that holds some rectangles of it; each rectangle is a `Piece`, which also says on which axes other ranks
hold the same values and over which axes its gradient is a part of a sum. Initial values, gradient norm, reduction,
counting and checkpoints read pieces; nothing matches names. Elements that no piece covers (padding) stay zero and
belong to no logical tensor.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pentatron.layout.ranks import Axis

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """`size` elements: at `start` in the logical tensor, at `local` in the parameter.

    Ranks that hold the same parameter for other tokens, and thus add to its gradient, are not listed here: they are the
    same for all pieces of a parameter (`Declared.copies`).
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
class Initial:
    """Initial values: a constant, or normal numbers with `scale` times the configured standard deviation."""

    scale: float = 1.0
    constant: float | None = None


ZEROS = Initial(constant=0.0)
ONES = Initial(constant=1.0)


@dataclass(frozen=True)
class Declared:
    """What one parameter holds. `tensor` names the logical tensor where it is not the parameter's own name.

    `copies` is the axis of the ranks that hold the same parameter and see other tokens. Its gradient is summed over
    them, and they are the ones that may divide optimizer state between them.
    """

    shape: Shape
    pieces: tuple[Piece, ...]
    initial: Initial
    tensor: str | None = None
    copies: Axis = "replicas"


@dataclass(frozen=True)
class Held:
    """One parameter of a model on this rank: its name there, the logical tensor's name, and what it holds of it."""

    name: str
    tensor: str
    parameter: nn.Parameter
    declared: Declared

    @property
    def decays(self) -> bool:
        """Matrices decay; norms and biases, which have one dimension, do not."""
        return len(self.declared.shape) > 1


class DeclaringModule(nn.Module):
    """A layer that declares its parameters as it makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.declared: dict[str, Declared] = {}

    def declare(self, name: str, local_shape: Shape, declared: Declared) -> nn.Parameter:
        """An uninitialised parameter, registered under `name`."""
        parameter = nn.Parameter(torch.empty(local_shape))
        self.register_parameter(name, parameter)
        self.declared[name] = declared
        return parameter


def whole(shape: Shape, initial: Initial, partial_over: frozenset[Axis] = frozenset()) -> Declared:
    """A parameter every tensor rank holds entirely."""
    everywhere: frozenset[Axis] = frozenset({"tensor"})
    origin = (0,) * len(shape)
    return Declared(shape, (Piece(origin, origin, shape, everywhere, partial_over),), initial)


def held_parameters(*models: nn.Module) -> list[Held]:
    """Every parameter of a model, or of several stages of one, in the order of the model; each once, under its first name."""
    found: dict[int, Held] = {}
    for path, module in itertools.chain.from_iterable(model.named_modules() for model in models):
        for name, parameter in module.named_parameters(path, recurse=False):
            if id(parameter) in found or not parameter.requires_grad:
                continue
            if not isinstance(module, DeclaringModule):
                raise TypeError(f"{name}: {type(module).__name__} does not declare its parameters")
            declared = module.declared[name.rpartition(".")[2]]
            found[id(parameter)] = Held(name, declared.tensor or name, parameter, declared)
    return list(found.values())


@dataclass(frozen=True)
class Fragment:
    """A rectangle of a logical tensor in this rank's memory; `values` is a view, to be read or overwritten."""

    tensor: str
    shape: Shape
    start: Shape
    values: Tensor


def rectangles(first: int, last: int, shape: Shape) -> Iterator[tuple[Shape, Shape]]:
    """Cuts the elements [first, last) of a row-major tensor into rectangles: (start, size) of each, in order."""
    if first >= last:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    while first < last:
        row, offset = divmod(first, inner)
        if offset or last - first < inner:
            end = min(last, (row + 1) * inner)
            for start, size in rectangles(offset, offset + end - first, shape[1:]):
                yield (row, *start), (1, *size)
            first = end
        else:
            rows = (last - first) // inner
            yield (row, *(0 for _ in shape[1:])), (rows, *shape[1:])
            first += rows * inner


def overlap(start_a: Shape, size_a: Shape, start_b: Shape, size_b: Shape) -> tuple[Shape, Shape] | None:
    """The common part of two rectangles as (start, size), or None."""
    start = tuple(map(max, start_a, start_b))
    stop = tuple(min(a + m, b + n) for a, m, b, n in zip(start_a, size_a, start_b, size_b))
    if any(i >= j for i, j in zip(start, stop)):
        return None
    return start, tuple(j - i for i, j in zip(start, stop))


def region(tensor: Tensor, start: Shape, size: Shape) -> Tensor:
    """The rectangle of a tensor, as a view."""
    return tensor[tuple(slice(i, i + n) for i, n in zip(start, size))]


def fragments_of(
    held: Held, values: Tensor, first: int = 0, last: int | None = None
) -> Iterator[tuple[Piece, Fragment]]:
    """The pieces of a parameter that lie in the elements [first, last) of its memory, as rectangles of `values`.

    `values` holds those elements in one dimension: the parameter's, or another tensor laid out alike.
    """
    shape = tuple(held.parameter.shape)
    last = math.prod(shape) if last is None else last
    for (start, size), piece in itertools.product(rectangles(first, last, shape), held.declared.pieces):
        common = overlap(start, size, piece.local, piece.size)
        if common is None:
            continue
        at, extent = common
        # Rectangles lie one after the other in memory; this one begins here.
        begin = sum(i * math.prod(shape[d + 1 :]) for d, i in enumerate(start)) - first
        inside = tuple(i - j for i, j in zip(at, start))
        block = values[begin : begin + math.prod(size)].view(size)
        where = tuple(g + i - j for g, i, j in zip(piece.start, at, piece.local))
        yield piece, Fragment(held.tensor, held.declared.shape, where, region(block, inside, extent))


def fragments_in(held: Held, values: Tensor, start: Shape) -> Iterator[tuple[Piece, Fragment]]:
    """The pieces of a parameter that lie in the rectangle of it that `values` is; it begins at `start`."""
    for piece in held.declared.pieces:
        common = overlap(start, tuple(values.shape), piece.local, piece.size)
        if common is None:
            continue
        at, extent = common
        inside = tuple(i - j for i, j in zip(at, start))
        where = tuple(g + i - j for g, i, j in zip(piece.start, at, piece.local))
        yield piece, Fragment(held.tensor, held.declared.shape, where, region(values, inside, extent))


def runs_of(chosen: Tensor) -> list[tuple[int, int]]:
    """Where the true elements of a row of booleans lie: (first, last) of each run of them."""
    edges = torch.nn.functional.pad(chosen.to(torch.int8), (1, 1)).diff()
    starts, stops = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
    return list(zip(starts, stops))

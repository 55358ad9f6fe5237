"""Values along links: tensors of one side made of rectangles of the other, a block at a time, and in which type."""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from pentatron.checkpoint.links import Link, by_ours, by_theirs
from pentatron.checkpoint.tensor_file import Outline, Read, blocks, holds
from pentatron.errors import UserError
from pentatron.parallel.pieces import Fragment, Shape, region

# The types that a user may ask for.
BY_NAME = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {dtype: name for name, dtype in BY_NAME.items()} | {torch.float64: "fp64"}


def dtype_name(dtype: torch.dtype) -> str:
    return _NAMES[dtype]


def common_dtype(stored: Iterable[torch.dtype]) -> torch.dtype:
    """The narrowest type that holds the values of all of them."""
    found = set(stored)
    candidates = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    return next(kept for kept in candidates if all(holds(kept, one) for one in found))


def require_room(name: str, stored: torch.dtype, wanted: torch.dtype) -> None:
    """Refuses a type that would round values of this tensor."""
    if not holds(wanted, stored):
        raise UserError(
            f"{name} is {dtype_name(stored)}, of which {dtype_name(wanted)} cannot hold every value; leave out --dtype to keep "
            f"the type, or add --allow-narrowing to round the weights"
        )


def reads_ours(links: Iterable[Link], theirs: Read, outlines: Mapping[str, Outline]) -> Read:
    """Reads rectangles of our tensors out of theirs."""
    of_tensor = by_ours(links)

    def read(name: str, start: Shape, size: Shape) -> Tensor:
        def part(link: Link, at: Shape, extent: Shape) -> Tensor:
            return link.to_ours(theirs(link.theirs, *link.their_rectangle(at, extent)), extent)

        rectangles = [(link, link.shared_with_ours(start, size)) for link in of_tensor[name]]
        return _put_together(name, rectangles, part, start, size, outlines[name].dtype)

    return read


def reads_theirs(links: Iterable[Link], ours: Read, outlines: Mapping[str, Outline]) -> Read:
    """Reads rectangles of their tensors out of ours."""
    of_tensor = by_theirs(links)

    def read(name: str, start: Shape, size: Shape) -> Tensor:
        def part(link: Link, at: Shape, extent: Shape) -> Tensor:
            return link.to_theirs(ours(link.ours, *link.our_rectangle(at, extent)))

        rectangles = [(link, link.shared_with_theirs(start, size)) for link in of_tensor[name]]
        return _put_together(name, rectangles, part, start, size, outlines[name].dtype)

    return read


def fill(target: Fragment, links: Iterable[Link], theirs: Read) -> None:
    """Overwrites a rectangle of a tensor of ours, in memory that exists; `links` are those of the tensor."""
    size, found = tuple(target.values.shape), 0
    for link in links:
        common = link.shared_with_ours(target.start, size)
        if common is None:
            continue
        at, extent = common
        into = region(target.values.detach(), _minus(at, target.start), extent)
        for offset, block in blocks(extent, into.element_size()):
            first = tuple(i + j for i, j in zip(at, offset, strict=True))
            values = theirs(link.theirs, *link.their_rectangle(first, block))
            region(into, offset, block).copy_(link.to_ours(values, block))
        found += math.prod(extent)
    assert found == math.prod(size), f"{target.tensor}: {found} elements of {size} have a source"


def _put_together(
    name: str,
    rectangles: Iterable[tuple[Link, tuple[Shape, Shape] | None]],
    part: Callable[[Link, Shape, Shape], Tensor],
    start: Shape,
    size: Shape,
    dtype: torch.dtype,
) -> Tensor:
    found = [(link, *common) for link, common in rectangles if common is not None]
    if len(found) == 1:
        # One link holds the whole rectangle, so its values need no copy.
        return _as(dtype, part(*found[0]), name)
    values = torch.empty(size, dtype=dtype)
    filled = 0
    for link, at, extent in found:
        region(values, _minus(at, start), extent).copy_(_as(dtype, part(link, at, extent), name))
        filled += math.prod(extent)
    assert filled == values.numel(), f"{filled} elements of {list(size)} have a source"
    return values


def _minus(at: Shape, start: Shape) -> Shape:
    return tuple(i - j for i, j in zip(at, start, strict=True))


def _as(dtype: torch.dtype, values: Tensor, name: str) -> Tensor:
    """The values in another type. Rounding is what was asked for; a finite value that becomes infinite is an error."""
    made = values.to(dtype)
    if holds(dtype, values.dtype) or all(extreme.isfinite() for extreme in made.aminmax()):
        return made
    beyond = made.isinf() & values.isfinite()
    if beyond.any():
        raise UserError(
            f"{name} holds {float(values[beyond].abs().max()):.3g}, which is beyond the range of {dtype_name(dtype)}; choose another "
            f"--dtype"
        )
    return made

"""Tensors of one side made of rectangles of the other, a block at a time, as the links say."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter

import torch
from torch import Tensor

from pentatron.checkpoint.tensor_file import Outline, Read, holds
from pentatron.errors import UserError
from pentatron.hf.dtypes import dtype_name
from pentatron.hf.links import Link
from pentatron.parallel.pieces import Shape, overlap, region


def reads_ours(links: Iterable[Link], theirs: Read, outlines: Mapping[str, Outline]) -> Read:
    """Reads rectangles of our tensors out of theirs."""
    of_tensor = {ours: list(group) for ours, group in itertools.groupby(links, key=attrgetter("ours"))}

    def read(name: str, start: Shape, size: Shape) -> Tensor:
        def part(link: Link, at: Shape, extent: Shape) -> Tensor:
            return link.to_ours(theirs(link.theirs, *link.part(at, extent)), extent)

        rectangles = [(link, overlap(start, size, link.at, link.size)) for link in of_tensor[name]]
        return _put_together(name, rectangles, part, start, size, outlines[name].dtype)

    return read


def reads_theirs(links: Iterable[Link], ours: Read, outlines: Mapping[str, Outline]) -> Read:
    """Reads rectangles of their tensors out of ours."""
    of_tensor: dict[str, list[Link]] = {}
    for link in links:
        of_tensor.setdefault(link.theirs, []).append(link)

    def read(name: str, start: Shape, size: Shape) -> Tensor:
        def part(link: Link, at: Shape, extent: Shape) -> Tensor:
            return link.to_theirs(ours(link.ours, *_part_of_ours(link, at, extent)))

        rectangles = [(link, overlap(start, size, link.start, link.their_size)) for link in of_tensor[name]]
        return _put_together(name, rectangles, part, start, size, outlines[name].dtype)

    return read


def _part_of_ours(link: Link, start: Shape, size: Shape) -> tuple[Shape, Shape]:
    """Where in ours a rectangle of theirs is, one within the link: (at, size)."""
    offset = tuple(i - j for i, j in zip(start, link.start, strict=True))
    if link.transposed:
        offset, size = offset[::-1], size[::-1]
    # Dimensions that theirs has not are those of one expert.
    missing = len(link.at) - len(offset)
    inside = (0,) * missing + offset
    return tuple(i + j for i, j in zip(link.at, inside, strict=True)), link.size[:missing] + size


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
        # Nothing to put together; what is read may go on as it is.
        return _as(dtype, part(*found[0]), name)
    values = torch.empty(size, dtype=dtype)
    filled = 0
    for link, at, extent in found:
        inside = tuple(i - j for i, j in zip(at, start, strict=True))
        region(values, inside, extent).copy_(_as(dtype, part(link, at, extent), name))
        filled += torch.Size(extent).numel()
    assert filled == values.numel(), f"{filled} elements of {list(size)} have a source"
    return values


def _as(dtype: torch.dtype, values: Tensor, name: str) -> Tensor:
    """The values in another type. Rounding was asked for where it happens; that a number becomes infinite never is."""
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

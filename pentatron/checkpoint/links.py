"""Links: which rectangle of a tensor of ours is which rectangle of a tensor in another program's files.

A table names, for each tensor of a model, the tensors of the other side that hold it, and how: some of its rows, each expert by
itself, transposed, or with an axis of layers in front. The table and the shapes of a model give a list of links, which serves
both directions. Values move along links in `convert.py`. Packages for other formats contribute tables and read and write files.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pentatron.checkpoint.tensor_file import Outline, Read, blocks, holds
from pentatron.errors import UserError
from pentatron.parallel.shards import Fragment, Shape, overlap, region
from pentatron.settings.model import TransformerConfig


@dataclass(frozen=True)
class Link:
    """`size` elements of ours from `at` on are those of theirs from `start` on; `size` counts in our dimensions.

    Theirs lacks our leading dimension if it holds one expert, and has `stacked` dimensions in front of ours if it holds all layers.
    With `transposed` its last two dimensions are swapped.
    """

    ours: str
    at: Shape
    theirs: str
    start: Shape
    size: Shape
    transposed: bool = False
    stacked: int = 0

    @property
    def their_size(self) -> Shape:
        return (1,) * self.stacked + self._swapped(self.size[self._lacked :])

    @property
    def _lacked(self) -> int:
        """Our leading dimensions that theirs does not have."""
        return len(self.at) + self.stacked - len(self.start)

    def _swapped(self, numbers: Shape) -> Shape:
        return (*numbers[:-2], numbers[-1], numbers[-2]) if self.transposed else numbers

    def shared_with_ours(self, at: Shape, size: Shape) -> tuple[Shape, Shape] | None:
        """The part of a rectangle of ours that this link covers, as (start, size)."""
        return overlap(at, size, self.at, self.size)

    def shared_with_theirs(self, start: Shape, size: Shape) -> tuple[Shape, Shape] | None:
        """The part of a rectangle of theirs that this link covers, as (start, size)."""
        return overlap(start, size, self.start, self.their_size)

    def their_rectangle(self, at: Shape, size: Shape) -> tuple[Shape, Shape]:
        """The same elements in theirs, of a rectangle of ours within this link."""
        offset = tuple(i - j for i, j in zip(at, self.at, strict=True))[self._lacked :]
        moved = (0,) * self.stacked + self._swapped(offset)
        start = tuple(i + j for i, j in zip(self.start, moved, strict=True))
        return start, (1,) * self.stacked + self._swapped(size[self._lacked :])

    def our_rectangle(self, start: Shape, size: Shape) -> tuple[Shape, Shape]:
        """The same elements in ours, of a rectangle of theirs within this link."""
        offset = tuple(i - j for i, j in zip(start, self.start, strict=True))[self.stacked :]
        moved = (0,) * self._lacked + self._swapped(offset)
        at = tuple(i + j for i, j in zip(self.at, moved, strict=True))
        return at, self.size[: self._lacked] + self._swapped(size[self.stacked :])

    def to_ours(self, values: Tensor, size: Shape) -> Tensor:
        """Values of theirs, as a rectangle of ours of this size."""
        return (values.transpose(-2, -1) if self.transposed else values).reshape(size)

    def to_theirs(self, values: Tensor) -> Tensor:
        """A rectangle of ours, as values of theirs."""
        kept = values.reshape((1,) * self.stacked + tuple(values.shape[self._lacked :]))
        return kept.transpose(-2, -1) if self.transposed else kept


@dataclass(frozen=True)
class Source:
    """A tensor of theirs, and which rows of ours it holds (a key of `PARTS`).

    `name` may contain `{base}`, a prefix of the whole file, `{kind}`, `weight` or `bias`, `{layer}`, and `{expert}` if each expert
    has a tensor. `transposed`: matrices are [inputs, outputs] there; a bias is the same either way. `stacked`: one tensor holds all
    layers, and the layer is an index of its first axis.
    """

    name: str
    part: str = "all"
    transposed: bool = False
    stacked: bool = False


@dataclass(frozen=True)
class Row:
    """A tensor of ours, and the tensors it is made of. The first form is written, each is read."""

    ours: str
    forms: tuple[tuple[Source, ...], ...]


@dataclass(frozen=True)
class NameTable:
    """A row for each tensor. `unknown` is the error for a tensor without a row, with its name as `{ours}`."""

    rows: tuple[Row, ...]
    unknown: str


@dataclass(frozen=True)
class Run:
    """`count` rows, from `ours` on in a tensor of ours and from `theirs` on in one of theirs."""

    ours: int
    theirs: int
    count: int


def _queries(model: TransformerConfig, rows: int) -> list[Run]:
    groups, queries, width = _attention(model)
    own, stride = queries * width, (queries + 2) * width
    return [Run(g * stride, g * own, own) for g in range(groups)]


def _keys(model: TransformerConfig, rows: int) -> list[Run]:
    groups, queries, width = _attention(model)
    return [Run((g * (queries + 2) + queries) * width, g * width, width) for g in range(groups)]


def _values(model: TransformerConfig, rows: int) -> list[Run]:
    return [Run(run.ours + run.count, run.theirs, run.count) for run in _keys(model, rows)]


def _queries_keys_values(model: TransformerConfig, rows: int) -> list[Run]:
    """One after the other in one tensor."""
    runs: list[Run] = []
    for part in (_queries, _keys, _values):
        before = sum(run.count for run in runs)
        runs += [Run(run.ours, before + run.theirs, run.count) for run in part(model, rows)]
    return runs


def _attention(model: TransformerConfig) -> Shape:
    """Groups, queries of a group, width of a head."""
    return model.num_query_groups, model.num_attention_heads // model.num_query_groups, model.kv_channels


# The rows of ours that a tensor of theirs holds, by the names that tables use.
PARTS: dict[str, Callable[[TransformerConfig, int], list[Run]]] = {
    "all": lambda model, rows: [Run(0, 0, rows)],
    "first half": lambda model, rows: [Run(0, 0, rows // 2)],
    "second half": lambda model, rows: [Run(rows // 2, 0, rows // 2)],
    "queries": _queries,
    "keys": _keys,
    "values": _values,
    "queries, keys, values": _queries_keys_values,
}


def links_by_table(
    table: NameTable,
    model: TransformerConfig,
    shapes: Mapping[str, Shape],
    names: Collection[str] | None = None,
    base: str = "",
) -> list[Link]:
    """The links of tensors of these shapes, in their order.

    `names` are the tensors of a file, which may have any of the forms of a row; a tensor of which it has none is linked in the
    first form, and is then missing. Without `names` all links are of the first form.
    """
    links: list[Link] = []
    for ours, shape in shapes.items():
        row, fields = _row_of(table, ours)
        of_tensor = list(_links_of_tensor(row, ours, shape, {**fields, "base": base}, model, names))
        assert sum(math.prod(link.size) for link in of_tensor) == math.prod(shape), ours
        links += of_tensor
    return links


def _row_of(table: NameTable, ours: str) -> tuple[Row, dict[str, str]]:
    for row in table.rows:
        pattern = re.escape(row.ours).replace(r"\{layer\}", r"(?P<layer>\d+)")
        found = re.fullmatch(pattern.replace(r"\{kind\}", "(?P<kind>weight|bias)"), ours)
        if found:
            return row, found.groupdict()
    raise UserError(table.unknown.format(ours=ours))


def _links_of_tensor(
    row: Row,
    ours: str,
    shape: Shape,
    fields: Mapping[str, str],
    model: TransformerConfig,
    names: Collection[str] | None,
) -> Iterator[Link]:
    for source in _form(row, fields, names):
        runs = PARTS[source.part](model, shape[_rows_axis(shape)])
        each = "{expert}" in source.name
        for expert in range(shape[0]) if each else (0,):
            theirs = source.name.format(expert=expert, **fields)
            layer = int(fields["layer"]) if source.stacked else None
            for run in runs:
                yield _link(source, ours, shape, theirs, run, expert if each else None, layer)


def _form(row: Row, fields: Mapping[str, str], names: Collection[str] | None) -> tuple[Source, ...]:
    """The first form of which the file has anything, else the first of all."""
    for form in row.forms:
        if names is None or form[0].name.format(expert=0, **fields) in names:
            return form
    return row.forms[0]


def _rows_axis(shape: Shape) -> int:
    """The outputs of a matrix; an axis of experts may come before them."""
    return max(len(shape) - 2, 0)


def _link(
    source: Source, ours: str, shape: Shape, theirs: str, run: Run, expert: int | None, layer: int | None
) -> Link:
    axis = _rows_axis(shape)
    at, start = (_along(axis, first, len(shape)) for first in (run.ours, run.theirs))
    size = (*shape[:axis], run.count, *shape[axis + 1 :])
    if expert is not None:
        at, start, size = (expert, *at[1:]), start[1:], (1, *size[1:])
    transposed = source.transposed and len(start) > 1
    if transposed:
        start = (*start[:-2], start[-1], start[-2])
    if layer is None:
        return Link(ours, at, theirs, start, size, transposed)
    return Link(ours, at, theirs, (layer, *start), size, transposed, stacked=1)


def _along(axis: int, first: int, dimensions: int) -> Shape:
    return tuple(first if i == axis else 0 for i in range(dimensions))


def by_ours(links: Iterable[Link]) -> dict[str, list[Link]]:
    """The links of each tensor of ours."""
    found: dict[str, list[Link]] = {}
    for link in links:
        found.setdefault(link.ours, []).append(link)
    return found


def by_theirs(links: Iterable[Link]) -> dict[str, list[Link]]:
    """The links of each tensor of theirs."""
    found: dict[str, list[Link]] = {}
    for link in links:
        found.setdefault(link.theirs, []).append(link)
    return found


def their_shapes(links: Iterable[Link]) -> dict[str, Shape]:
    """Every tensor of theirs that the links name, and the size they need it to have."""
    shapes: dict[str, Shape] = {}
    for link in links:
        end = tuple(i + n for i, n in zip(link.start, link.their_size, strict=True))
        shapes[link.theirs] = tuple(map(max, shapes.get(link.theirs, end), end))
    return shapes


# Values along links: tensors of one side made of rectangles of the other, a block at a time, and in which
# type.


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

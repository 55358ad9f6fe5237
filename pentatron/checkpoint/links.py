"""Links between our tensors and those of other formats: which rectangle of ours is which rectangle of theirs.

A table names, for each tensor of a model, the tensors of the other format that hold it, and how: some rows,
one expert each, transposed, or with a layer axis in front. The table and the shapes of a model give a list of
links, which serves both directions. Packages for other formats contribute tables and read and write files.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from pentatron.checkpoint.tensor_file import ReadRectangle, TensorSpec, blocks, represents_exactly
from pentatron.errors import UserError
from pentatron.parallel.sharding import Fragment, Shape, overlap, region
from pentatron.settings.model import TransformerConfig


@dataclass(frozen=True)
class Link:
    """Maps `size` elements of `ours` from `at` to those of `theirs` from `start`.

    `size` is in our dimensions. Theirs lacks our leading dimension if it holds one expert, and has `stacked`
    leading dimensions more if it holds all layers. `transposed`: its last two dimensions are swapped.
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
        return (1,) * self.stacked + self._transpose(self.size[self._dropped_axes :])

    @property
    def _dropped_axes(self) -> int:
        """Number of our leading dimensions that theirs lacks."""
        return len(self.at) + self.stacked - len(self.start)

    def _transpose(self, numbers: Shape) -> Shape:
        return (*numbers[:-2], numbers[-1], numbers[-2]) if self.transposed else numbers

    def shared_with_ours(self, at: Shape, size: Shape) -> tuple[Shape, Shape] | None:
        """Intersection of this link with a rectangle of ours, as (start, size), or None."""
        return overlap(at, size, self.at, self.size)

    def shared_with_theirs(self, start: Shape, size: Shape) -> tuple[Shape, Shape] | None:
        """Intersection of this link with a rectangle of theirs, as (start, size), or None."""
        return overlap(start, size, self.start, self.their_size)

    def their_rectangle(self, at: Shape, size: Shape) -> tuple[Shape, Shape]:
        """Maps a rectangle of ours within this link to theirs."""
        offset = tuple(i - j for i, j in zip(at, self.at, strict=True))[self._dropped_axes :]
        moved = (0,) * self.stacked + self._transpose(offset)
        start = tuple(i + j for i, j in zip(self.start, moved, strict=True))
        return start, (1,) * self.stacked + self._transpose(size[self._dropped_axes :])

    def our_rectangle(self, start: Shape, size: Shape) -> tuple[Shape, Shape]:
        """Maps a rectangle of theirs within this link to ours."""
        offset = tuple(i - j for i, j in zip(start, self.start, strict=True))[self.stacked :]
        moved = (0,) * self._dropped_axes + self._transpose(offset)
        at = tuple(i + j for i, j in zip(self.at, moved, strict=True))
        return at, self.size[: self._dropped_axes] + self._transpose(size[self.stacked :])

    def to_ours(self, values: Tensor, size: Shape) -> Tensor:
        """Converts values of theirs to a rectangle of ours of this size."""
        return (values.transpose(-2, -1) if self.transposed else values).reshape(size)

    def to_theirs(self, values: Tensor) -> Tensor:
        """Converts a rectangle of ours to values of theirs."""
        reshaped = values.reshape((1,) * self.stacked + tuple(values.shape[self._dropped_axes :]))
        return reshaped.transpose(-2, -1) if self.transposed else reshaped


@dataclass(frozen=True)
class Source:
    """A tensor of theirs, and which rows of ours it holds (a key of `ROW_SELECTIONS`).

    `name` may contain `{base}` (prefix of the whole file), `{kind}` (`weight` or `bias`), `{layer}`, and
    `{expert}` if each expert has its own tensor. `transposed`: matrices are [inputs, outputs]; biases are not
    affected. `stacked`: one tensor holds all layers, indexed by its first axis.
    """

    name: str
    part: str = "all"
    transposed: bool = False
    stacked: bool = False


@dataclass(frozen=True)
class TableRow:
    """Table row: a tensor of ours and its possible sources. The first form is written, all are read."""

    ours: str
    forms: tuple[tuple[Source, ...], ...]


@dataclass(frozen=True)
class NameTable:
    """One row per tensor.

    `unknown` is the error message for a tensor without a row, with its name as `{ours}`.
    """

    rows: tuple[TableRow, ...]
    unknown: str

    def links(
        self,
        model: TransformerConfig,
        shapes: Mapping[str, Shape],
        names: Collection[str] | None = None,
        base: str = "",
    ) -> list[Link]:
        """Returns the links of tensors with these shapes, in order.

        `names` are the tensors of a file, which may use any form of a row; a tensor with no form in the file
        is linked in the first form, and then reported as missing. Without `names` all links use the first
        form.
        """
        links: list[Link] = []
        for ours, shape in shapes.items():
            row, fields = self._row_of(ours)
            of_tensor = list(_links_of_tensor(row, ours, shape, {**fields, "base": base}, model, names))
            assert sum(math.prod(link.size) for link in of_tensor) == math.prod(shape), ours
            links += of_tensor
        return links

    def _row_of(self, ours: str) -> tuple[TableRow, dict[str, str]]:
        """Returns the row of a tensor and the values of its placeholders."""
        for row in self.rows:
            pattern = re.escape(row.ours).replace(r"\{layer\}", r"(?P<layer>\d+)")
            if match := re.fullmatch(pattern.replace(r"\{kind\}", "(?P<kind>weight|bias)"), ours):
                return row, match.groupdict()
        raise UserError(self.unknown.format(ours=ours))


@dataclass(frozen=True)
class RowRange:
    """`count` consecutive rows, from `ours` in our tensor and from `theirs` in theirs."""

    ours: int
    theirs: int
    count: int


RowSelection = Callable[[TransformerConfig, int], list[RowRange]]


def _attention_rows(*parts: str) -> RowSelection:
    """Selects rows of our QKV tensor: these parts, one after the other in theirs.

    In ours, each group holds its queries, then one key and one value head.
    """

    def select(model: TransformerConfig, rows: int) -> list[RowRange]:
        groups, width = model.num_query_groups, model.kv_channels
        queries = model.num_attention_heads // groups
        # First head in the group, and number of heads.
        heads = {"queries": (0, queries), "keys": (queries, 1), "values": (queries + 1, 1)}
        runs: list[RowRange] = []
        for first, count in (heads[part] for part in parts):
            begin, size = sum(run.count for run in runs), count * width
            starts = ((group * (queries + 2) + first) * width for group in range(groups))
            runs += [RowRange(start, begin + group * size, size) for group, start in enumerate(starts)]
        return runs

    return select


# Row selections of our tensor, by the names that tables use.
ROW_SELECTIONS: dict[str, RowSelection] = {
    "all": lambda model, rows: [RowRange(0, 0, rows)],
    "first half": lambda model, rows: [RowRange(0, 0, rows // 2)],
    "second half": lambda model, rows: [RowRange(rows // 2, 0, rows // 2)],
    "queries": _attention_rows("queries"),
    "keys": _attention_rows("keys"),
    "values": _attention_rows("values"),
    "queries, keys, values": _attention_rows("queries", "keys", "values"),
}


def _links_of_tensor(
    row: TableRow,
    ours: str,
    shape: Shape,
    fields: Mapping[str, str],
    model: TransformerConfig,
    names: Collection[str] | None,
) -> Iterator[Link]:
    """Yields the links of one tensor."""
    # The first form that exists in the file, else the first form.
    in_file = (form for form in row.forms if names and form[0].name.format(expert=0, **fields) in names)
    # Axis of the output features; an expert axis may precede it.
    axis = max(len(shape) - 2, 0)
    for source in next(in_file, row.forms[0]):
        layer = (int(fields["layer"]),) if source.stacked else ()
        for expert in range(shape[0]) if "{expert}" in source.name else (None,):
            theirs = source.name.format(expert=expert, **fields)
            for run in ROW_SELECTIONS[source.part](model, shape[axis]):
                at, start, size = [0] * len(shape), [0] * len(shape), list(shape)
                at[axis], start[axis], size[axis] = run.ours, run.theirs, run.count
                if expert is not None:
                    at[0], size[0] = expert, 1
                    start.pop(0)
                # A bias of one expert has no axis to swap.
                transposed = source.transposed and len(start) > 1
                if transposed:
                    start[-2:] = reversed(start[-2:])
                yield Link(ours, tuple(at), theirs, (*layer, *start), tuple(size), transposed, len(layer))


def by_ours(links: Iterable[Link]) -> dict[str, list[Link]]:
    """Groups links by our tensor."""
    return _grouped(links, attrgetter("ours"))


def _grouped(links: Iterable[Link], name_of: Callable[[Link], str]) -> dict[str, list[Link]]:
    groups: dict[str, list[Link]] = {}
    for link in links:
        groups.setdefault(name_of(link), []).append(link)
    return groups


def their_shapes(links: Iterable[Link]) -> dict[str, Shape]:
    """Returns the minimum shape of every tensor of theirs that the links use."""
    shapes: dict[str, Shape] = {}
    for link in links:
        end = tuple(i + n for i, n in zip(link.start, link.their_size, strict=True))
        shapes[link.theirs] = tuple(map(max, shapes.get(link.theirs, end), end))
    return shapes


# --- reading values along links ---


# Dtypes the user may choose.
DTYPES_BY_NAME = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {dtype: name for name, dtype in DTYPES_BY_NAME.items()} | {torch.float64: "fp64"}


def dtype_name(dtype: torch.dtype) -> str:
    return _NAMES[dtype]


def common_dtype(stored: Iterable[torch.dtype]) -> torch.dtype:
    """Returns the narrowest dtype that represents the values of all of these exactly."""
    dtypes = set(stored)
    candidates = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    return next(wide for wide in candidates if all(represents_exactly(wide, dtype) for dtype in dtypes))


def require_exact_dtype(name: str, stored: torch.dtype, wanted: torch.dtype) -> None:
    """Refuses a dtype that would round values of this tensor."""
    if not represents_exactly(wanted, stored):
        raise UserError(
            f"{name} is {dtype_name(stored)}, of which {dtype_name(wanted)} cannot hold every value; leave out --dtype to keep "
            f"the type, or add --allow-narrowing to round the weights"
        )


def reads_ours(
    links: Iterable[Link], theirs: ReadRectangle, outlines: Mapping[str, TensorSpec]
) -> ReadRectangle:
    """Returns a reader of rectangles of our tensors from theirs."""

    def part(link: Link, at: Shape, extent: Shape) -> Tensor:
        return link.to_ours(theirs(link.theirs, *link.their_rectangle(at, extent)), extent)

    return _reader(by_ours(links), Link.shared_with_ours, part, outlines)


def reads_theirs(
    links: Iterable[Link], ours: ReadRectangle, outlines: Mapping[str, TensorSpec]
) -> ReadRectangle:
    """Returns a reader of rectangles of their tensors from ours."""

    def part(link: Link, at: Shape, extent: Shape) -> Tensor:
        return link.to_theirs(ours(link.ours, *link.our_rectangle(at, extent)))

    return _reader(_grouped(links, attrgetter("theirs")), Link.shared_with_theirs, part, outlines)


def _reader(
    links: Mapping[str, Sequence[Link]],
    intersection: Callable[[Link, Shape, Shape], tuple[Shape, Shape] | None],
    part: Callable[[Link, Shape, Shape], Tensor],
    outlines: Mapping[str, TensorSpec],
) -> ReadRectangle:
    """Returns a reader that assembles rectangles from the parts that the links of a tensor provide."""

    def read(name: str, start: Shape, size: Shape) -> Tensor:
        commons = ((link, intersection(link, start, size)) for link in links[name])
        parts = [(link, *common) for link, common in commons if common is not None]
        dtype = outlines[name].dtype
        if len(parts) == 1:
            # One link covers the whole rectangle, so no copy is needed.
            return _cast(dtype, part(*parts[0]), name)
        values = torch.empty(size, dtype=dtype)
        filled = 0
        for link, at, extent in parts:
            inside = tuple(i - j for i, j in zip(at, start, strict=True))
            region(values, inside, extent).copy_(_cast(dtype, part(link, at, extent), name))
            filled += math.prod(extent)
        assert filled == values.numel(), f"{filled} elements of {list(size)} have a source"
        return values

    return read


def fill(target: Fragment, read: ReadRectangle) -> None:
    """Overwrites a rectangle of our tensor in place, block by block."""
    for offset, size in blocks(tuple(target.values.shape), target.values.element_size()):
        start = tuple(i + j for i, j in zip(target.start, offset, strict=True))
        region(target.values.detach(), offset, size).copy_(read(target.tensor, start, size))


def _cast(dtype: torch.dtype, values: Tensor, name: str) -> Tensor:
    """Converts values to a dtype. Rounding is allowed here; a finite value that becomes inf is an error."""
    cast = values.to(dtype)
    if represents_exactly(dtype, values.dtype) or all(extreme.isfinite() for extreme in cast.aminmax()):
        return cast
    overflowed = cast.isinf() & values.isfinite()
    if overflowed.any():
        raise UserError(
            f"{name} holds {float(values[overflowed].abs().max()):.3g}, which is beyond the range of {dtype_name(dtype)}; choose another "
            f"--dtype"
        )
    return cast

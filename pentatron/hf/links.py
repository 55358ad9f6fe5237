"""Which rectangle of a tensor of ours is which rectangle of a tensor of theirs.

Both directions of a conversion, and loading in any layout, follow from the same list of links. It is made of the names
and shapes that a model of ours declares and of the tables in `name_tables.py`.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pentatron.checkpoint.tensor_file import WEIGHT_DTYPES, blocks
from pentatron.config.model import MoEConfig, TransformerConfig
from pentatron.errors import UserError
from pentatron.hf.folder import HuggingFaceFolder
from pentatron.hf.name_tables import NAME_TABLES, NameTable, Row, Source
from pentatron.models.shapes import logical_shapes
from pentatron.parallel.pieces import Shape

_FIRST_PROBLEMS = 5


@dataclass(frozen=True)
class Link:
    """`size` elements of ours from `at` on are those of theirs from `start` on.

    `size` counts in our dimensions. Theirs has a dimension less where a tensor of ours holds all experts; with `transposed`
    its two dimensions are the other way round.
    """

    ours: str
    at: Shape
    theirs: str
    start: Shape
    size: Shape
    transposed: bool = False

    @property
    def their_size(self) -> Shape:
        return self._turned(self.size)

    def part(self, at: Shape, size: Shape) -> tuple[Shape, Shape]:
        """Where in theirs a smaller rectangle of ours is, one within this link: (start, size)."""
        offset = self._turned(tuple(i - j for i, j in zip(at, self.at, strict=True)))
        return tuple(i + j for i, j in zip(self.start, offset, strict=True)), self._turned(size)

    def to_ours(self, values: Tensor, size: Shape) -> Tensor:
        """Values of theirs, as a rectangle of ours of this size."""
        return (values.transpose(0, 1) if self.transposed else values).reshape(size)

    def to_theirs(self, values: Tensor) -> Tensor:
        """A rectangle of ours, as values of theirs."""
        flat = values.reshape(values.shape[values.dim() - len(self.start) :])
        return flat.transpose(0, 1) if self.transposed else flat

    def _turned(self, ours: Shape) -> Shape:
        kept = ours[len(ours) - len(self.start) :]
        return kept[::-1] if self.transposed else kept


@dataclass(frozen=True)
class Run:
    """Some rows: at `ours` in a tensor of ours, at `theirs` in one of theirs."""

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


# Which rows of ours a tensor of theirs is, by the names the tables use.
PARTS: dict[str, Callable[[TransformerConfig, int], list[Run]]] = {
    "all": lambda model, rows: [Run(0, 0, rows)],
    "first half": lambda model, rows: [Run(0, 0, rows // 2)],
    "second half": lambda model, rows: [Run(rows // 2, 0, rows // 2)],
    "queries": _queries,
    "keys": _keys,
    "values": _values,
    "queries, keys, values": _queries_keys_values,
}


def links_of(
    model_type: str, model: TransformerConfig, moe: MoEConfig, names: Collection[str] | None = None
) -> list[Link]:
    """The links of all tensors of a model, in its own order.

    `names` are the keys of a file, which may have one of several forms; without them it is the form to be written.
    """
    table = NAME_TABLES[model_type]
    base = table.base
    if names is not None and not any(name.startswith(base) for name in names):
        base = ""
    links: list[Link] = []
    for ours, shape in logical_shapes(model, moe).items():
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
    raise UserError(f"this family of models has no tensor like {ours}; choose another family")


def _links_of_tensor(
    row: Row,
    ours: str,
    shape: Shape,
    fields: Mapping[str, str],
    model: TransformerConfig,
    names: Collection[str] | None,
) -> Iterator[Link]:
    for source in _form(row, fields, names):
        runs = PARTS[source.part](model, shape[-2] if len(shape) > 1 else shape[0])
        each = "{expert}" in source.name
        for expert in range(shape[0]) if each else (0,):
            theirs = source.name.format(expert=expert, **fields)
            for run in runs:
                yield _link(source, ours, shape, theirs, run, expert if each else None)


def _link(source: Source, ours: str, shape: Shape, theirs: str, run: Run, expert: int | None) -> Link:
    if len(shape) == 1:
        return Link(ours, (run.ours,), theirs, (run.theirs,), (run.count,))
    width = shape[-1]
    if len(shape) == 2:
        start = (0, run.theirs) if source.transposed else (run.theirs, 0)
        return Link(ours, (run.ours, 0), theirs, start, (run.count, width), source.transposed)
    if expert is not None:
        return Link(ours, (expert, run.ours, 0), theirs, (run.theirs, 0), (1, run.count, width))
    return Link(ours, (0, run.ours, 0), theirs, (0, run.theirs, 0), (shape[0], run.count, width))


def _form(row: Row, fields: Mapping[str, str], names: Collection[str] | None) -> tuple[Source, ...]:
    """The first form of which the file has anything; the usual one, if it has nothing of any."""
    for form in row.forms:
        if names is None or form[0].name.format(expert=0, **fields) in names:
            return form
    return row.forms[0]


def their_shapes(links: Collection[Link]) -> dict[str, Shape]:
    """Every tensor of theirs that the links speak of, and how large it must be for them."""
    shapes: dict[str, Shape] = {}
    for link in links:
        end = tuple(i + n for i, n in zip(link.start, link.their_size, strict=True))
        shapes[link.theirs] = tuple(map(max, shapes.get(link.theirs, end), end))
    return shapes


def check_covered(links: Collection[Link], folder: HuggingFaceFolder, model_type: str) -> None:
    """Every key of the folder is accounted for: nothing missing, nothing left over, shapes and types right."""
    table, wanted = NAME_TABLES[model_type], their_shapes(links)
    problems = []
    for name, shape in wanted.items():
        stored = folder.tensors.get(name)
        if stored is None:
            hint = (
                " (set tie_word_embeddings to true if it is the embedding)" if name == table.tied_copy else ""
            )
            problems.append(f"{name} is missing{hint}")
        elif stored.shape != shape:
            problems.append(f"{name} is {list(stored.shape)}, not {list(shape)}")
        elif stored.dtype not in WEIGHT_DTYPES:
            problems.append(f"{name} is of type {stored.dtype}, not one of {', '.join(WEIGHT_DTYPES)}")
    for name in folder.tensors:
        if name in wanted or any(re.fullmatch(pattern, name) for pattern in table.ignored):
            continue
        if name == table.tied_copy:
            problems += _tied_copy_problem(folder, table)
        else:
            problems.append(f"{name} has no place in this model")
    if problems:
        more = len(problems) - _FIRST_PROBLEMS
        listed = "; ".join(problems[:_FIRST_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
        count = "" if len(problems) == 1 else f" ({len(problems)} problems)"
        raise UserError(f"the weights in {folder.path} do not fit its config.json{count}: {listed}")


def _tied_copy_problem(folder: HuggingFaceFolder, table: NameTable) -> list[str]:
    """A tied model has one matrix; some files hold it under both names."""
    names = {table.embedding.format(base=base) for base in (table.base, "")}
    embedding = next((name for name in names if name in folder.tensors), None)
    if embedding is None:
        return []
    head, other = folder.tensors[table.tied_copy], folder.tensors[embedding]
    alike = head.shape == other.shape and head.dtype == other.dtype and head.dtype in WEIGHT_DTYPES
    if alike and all(
        torch.equal(folder.read(table.tied_copy, *block), folder.read(embedding, *block))
        for block in blocks(head.shape, WEIGHT_DTYPES[head.dtype].itemsize)
    ):
        return []
    return [
        f"{table.tied_copy} differs from {embedding}, but config.json says tie_word_embeddings, so one of them is wrong (set "
        f"tie_word_embeddings to false if the model has both)"
    ]

"""Tensors of foreign formats are sliced, joined and transposed only in `checkpoint/links.py`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "pentatron"
ENGINE = PACKAGE / "checkpoint" / "links.py"
# Packages with tables of names, which read and write files.
FORMATS = sorted(path for name in ("hf", "interchange") for path in (PACKAGE / name).rglob("*.py"))

RESHAPES = frozenset(
    """
    cat concat concatenate stack hstack vstack dstack column_stack chunk tensor_split unbind transpose t permute movedim moveaxis
    swapaxes swapdims narrow select index_select reshape view unsqueeze squeeze flatten unflatten as_strided expand_as
    repeat_interleave block_diag einsum
    """.split()
)
TRANSPOSED = frozenset({"T", "mT", "H", "mH"})
OF_RECTANGLES = frozenset({"region", "overlap"})


def breaches(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        where = f"line {getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call) and (name := called(node)) and changes_layout(name, node):
            yield f"{where}: {name}()"
        if isinstance(node, ast.Attribute) and node.attr in TRANSPOSED:
            yield f"{where}: .{node.attr}"
        if isinstance(node, ast.ImportFrom):
            yield from (
                f"{where}: imports {a.name}" for a in node.names if a.name in OF_RECTANGLES | RESHAPES
            )
        if isinstance(node, ast.Subscript) and slices_dimensions(node.slice):
            yield f"{where}: slices several dimensions"


def slices_dimensions(index: ast.expr) -> bool:
    return isinstance(index, ast.Tuple) and any(isinstance(part, ast.Slice) for part in index.elts)


def called(node: ast.Call) -> str:
    return getattr(node.func, "attr", "") or getattr(node.func, "id", "")


def changes_layout(name: str, node: ast.Call) -> bool:
    if name == "view":
        # `view(-1)` only flattens a buffer.
        return [ast.unparse(argument) for argument in node.args] != ["-1"]
    if name == "split":
        # `str.split` takes a string or nothing; `Tensor.split` takes numbers.
        return any(not isinstance(getattr(argument, "value", None), str) for argument in node.args)
    return name in RESHAPES


def test_only_links_slice_and_join_tensors_of_other_layouts() -> None:
    assert len(FORMATS) > 10
    found = {path: list(breaches(path.read_text(encoding="utf-8"))) for path in FORMATS}
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


def makers_of_links(source: str) -> bool:
    nodes = list(ast.walk(ast.parse(source)))
    calls = (node for node in nodes if isinstance(node, ast.Call))
    classes = (node for node in nodes if isinstance(node, ast.ClassDef))
    return any(called(call) == "Link" for call in calls) or any(c.name == "Link" for c in classes)


def test_there_is_one_kind_of_link_and_one_maker() -> None:
    makers = [path for path in PACKAGE.rglob("*.py") if makers_of_links(path.read_text(encoding="utf-8"))]
    assert makers == [ENGINE]
    assert makers_of_links("class Link:\n    pass") and makers_of_links("links.Link('a', 0)"), "control"


@pytest.mark.parametrize(
    "source",
    [
        "torch.cat([a, b])",
        "torch.stack(experts)",
        "gate, up = fused.chunk(2)",
        "q, k, v = qkv.split([4, 2, 2])",
        "weight.transpose(0, 1)",
        "weight.T",
        "weight.view(groups, -1, width)",
        "weight.reshape(shape)",
        "fused[:half, :]",
        "experts[0, 2:4]",
        "from pentatron.parallel.sharding import region",
        "from torch import cat",
    ],
)
def test_tensor_surgery_is_found(source: str) -> None:
    assert list(breaches(source))


@pytest.mark.parametrize(
    "source", ["'a b'.split()", "names.split(',')", "p.data.view(-1)", "row[1:]", "start[:-1]"]
)
def test_other_code_passes(source: str) -> None:
    assert not list(breaches(source))

"""Tests links: rectangles and values converted in both directions, for every form of a name table."""

import random

import pytest
import torch

from pentatron.checkpoint.links import (
    Link,
    NameTable,
    Source,
    TableRow,
    fill,
    reads_ours,
    reads_theirs,
    their_shapes,
)
from pentatron.checkpoint.tensor_file import TensorSpec
from pentatron.errors import UserError
from pentatron.parallel.sharding import Fragment, Shape, region
from pentatron.settings.model import TransformerConfig

MODEL = TransformerConfig(num_attention_heads=4, num_query_groups=2, kv_channels=3)
QKV, EXPERTS = (2 * (2 + 2) * 3, 5), (3, 8, 5)
HALVES = Source("gate", "first half"), Source("up", "second half")
PARTS = tuple(Source(part, part) for part in ("queries", "keys", "values"))
EACH = Source("gate.{expert}", "first half"), Source("up.{expert}", "second half")
STACKED = (
    Source("all.gate.{expert}", "first half", stacked=True),
    Source("all.up.{expert}", "second half", stacked=True),
)
# The form of `layers.1.x.weight`, and its shape.
CASES: dict[str, tuple[tuple[Source, ...], Shape]] = {
    "same": ((Source("x"),), (6, 5)),
    "a vector": ((Source("x"),), (6,)),
    "transposed": ((Source("x", transposed=True),), (6, 5)),
    "a bias beside transposed matrices": ((Source("x", transposed=True),), (6,)),
    "gate and up": (HALVES, (6, 5)),
    "queries, keys, values": (PARTS, QKV),
    "queries, keys, values in one, transposed": (
        (Source("x", "queries, keys, values", transposed=True),),
        QKV,
    ),
    "each expert": (EACH, EXPERTS),
    "all experts in two": (HALVES, EXPERTS),
    "all layers in one": ((Source("x", stacked=True),), EXPERTS),
    "each expert, all layers in one": (STACKED, EXPERTS),
    "all layers in one, transposed": ((Source("x", transposed=True, stacked=True),), (6, 5)),
}


def linked(form: tuple[Source, ...], shape: Shape) -> list[Link]:
    table = NameTable((TableRow("layers.{layer}.x.{kind}", (form,)),), "no {ours}")
    return table.links(MODEL, {"layers.1.x.weight": shape})


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case: str) -> None:
    """Reads random rectangles of either format from the other one."""
    choose, (form, shape) = random.Random(3), CASES[case]
    links = linked(form, shape)
    name, values = links[0].ours, torch.randn(shape)
    sizes = their_shapes(links)
    outlines = {theirs: TensorSpec(torch.float32, size) for theirs, size in sizes.items()}
    theirs_of = reads_theirs(links, lambda _, at, size: region(values, at, size), outlines)
    theirs = {}
    for their, size in sizes.items():
        # Layer 0 belongs to another tensor.
        first = (1, *(0 for _ in size[1:])) if links[0].stacked else (0,) * len(size)
        theirs[their] = torch.full(size, torch.nan)
        own = tuple(n - i for i, n in zip(first, size))
        region(theirs[their], first, own).copy_(theirs_of(their, first, own))
        assert not region(theirs[their], first, own).isnan().any()
    assert sum(int((~tensor.isnan()).sum()) for tensor in theirs.values()) == values.numel()

    def read(their: str, at: Shape, size: Shape) -> torch.Tensor:
        return region(theirs[their], at, size)

    ours_of = reads_ours(links, read, {name: TensorSpec(torch.float32, shape)})
    for _ in range(20):
        at = tuple(choose.randrange(n) for n in shape)
        size = tuple(choose.randint(1, n - i) for n, i in zip(shape, at))
        expected = region(values, at, size)
        assert torch.equal(ours_of(name, at, size), expected)
        target = Fragment(name, shape, at, torch.full(size, torch.nan))
        fill(target, ours_of)
        assert torch.equal(target.values, expected)
        for link in links:
            if (common := link.shared_with_ours(at, size)) is not None:
                assert link.our_rectangle(*link.their_rectangle(*common)) == common
                assert link.shared_with_theirs(*link.their_rectangle(*common)) == link.their_rectangle(
                    *common
                )


def test_a_part_of_a_link_is_where_the_whole_puts_it() -> None:
    link = Link("ours", (4, 0), "theirs", (0, 10), (6, 5), transposed=True)
    assert link.their_rectangle((5, 2), (3, 2)) == ((2, 11), (2, 3))
    expert = Link("ours", (3, 8, 0), "theirs", (2, 0), (1, 6, 5))
    assert expert.their_rectangle((3, 9, 1), (1, 2, 3)) == ((3, 1), (2, 3))
    layer = Link("ours", (3, 8, 0), "theirs", (7, 2, 0), (1, 6, 5), stacked=1)
    assert layer.their_rectangle((3, 9, 1), (1, 2, 3)) == ((7, 3, 1), (1, 2, 3))
    values = torch.arange(30.0).view(5, 6)
    assert torch.equal(link.to_theirs(link.to_ours(values, link.size)), values)
    assert link.shared_with_ours((9, 4), (5, 5)) == ((9, 4), (1, 1))


def test_the_form_that_a_file_has_is_linked_and_the_first_one_without_a_file() -> None:
    forms = tuple((Source(name),) for name in ("{base}a.{layer}.{kind}", "{base}b.{layer}.{kind}"))
    table = NameTable((TableRow("layers.{layer}.x.{kind}", forms),), "no {ours}")
    shapes = {"layers.0.x.weight": (2, 2), "layers.1.x.bias": (2,)}
    names = {"model.b.0.weight"}
    assert [link.theirs for link in table.links(MODEL, shapes)] == ["a.0.weight", "a.1.bias"]
    found = table.links(MODEL, shapes, names, "model.")
    assert [link.theirs for link in found] == ["model.b.0.weight", "model.a.1.bias"]
    with pytest.raises(UserError, match=r"^no layers\.0\.y$"):
        table.links(MODEL, {"layers.0.y": (2,)})

"""Tests the tables of Megatron-LM's names: every form of a file holds every element once."""

import math

import pytest
import torch

from pentatron.checkpoint.links import Link, NameTable, TableRow
from pentatron.errors import UserError
from pentatron.interchange.index import (
    TABLES,
    is_stacked,
    read_links,
    tensors_of,
    written_links,
    written_shapes,
)
from pentatron.parallel.sharding import region
from pentatron.settings.run_config import RunConfig
from tests.interchange.on_ranks import OURS
from tests.support import resolved

PADDED = 128


def config_of(family: str) -> RunConfig:
    return resolved(
        f"--vocab-size 100 --seq-length 16 --num-layers 2 --hidden-size 32 --num-attention-heads 4 {OURS[family]}"
    ).config


def require_every_element_once(config: RunConfig, links: dict[str, list[Link]], copies: bool = False) -> None:
    for ours, shape in tensors_of(config.model, config.moe).items():
        by_name: dict[str, list[Link]] = {}
        for link in links[ours]:
            by_name.setdefault(link.theirs if copies else "", []).append(link)
        for of_name in by_name.values():
            counts = torch.zeros(shape)
            for link in of_name:
                region(counts, link.at, link.size).add_(1)
            assert bool((counts == 1).all()), ours


@pytest.mark.parametrize("family", OURS)
def test_written_tensors_are_complete_and_read_back(family: str) -> None:
    config = config_of(family)
    written = written_links(config.model, config.moe)
    require_every_element_once(config, written, copies=True)
    assert is_stacked(config.model, config.moe) == (family != "pattern")
    second = [ours for ours, links in written.items() if len(links) > 1]
    assert second == [
        f"layers.{i}.mlp_norm.weight" for i in {"mixture": (0, 1), "pattern": (1,)}.get(family, ())
    ]
    shapes = written_shapes(written, config.model.num_layers, PADDED)
    assert shapes["embedding.word_embeddings.weight"] == (PADDED, 32)
    elements = sum(math.prod(shape) for shape in tensors_of(config.model, config.moe).values())
    padding = (PADDED - 100) * 32 * (1 + config.model.untie_embeddings_and_output_weights)
    assert sum(map(math.prod, shapes.values())) == elements + padding + 32 * len(second)
    read = read_links(config.model, config.moe, shapes)
    assert read == {ours: links[:1] for ours, links in written.items()}


@pytest.mark.parametrize("family", OURS)
@pytest.mark.parametrize("stacked", [True, False])
def test_every_form_is_read(family: str, stacked: bool) -> None:
    """Reads each row of the tables in each of its forms, under a prefix."""
    config = config_of(family)
    shapes = tensors_of(config.model, config.moe)
    forms = 0
    for row in TABLES[stacked].rows:
        for form in row.forms:
            one = NameTable((TableRow(row.ours, (form,)),), "{ours}")
            own = {}
            for name, shape in shapes.items():
                try:
                    one.links(config.model, {name: shape})
                    own[name] = shape
                except UserError:
                    continue
            if not own:
                continue
            forms += 1
            alone = one.links(config.model, own, base="model.")
            found = read_links(config.model, config.moe, {link.theirs for link in alone}, "model.")
            assert [link for ours in own for link in found[ours]] == alone, row.ours
            require_every_element_once(config, found)
    assert forms > 12

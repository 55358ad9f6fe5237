"""A checkpoint saved in one layout is the same in any other, bit for bit."""

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pentatron.compare.trial import assemble
from tests.harness import run_distributed
from tests.parity.cases import LAYOUTS, ZERO3, Layout
from tests.parity.reshard import (
    Continued,
    Pair,
    load_on_a_rank,
    pairs_with_experts,
    random_pairs,
    save_on_a_rank,
    stale_optimizer_state,
    words_of,
)

TIMEOUT = 180.0
PAIRS = random_pairs(50, saves=10)
# More pairs for `make sweep`: experts over any axes, and saved runs with ZeRO 3.
FURTHER = [*pairs_with_experts(36, saves=12), *random_pairs(14, saves=5, seed=13, first=ZERO3)]
BY_NAME = {layout.name: layout for layout in LAYOUTS}
# Into ZeRO 3, out of it, and from one layout with it to another.
SHARDED = [
    Pair(family, BY_NAME[saved], BY_NAME[loaded])
    for family, saved, loaded in (
        ("qwen2.5", "dp2 zero3", "tp2 sp pp2 virtual2"),
        ("qwen2.5", "pp2 dp2 zero3", "dp2 zero1"),
        ("gpt", "dp2 zero1", "dp4 zero3 hybrid"),
        ("qwen3", "tp2 sp dp2 zero3", "pp2 virtual2 dp2 zero3"),
    )
]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@functools.cache
def saved(family: str, layout: Layout, folder: Path) -> list[Continued]:
    return run_distributed(
        save_on_a_rank,
        layout.ranks,
        timeout=TIMEOUT,
        words=words_of(layout, family),
        folder=place(family, layout, folder),
    )


def place(family: str, layout: Layout, folder: Path) -> Path:
    return folder / f"{family} {layout.name}".replace(" ", "-")


def loaded(pair: Pair, folder: Path) -> list[Continued]:
    return run_distributed(
        load_on_a_rank,
        pair.loaded.ranks,
        timeout=TIMEOUT,
        words=words_of(pair.loaded, pair.family),
        folder=place(pair.family, pair.saved, folder),
    )


def state_of(ranks: list[Continued]) -> dict[str, torch.Tensor]:
    return assemble(fragment for rank in ranks for fragment in rank.state)


def _more_of_the_same(number: int) -> bool:
    """Whether at least two pairs before this one start from the same checkpoint."""
    own = [(pair.family, pair.saved) for pair in PAIRS[: number + 1]]
    return own.count(own[-1]) > 2


@pytest.mark.parametrize(
    "pair",
    [
        *(
            pytest.param(pair, marks=pytest.mark.sweep if _more_of_the_same(number) else ())
            for number, pair in enumerate(PAIRS)
        ),
        *SHARDED,
        *(pytest.param(pair, marks=pytest.mark.sweep) for pair in FURTHER),
    ],
    ids=str,
)
def test_any_layout_loads_what_any_other_saved(pair: Pair, folder: Path) -> None:
    before = saved(pair.family, pair.saved, folder)
    after = loaded(pair, folder)
    expected, found = state_of(before), state_of(after)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for rank in after:
        assert rank.losses == pytest.approx(before[0].losses, rel=1e-5)


@pytest.mark.parametrize("name", ["tp2 sp dp2 zero1", "tp2 sp dp2 zero3"])
def test_resume_in_the_same_layout_is_bitwise_equal(name: str, folder: Path) -> None:
    layout = BY_NAME[name]
    before = saved("qwen3", layout, folder)
    after = loaded(Pair("qwen3", layout, layout), folder)
    assert [rank.losses for rank in after] == [rank.losses for rank in before]


def test_moments_that_were_forgotten_would_be_seen(folder: Path) -> None:
    pair = PAIRS[0]
    expected = state_of(saved(pair.family, pair.saved, folder))
    forgetful = assemble(
        f for rank in saved(pair.family, pair.saved, folder) for f in stale_optimizer_state(rank.state)
    )
    assert any(not torch.equal(forgetful[name], expected[name]) for name in expected)


def test_the_pairs_are_a_hundred_different_ones() -> None:
    assert len({*PAIRS, *FURTHER}) == 100
    assert len({(p.family, p.saved) for p in PAIRS}) == 10 and len({p.loaded for p in PAIRS}) > 20
    met = " ".join(str(pair) for pair in FURTHER)
    for trait in (
        "ep2",
        "ep4",
        "etp2",
        "whole",
        "cp2",
        "zero3",
        "hybrid",
        "zbv",
        "dualpipev",
        "virtual2",
        "tp2",
        "zero2",
    ):
        assert trait in met, trait


@pytest.mark.parametrize(
    ("saved_in", "loaded_in"),
    [("pp2 zbv dp2 zero2 overlap", "tp2 sp pp2 virtual2"), ("tp2 sp dp2 zero1", "pp2 dualpipev dp2 zero1")],
)
def test_a_parameter_of_two_stages_travels_too(saved_in: str, loaded_in: str, folder: Path) -> None:
    by_name = {layout.name: layout for layout in LAYOUTS}
    pair = Pair("qwen2.5", by_name[saved_in], by_name[loaded_in])
    test_any_layout_loads_what_any_other_saved(pair, folder)

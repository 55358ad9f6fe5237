"""Layouts against one process: enough cases for every pair of traits to occur.

`make parity` runs all layouts with all families.
"""

import itertools
from collections.abc import Iterable, Sequence

import pytest

from pentatron.compare.trial import gaps
from tests.parity.bugs import BUGS
from tests.parity.cases import FAMILIES, LAYOUTS, MIXTURES, Layout
from tests.parity.mixtures import MIXTURE_LAYOUTS
from tests.parity.references import BY_NAME, named, reference, spread
from tests.parity.verdicts import disagreements, failures
from tests.support import resolved


def in_turn(layouts: Sequence[Layout], families: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs each layout with one family, in turn, so that every family meets every kind of layout."""
    return [(layout.name, family) for layout, family in zip(layouts, itertools.cycle(families))]


# Pairs that are always included.
FIXED = [
    ("tp4", "qwen3"),
    ("tp2 sp", "gpt"),
    ("pp2", "qwen2.5"),
    ("pp2 dp2 zero1", "gpt"),
    ("cp2", "gpt"),
    ("cp2", "llama"),
    ("pp2 zbv", "gpt"),
    ("pp2 zbv dp2 overlap", "qwen2.5"),
    ("pp2 zbv dp2 zero2 overlap", "gpt"),
    ("pp2 dualpipev dp2 zero1", "qwen2.5"),
    ("tp2 sp pp2 dualpipev dropout", "gpt"),
]


def traits(layout: Layout, family: str) -> set[str]:
    """Returns what a case exercises, read from its resolved configuration."""
    config = resolved(layout.command(family), layout.ranks).config
    grid, parallel = config.grid, config.parallel
    found = {
        "tp": grid.tensor > 1,
        "sp": grid.tensor > 1 and parallel.sequence_parallel,
        parallel.pipeline_schedule: grid.pipeline > 1,
        "dp": grid.data > 1,
        f"cp {parallel.cp_comm_type.replace('_', '')}": grid.context > 1,
        f"zero{parallel.zero_stage}": grid.data * grid.context > 1,
        "uneven": len({len(part.layers) for part in config.stages}) > 1,
        "accumulation": config.accumulation > 1,
        "dropout": config.model.hidden_dropout > 0,
        "scaled loss": bool(config.precision.loss_scale),
        f"{config.memory.recompute_granularity} recompute": bool(config.memory.recompute_granularity),
        f"ep {config.moe.moe_token_dispatcher_type}": grid.expert > 1,
        "etp": config.moe.num_experts is not None and grid.expert_tensor > 1,
        "untied" if config.model.untie_embeddings_and_output_weights else "tied": True,
    }
    return {trait for trait, present in found.items() if present}


def pairs_of(layout: Layout, family: str) -> list[tuple[str, str]]:
    """Returns all pairs of traits; the number of ranks and experts are traits too."""
    found = traits(layout, family) | {f"{layout.ranks} ranks"}
    return list(itertools.combinations(sorted(found | ({"experts"} if family in MIXTURES else set())), 2))


def covering(cases: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Selects cases with few ranks, greedily, that cover every pair of traits of all the cases."""
    pairs = [set(pairs_of(named(*case), case[1])) for case in cases]
    chosen = [number for number, case in enumerate(cases) if case in FIXED]
    missing = set().union(*pairs).difference(*(pairs[number] for number in chosen))
    while missing:
        gains = [len(missing & of_case) / (1 + named(*case).ranks) for of_case, case in zip(pairs, cases)]
        chosen.append(max(range(len(cases)), key=gains.__getitem__))
        missing -= pairs[chosen[-1]]
    return [cases[number] for number in sorted(chosen)]


IN_TURN = in_turn(LAYOUTS, FAMILIES) + in_turn(MIXTURE_LAYOUTS, MIXTURES)
CASES = covering(list(dict.fromkeys(IN_TURN + FIXED)))


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_a_layout_computes_the_same_numbers(layout: str, family: str) -> None:
    """Replicas also stay equal bit for bit."""
    case = named(layout, family)
    ranks = spread(case, family)
    assert failures(gaps(ranks, reference(case, family))) == []
    assert disagreements(ranks) == []


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str) -> None:
    _, family, name = BUGS[bug]
    case = named(name, family)
    assert failures(gaps(spread(case, family, bug), reference(case, family))) != []


def test_replicas_that_drift_would_be_seen() -> None:
    assert disagreements(spread(BY_NAME["dp2 zero1"], "llama", "stale ZeRO shard")) != []


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_rank_whose_words_are_all_padding_cuts_its_buckets_like_its_neighbours(zero: int) -> None:
    """61 words in 2 shards of 64: one tensor rank has padding only.

    Partial gradients are summed by their places in buckets, on which the tensor ranks must agree.
    """
    words = (
        f"--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --zero-stage {zero} "
        f"--virtual-pipeline-model-parallel-size 2 --make-vocab-size-divisible-by 64"
    )
    case = Layout("padding alone", 8 if zero else 4, words)
    ranks = spread(case, "qwen2.5")
    assert failures(gaps(ranks, reference(case, "qwen2.5"))) == []
    assert disagreements(ranks) == []


def test_every_pair_of_traits_is_covered() -> None:
    """At least 25 layouts on 2, 4 and 8 ranks, and every pair of traits that can meet in one case."""
    assert len([layout for layout in LAYOUTS if layout.ranks > 1]) >= 25
    assert {layout.ranks for layout in LAYOUTS} == {1, 2, 4, 8}
    cases = [traits(layout, family) for layout in LAYOUTS for family in FAMILIES]
    cases += [traits(layout, family) for layout in MIXTURE_LAYOUTS for family in MIXTURES]
    exclusive = [
        {"1f1b", "gpipe", "interleaved", "zero-bubble", "zbv", "dualpipev"},
        {"zero0", "zero1", "zero2", "zero3"},
        {"tied", "untied"},
        {"full recompute", "selective recompute"},
        {"cp p2p", "cp allgather", "cp a2a"},
        {"ep alltoall", "ep allgather"},
    ]
    # Refused: torch reduces the gradients of a layer before the second half of its backward.
    exclusive += [{schedule, "zero3"} for schedule in ("zero-bubble", "zbv", "dualpipev")]
    missing = [
        {a, b}
        for a, b in itertools.combinations(sorted(set().union(*cases)), 2)
        if not any({a, b} <= case for case in cases) and not any({a, b} <= group for group in exclusive)
    ]
    assert missing == []


def test_clipping_was_active_and_masks_uneven() -> None:
    for family in FAMILIES:
        seen = reference(BY_NAME["dp2"], family)
        assert min(seen.norms) > 0.5, family
        assert len(set(seen.tokens)) > 1

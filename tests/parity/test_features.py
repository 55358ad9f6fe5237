"""RoPE scaling, windows and single biases, in all axes: compared with one process."""

from collections.abc import Sequence
from typing import Any

import pytest

from pentatron.compare.trial import Trajectory, gaps
from pentatron.nn import attention, context_attention
from pentatron.nn.attention_blocks import Block
from tests.harness import run_distributed
from tests.parity.cases import Layout
from tests.parity.references import SHORT, TIMEOUT, on_one_process, reference, spread
from tests.parity.trajectory import on_a_rank
from tests.parity.verdicts import disagreements, failures

LLAMA3 = "--rope-scaling-type llama3 --rope-scaling-original-max-position-embeddings 8"
YARN = "--rope-scaling-type yarn --rope-scaling-factor 4 --rope-scaling-original-max-position-embeddings 8"
BIASES = "--add-qkv-bias --add-proj-bias --add-mlp-bias"
# Sequences of 16: chunks of 4 on two context ranks, so that windows end inside and beyond them.
WINDOWS = "--num-layers 4 --window-size 5,0 --window-attn-skip-freq [1,0,0,1]"
NARROW = "--window-size 2,0"

TP, PP, CP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--context-parallel-size 2"
SP = "--sequence-parallel"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

LAYOUTS = (
    Layout("tp2 sp", 2, f"{TP} {SP}", both=f"{BIASES} {LLAMA3} {WINDOWS}", micro_batch=4),
    Layout("pp2", 2, PP, both=f"{WINDOWS} {YARN}", micro_batch=4),
    Layout("cp2 p2p full", 2, f"{CP} {FULL}", both=f"{WINDOWS} {YARN}", micro_batch=8),
    Layout(
        "tp2 cp2 allgather", 4, f"{TP} {CP} --cp-comm-type all_gather", both=f"{NARROW} {BIASES} {LLAMA3}"
    ),
    Layout("pp2 cp2 a2a", 4, f"{PP} {CP} --cp-comm-type a2a", both=f"{NARROW} {BIASES} {YARN}"),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_layout_computes_the_same_numbers(layout: Layout) -> None:
    ranks = spread(layout, "llama")
    assert failures(gaps(ranks, reference(layout, "llama"))) == []
    assert disagreements(ranks) == []


def counted_in_the_stage() -> None:
    """Layers with windows are numbered within the stage, not within the model."""
    right = attention.window_of_layer

    def wrong(size: Sequence[int], skip: str | None, layers: int, number: int) -> int | None:
        return right(size, skip, layers, (number - 1) % 2 + 1)

    attention.window_of_layer = wrong


def own_chunk_alone() -> None:
    """A window ends at the boundary of a sequence chunk."""
    right = context_attention.chunk_blocks

    def wrong(*given: Any) -> list[Block]:
        return [block for block in right(*given) if block.causal]

    context_attention.chunk_blocks = wrong


MISTAKES = {mistake.__name__: mistake for mistake in (counted_in_the_stage, own_chunk_alone)}


def with_a_mistake(words: str, mistake: str) -> Trajectory:
    MISTAKES[mistake]()
    return on_a_rank(words)


@pytest.mark.parametrize(
    ("mistake", "name"), [("counted_in_the_stage", "pp2"), ("own_chunk_alone", "cp2 p2p full")]
)
def test_mistakes_are_caught(mistake: str, name: str) -> None:
    (layout,) = (layout for layout in LAYOUTS if layout.name == name)
    words = f"{layout.command('llama')} {SHORT}"
    ranks = run_distributed(with_a_mistake, layout.ranks, timeout=TIMEOUT, words=words, mistake=mistake)
    assert failures(gaps(ranks, reference(layout, "llama"))) != []


@pytest.mark.parametrize("feature", [LLAMA3, YARN, WINDOWS, NARROW])
def test_a_feature_that_is_left_out_is_seen(feature: str) -> None:
    plain = Layout("", 1, "")
    with_it = Layout("", 1, "", both=feature)
    expected = on_one_process(f"{with_it.alone('llama')} {SHORT}")
    assert failures(gaps([reference(plain, "llama")], expected)) != []

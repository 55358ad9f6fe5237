"""Tests ranks, stages and schedules of a configuration."""

import pytest

from pentatron.layout.check import check
from pentatron.settings.model_sizes import costs_of
from pentatron.settings.run_config import RunConfig
from tests.support import resolved


def config(words: str, world: int) -> RunConfig:
    return resolved(words, world).config


def layers(found: RunConfig) -> list[int]:
    return [len(part.layers) for part in found.stages]


def test_grid() -> None:
    grid = config("--tp_size 4 --pp_size 2 --num-query-groups 2", 16).grid
    assert (grid.tensor, grid.pipeline, grid.data, grid.context) == (4, 2, 2, 1)
    assert grid.kv_copies == 2 and grid.expert_data == 8
    assert config("--tp_size 4 --num-query-groups 1", 4).grid.kv_copies == 4
    assert config("--tp_size 2 --num-query-groups 2", 2).grid.kv_copies == 1
    assert config("--tp_size 2 --num-query-groups 4", 2).grid.kv_copies == 1


def test_costs_are_the_multiplications_of_a_token() -> None:
    """Costs of hidden size 32, 4 heads of 8, 2 query groups, MLP 40, 16 tokens, 128 vocabulary rows."""
    words = "--num-query-groups 2 --ffn-hidden-size 40"
    plain = costs_of(config(words, 1).settings)
    attention = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 16 * 32
    assert (plain.layer, plain.embedding, plain.head) == (attention + 2 * 32 * 40, 0, 32 * 128)
    gated = costs_of(config(f"{words} --swiglu", 1).settings)
    assert gated.layer - plain.layer == 32 * 40


def test_a_large_vocabulary_takes_layers_from_the_last_stage() -> None:
    assert layers(config("--num-layers 8 --pp_size 2", 2)) == [4, 4]
    assert layers(config("--num-layers 8 --pp_size 2 --vocab-size 1000", 2)) == [5, 3]
    assert layers(config("--num-layers 8 --pp_size 2 --vocab-size 1000 --seq-length 4096", 2)) == [4, 4]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --num-layers 6",
            [1, 2, 2, 1],
        ),
        ("--account-for-embedding-in-pipeline-split --num-layers 7", [1, 2, 2, 2]),
        (
            "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1 --num-layers 8",
            [1, 3, 3, 1],
        ),
        ("--decoder-last-pipeline-num-layers 2 --num-layers 8", [2, 2, 2, 2]),
        ("--pipeline-model-parallel-layout E|ttt|tt|L --num-layers 5", [0, 3, 2, 0]),
        ("--num-layers-per-virtual-pipeline-stage 2 --num-layers 8 --vocab-size 9999", [2, 2, 2, 2]),
    ],
)
def test_the_users_division_counts(words: str, expected: list[int]) -> None:
    found = config(f"--pp_size 4 {words}", 4)
    assert layers(found) == expected
    assert found.stages[0].embedding and found.stages[-1].head


def test_wishes_about_the_ends_mean_nothing_to_one_stage() -> None:
    found = config("--decoder-first-pipeline-num-layers 1 --account-for-loss-in-pipeline-split", 1)
    assert layers(found) == [2]


def test_placement_and_schedule() -> None:
    found = config(
        "--pp_size 2 --num-layers 4 --virtual-pipeline-model-parallel-size 2 --micro-batch-size 1", 2
    )
    assert found.placement.rank_of == (0, 1, 0, 1)
    assert found.virtual_stages == 2
    assert check(found.schedule(8)).in_flight == (5, 3)
    assert check(found.forward_schedule(3)).in_flight == (0, 0)


def test_a_group_of_micro_batches_reaches_the_schedule() -> None:
    words = "--pp_size 2 --num-layers 4 --virtual-pipeline-model-parallel-size 2 --micro-batch-size 1"
    found = config(f"{words} --microbatch-group-size-per-virtual-pipeline-stage 4", 2)
    assert check(found.schedule(8)).in_flight == (7, 5)
    assert check(found.schedule(3)).in_flight == (6, 4), "a shorter step has no more than three"


@pytest.mark.parametrize("kind", ["1f1b", "gpipe", "interleaved", "zero-bubble", "zbv", "dualpipev"])
def test_one_rank_runs_one_micro_batch_after_the_other(kind: str) -> None:
    actions = config(f"--pipeline-schedule {kind}", 1).schedule(3).actions
    assert " ".join(map(str, actions[0])) == "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 R0"


@pytest.mark.parametrize(
    ("kind", "in_flight"), [("1f1b", (2, 1)), ("gpipe", (4, 4)), ("zero-bubble", (2, 2))]
)
def test_the_schedule_that_was_asked_for_runs(kind: str, in_flight: tuple[int, int]) -> None:
    assert check(config(f"--pp_size 2 --pipeline-schedule {kind}", 2).schedule(4)).in_flight == in_flight


FOLDED = "--pp_size 2 --num-layers 8 --micro-batch-size 1 --untie-embeddings-and-output-weights --pipeline-schedule"


@pytest.mark.parametrize(("kind", "in_flight"), [("zbv", (4, 4)), ("dualpipev", (5, 5))])
def test_a_folded_pipeline(kind: str, in_flight: tuple[int, int]) -> None:
    found = config(f"{FOLDED} {kind}", 2)
    assert found.placement.rank_of == (0, 1, 1, 0) and found.virtual_stages == 2
    assert found.defers_weight_gradients and not config("--pp_size 2", 2).defers_weight_gradients
    assert check(found.schedule(8)).in_flight == in_flight
    assert check(found.forward_schedule(3)).in_flight == (0, 0)


def test_layers_of_the_first_rank_of_a_folded_pipeline() -> None:
    """A folded pipeline gives rank 0 the first and last stage, an interleaved one the first and third."""
    assert layers(config(f"{FOLDED} zbv --decoder-first-pipeline-num-layers 2", 2)) == [1, 3, 3, 1]
    dealt = "--pipeline-schedule zero-bubble --virtual-pipeline-model-parallel-size 2"
    words = f"--pp_size 2 --num-layers 8 --micro-batch-size 1 --decoder-first-pipeline-num-layers 2 {dealt}"
    assert layers(config(words, 2)) == [1, 3, 1, 3]


def test_zero_bubble_with_virtual_stages_takes_groups() -> None:
    words = "--pp_size 2 --num-layers 4 --virtual-pipeline-model-parallel-size 2 --micro-batch-size 1"
    words += " --pipeline-schedule zero-bubble --microbatch-group-size-per-virtual-pipeline-stage"
    assert check(config(f"{words} 4", 2).schedule(8)).in_flight == (7, 7)
    assert check(config(f"{words} 2", 2).schedule(8)).in_flight == (5, 5)

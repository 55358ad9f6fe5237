"""Compares planned bytes with real steps and with the parameters of models."""

import dataclasses

import pytest
import torch

from pentatron.plan.memory import memory_of
from pentatron.plan.sizes import PlanSizes
from pentatron.plan.static_memory import total_parameters
from pentatron.settings.presets import presets
from tests.plan.cases import CASES, Case, Row, compared
from tests.support import LLAMA, resolved

# A subset of `make plan-check` that covers most formulas.
QUICK = (
    "recompute core_attn",
    "DP 2, ZeRO 2, overlap",
    "TP 2, SP",
    "PP 2, VPP 2",
    "EP 2, Mixtral",
)


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def worst(rows: list[Row]) -> Row:
    return max(rows, key=lambda row: abs(row.gap))


@pytest.mark.parametrize("name", QUICK)
def test_bytes_are_those_of_a_real_step(name: str) -> None:
    rows = list(compared(named(name)))
    assert abs(worst(rows).gap) < 0.05, worst(rows)
    exact = [row for row in rows if row.what != "activations"]
    assert abs(worst(exact).gap) < 0.001, worst(exact)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name not in QUICK], ids=lambda case: case.name
)
def test_bytes_are_those_of_a_real_step_in_every_layout(case: Case) -> None:
    rows = list(compared(case))
    assert abs(worst(rows).gap) < 0.05, worst(rows)


def test_a_wrong_plan_would_be_seen() -> None:
    """The formulas distinguish full recompute from recompute of core_attn."""
    with_it, without = (
        memory_of(resolved(f"{named('recompute core_attn').command} {words}").config).largest.activations
        for words in ("", "--recompute-granularity full")
    )
    assert with_it > 1.05 * without


def test_there_are_twenty_layouts() -> None:
    assert len(CASES) >= 20
    assert len({case.name for case in CASES}) == len(CASES)
    text = " ".join(case.command for case in CASES)
    for flag in (
        *("--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--context-parallel-size 2"),
        *(
            "--virtual-pipeline-model-parallel-size 2",
            "--expert-model-parallel-size 2",
            "--sequence-parallel",
        ),
        *("--zero-stage 1", "--zero-stage 2", "--zero-stage 3", "--optimizer-cpu-offload", "--bf16"),
        *(
            "--recompute-granularity selective",
            "--recompute-granularity full",
            "--decoder-first-pipeline-num-layers",
        ),
    ):
        assert flag in text


@pytest.mark.parametrize(
    ("preset", "billions", "active"),
    [
        ("qwen2.5-7b", 7.616, 7.616),
        ("qwen3-8b", 8.191, 8.191),
        ("llama3-8b", 8.030, 8.030),
        ("gpt3-175b", 174.6, 174.6),
        ("mixtral-8x7b", 46.7, 12.9),
        ("qwen3-30b-a3b", 30.5, 3.35),
        ("qwen3-235b-a22b", 235.1, 22.2),
    ],
)
def test_parameters_are_the_published_numbers(preset: str, billions: float, active: float) -> None:
    words = f"--preset {preset} --hidden-dropout 0 --attention-dropout 0"
    found = total_parameters(PlanSizes(_of_preset(words)))
    assert found[0] / 1e9 == pytest.approx(billions, rel=2e-3)
    assert found[1] / 1e9 == pytest.approx(active, rel=2e-2)


def _of_preset(words: str):  # type: ignore[no-untyped-def]
    from pentatron.settings.entry_points import LAYOUT
    from pentatron.settings.resolve import gather, resolve
    from pentatron.settings.settings import ProcessFacts

    return resolve(gather(words.split(), LAYOUT), ProcessFacts(1), refuse_unimplemented=False).config


def test_parameters_of_a_whole_model_are_those_that_are_built() -> None:
    from pentatron.models.causal_lm import build_model

    words = f"{LLAMA} --qk-layernorm --num-experts 4 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 40"
    config = resolved(f"{words} --moe-shared-expert-gate --add-qkv-bias --vocab-size 128").config
    model = build_model(config.model, 1, torch.device("cpu"), moe=config.moe)
    assert total_parameters(PlanSizes(config))[0] == sum(p.numel() for p in model.parameters())


def test_expert_parallelism_lowers_the_memory_of_a_gpu() -> None:
    words = f"{LLAMA} --num-experts 8 --moe-ffn-hidden-size 512 --micro-batch-size 1"
    totals = []
    for size in (1, 2, 4, 8):
        config = resolved(f"{words} --expert-model-parallel-size {size}", 8).config
        totals.append(memory_of(config).largest)
    weights = [rank.static.weights for rank in totals]
    assert weights == sorted(weights, reverse=True) and weights[0] > 4 * weights[3]
    assert totals[0].total > 3 * totals[3].total


def test_every_preset_can_be_planned() -> None:
    for preset in presets():
        config = _of_preset(
            f"--preset {preset} --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1"
        )
        assert memory_of(config).largest.total > 0, preset


def test_a_micro_batch_twice_as_large_leaves_twice_as_much() -> None:
    one, two = (
        memory_of(resolved(f"{LLAMA} --micro-batch-size {size} --global-batch-size 8").config).largest
        for size in (1, 2)
    )
    assert dataclasses.asdict(one.static) == dataclasses.asdict(two.static)
    assert two.activations == 2 * one.activations and two.logits == 2 * one.logits

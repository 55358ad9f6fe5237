"""Compares learning rate and weight decay with formulas and Megatron, also in a batch ramp-up."""

import math
from types import SimpleNamespace

import pytest
import torch

from pentatron.optim.lr_schedules import (
    LearningRate,
    WeightDecay,
    get_cosine_schedule_with_warmup,
    learning_rate,
    weight_decay,
)
from tests.support import resolved

SHAPES = [
    ("constant", "exponential"),
    ("linear", "exponential"),
    ("cosine", "exponential"),
    ("inverse-square-root", "exponential"),
    *(("WSD", shape) for shape in ("exponential", "linear", "cosine", "minus_sqrt")),
]


def rate(
    style: str, wsd: str = "exponential", warmup: float = 100, decay: float = 1000, init: float = 0.0
) -> LearningRate:
    return LearningRate(style, 1.0, 0.1, warmup, decay, init, wsd_style=wsd, wsd_samples=200)


@pytest.mark.parametrize(("style", "wsd"), SHAPES)
def test_warm_up_is_linear(style: str, wsd: str) -> None:
    assert [rate(style, wsd)(s) for s in (0, 25, 50, 100)] == [0, 0.25, 0.5, 1.0]
    assert [rate(style, wsd, init=0.5)(s) for s in (0, 25, 50, 100)] == [0.5, 0.625, 0.75, 1.0]


def test_decay_follows_the_formulas() -> None:
    progress = (400 - 100) / (1000 - 100)
    assert rate("constant")(400) == 1.0
    assert rate("linear")(400) == pytest.approx(0.1 + (1 - progress) * 0.9)
    assert rate("cosine")(400) == pytest.approx(0.1 + 0.5 * (math.cos(math.pi * progress) + 1) * 0.9)
    assert rate("inverse-square-root")(400) == pytest.approx(math.sqrt(100) / math.sqrt(400))
    late = (850 - 800) / 200
    shapes = {
        "exponential": 2 * 0.5**late - 1,
        "linear": 1 - late,
        "cosine": 0.5 * (math.cos(math.pi * late) + 1),
        "minus_sqrt": 1 - math.sqrt(late),
    }
    for shape, share in shapes.items():
        assert rate("WSD", shape)(400) == rate("WSD", shape)(800) == 1.0
        assert rate("WSD", shape)(850) == pytest.approx(0.1 + share * 0.9)
        assert rate("WSD", shape)(1000) == pytest.approx(0.1)


@pytest.mark.parametrize("warmup", [0, 100, 37.5])
@pytest.mark.parametrize(("style", "wsd"), SHAPES)
def test_rates_are_megatrons(style: str, wsd: str, warmup: float) -> None:
    judge = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    group = {"lr": 0.0, "weight_decay": 0.0}
    for increase in ("constant", "linear", "cosine"):
        ends = (0.3, 0.3) if increase == "constant" else (0.1, 0.3)
        theirs = judge.OptimizerParamScheduler(
            SimpleNamespace(param_groups=[group]), 0.02, 1.0, 0.1, warmup, 1000, style, *ends, 900, increase,
            wsd_decay_steps=200, lr_wsd_decay_style=wsd,
        )  # fmt: skip
        ours = rate(style, wsd, warmup, init=0.02)
        decay = WeightDecay(increase, *ends, samples=900)
        for samples in range(0, 1105, 13):
            assert ours(samples) == pytest.approx(group["lr"], rel=1e-12)
            assert decay(samples) == pytest.approx(group["weight_decay"], rel=1e-12)
            theirs.step(13)


@pytest.mark.parametrize("style", ["linear", "cosine", "WSD"])
def test_after_the_decay_the_floor_stays(style: str) -> None:
    assert rate(style)(1000) == pytest.approx(0.1)
    assert rate(style)(5000) == 0.1


def test_no_warm_up_starts_at_the_peak() -> None:
    assert rate("cosine", warmup=0)(0) == 1.0


def test_steps_are_counted_in_samples() -> None:
    made = learning_rate(
        resolved("--lr 2 --lr-warmup-iters 10 --lr-decay-iters 50 --lr-decay-style linear").config
    )
    assert made(5 * 8) == 1.0 and made(10 * 8) == 2.0 and made(30 * 8) == pytest.approx(1.0)


RAMP = "--global-batch-size 8 --rampup-batch-size 2 2 40 --lr 1 --lr-decay-style WSD"


def test_under_a_ramp_steps_are_the_steps_there_are() -> None:
    """Warm-up and decay count the actual steps of a ramp-up, not batches of full size.

    A warm-up of 5 steps ends before the sixth, a decay of the last 4 steps takes the last 4.
    """
    config = resolved(
        f"{RAMP} --train-iters 20 --lr-warmup-iters 5 --lr-decay-iters 18 --lr-wsd-decay-iters 4"
    ).config
    made, plan = learning_rate(config), config.batch_plan
    rates = [made(plan.samples_after(step)) for step in range(20)]
    assert rates[5] == 1.0 and all(r < 1.0 for r in rates[:5])
    assert rates[14] == 1.0 and all(r < 1.0 for r in rates[15:]) and rates[18] == rates[19] == 0.0
    assert made.warmup_samples == 10 < 5 * 8, "the steps of the warm-up are the small ones"


def test_samples_and_shares() -> None:
    words = f"{RAMP} --train-iters 20 --lr-decay-samples 90 --lr-wsd-decay-samples 30"
    made = learning_rate(resolved(f"{words} --lr-warmup-fraction 0.25").config)
    assert (made.warmup_samples, made.decay_samples, made.wsd_samples) == (22.5, 90, 30)
    assert learning_rate(resolved(f"{words} --lr-warmup-samples 7").config).warmup_samples == 7


def test_weight_decay_grows_over_the_run() -> None:
    words = "--weight-decay 0.1 --end-weight-decay 0.3 --weight-decay-incr-style linear --train-iters 10"
    made = weight_decay(resolved(words).config)
    assert [made(s) for s in (0, 40, 80, 90)] == [0.1, pytest.approx(0.2), pytest.approx(0.3), 0.3]


def test_the_guides_cosine_schedule_is_that_of_transformers() -> None:
    theirs = pytest.importorskip("transformers").get_cosine_schedule_with_warmup

    def rates(make) -> list[float]:  # type: ignore[no-untyped-def]
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        scheduler = make(optimizer, num_warmup_steps=4, num_training_steps=12)
        found = []
        for _ in range(14):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    ours = rates(get_cosine_schedule_with_warmup)
    assert ours[:13] == pytest.approx(rates(theirs)[:13]) and ours[:5] == [0.0, 0.125, 0.25, 0.375, 0.5]
    assert ours[12] == ours[13] == 0.0, "where theirs goes up the cosine again"

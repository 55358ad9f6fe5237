import math

import pytest

from pentatron.optim.schedule import LearningRate, learning_rate
from tests.support import resolved


def rate(style: str, warmup: float = 100, decay: float = 1000) -> LearningRate:
    return LearningRate(style, peak=1.0, floor=0.1, warmup_samples=warmup, decay_samples=decay)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root"])
def test_warm_up_is_linear_from_zero(style: str) -> None:
    assert [rate(style)(s) for s in (0, 25, 50, 100)] == [0, 0.25, 0.5, 1.0]


def test_decay_follows_the_formulas() -> None:
    progress = (400 - 100) / (1000 - 100)
    assert rate("constant")(400) == 1.0
    assert rate("linear")(400) == pytest.approx(0.1 + (1 - progress) * 0.9)
    assert rate("cosine")(400) == pytest.approx(0.1 + 0.5 * (math.cos(math.pi * progress) + 1) * 0.9)
    assert rate("inverse-square-root")(400) == pytest.approx(math.sqrt(100) / math.sqrt(400))


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_after_the_decay_the_floor_stays(style: str) -> None:
    assert rate(style)(1000) == pytest.approx(0.1)
    assert rate(style)(5000) == 0.1


def test_no_warm_up_starts_at_the_peak() -> None:
    assert rate("cosine", warmup=0)(0) == 1.0


def test_steps_are_counted_in_samples() -> None:
    config = resolved("--lr 2 --lr-warmup-iters 10 --lr-decay-iters 50 --lr-decay-style linear").config.optim
    made = learning_rate(config, global_batch_size=8)
    assert made(5 * 8) == 1.0 and made(10 * 8) == 2.0 and made(30 * 8) == pytest.approx(1.0)

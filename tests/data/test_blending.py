"""Tests blending against published vectors and sequential draws, and blends that exceed a dataset."""

import random
import time

import numpy as np
import pytest

from pentatron.data.blending import (
    BlendedDataset,
    BlendMember,
    SampleRecipe,
    build_blend,
    exhaustive_order,
    greedy_order,
    normalize_weights,
    positions_in_datasets,
    samples_per_dataset,
)
from pentatron.data.gpt_dataset import CountingSequences

RECIPE = SampleRecipe(8, 1234)


def one_at_a_time(weights: list[float], size: int) -> list[int]:
    used, order = [0] * len(weights), []
    for i in range(size):
        errors = [weight * max(i, 1) - count for weight, count in zip(weights, used, strict=True)]
        order.append(errors.index(max(errors)))
        used[order[-1]] += 1
    return order


def test_golden_blend() -> None:
    order = greedy_order([0.7, 0.2, 0.1], 12)
    assert order.tolist() == [0, 1, 0, 2, 0, 0, 1, 0, 0, 0, 0, 1]
    assert positions_in_datasets(order, 3).tolist() == [0, 0, 1, 0, 2, 3, 1, 4, 5, 6, 7, 2]
    assert samples_per_dataset(100, [0.7, 0.2, 0.1], 0.005) == [71, 21, 11]


def test_golden_exhaustive_blend() -> None:
    order = exhaustive_order([4, 2, 1])
    assert order.tolist() == [0, 1, 2, 0, 0, 1, 0]
    assert positions_in_datasets(order, 3).tolist() == [0, 0, 0, 1, 2, 1, 3]


@pytest.mark.parametrize("power", [0, 1, 8])
def test_stretches_side_by_side_are_the_draws_one_at_a_time(power: int) -> None:
    """Equal weights are ties at every draw; the eighth power makes some datasets rare."""
    draw = random.Random(power)
    for _ in range(6):
        weights = normalize_weights([draw.random() ** power + 1e-6 for _ in range(draw.randint(1, 9))])
        size = draw.randint(2000, 12_000)
        assert greedy_order(weights, size).tolist() == one_at_a_time(weights, size), weights


def test_a_million_draws_are_quick() -> None:
    begin = time.process_time()
    order = greedy_order([0.5, 0.3, 0.15, 0.05], 1_000_000)
    assert time.process_time() - begin < 5
    assert np.bincount(order).tolist() == [500_000, 300_000, 150_000, 50_000]


def test_many_datasets_cost_no_more_than_few() -> None:
    draw, size = np.random.default_rng(1), 1_000_000
    seconds = []
    for datasets in (2, 3000):
        order = draw.integers(0, datasets, size).astype(np.int16)
        begin = time.process_time()
        places = positions_in_datasets(order, datasets)
        seconds.append(time.process_time() - begin)
        for number in (0, datasets - 1):
            assert (places[order == number] == np.arange((order == number).sum())).all()
    assert seconds[1] < 10 * seconds[0]


def test_exhaustive_orders_give_everything_once() -> None:
    draw = random.Random(5)
    for _ in range(50):
        sizes = [draw.randint(1, 60) for _ in range(draw.randint(1, 6))]
        assert np.bincount(exhaustive_order(sizes)).tolist() == sizes


def member(*lengths: int) -> BlendMember:
    source = CountingSequences(np.array(lengths, dtype=np.int32), 1000, eod=999)
    return BlendMember(source, range(len(lengths)))


def tokens(dataset: object, stop: int) -> list[list[int]]:
    return [dataset[i]["tokens"].tolist() for i in range(stop)]  # type: ignore[index]


def test_a_blend_gives_each_dataset_its_share() -> None:
    blend = build_blend([member(50, 70), member(33, 41, 90)], [3, 1], [40], RECIPE)
    assert isinstance(blend, BlendedDataset)
    assert len(blend) == 40 and np.bincount(blend.origins(np.arange(40))).tolist() == [30, 10]
    alone = RECIPE.build(member(50, 70), 31)
    assert [blend[i]["tokens"].tolist() for i in range(40) if blend.order[i] == 0] == tokens(alone, 30)


def test_dataset_drawn_beyond_its_share_starts_another_epoch() -> None:
    """With extreme weights the order may draw one sample more than the share of a dataset."""
    blend = build_blend([member(9), member(9)], [1, 1], [1], SampleRecipe(8, 1, surplus=0.0))
    assert len(blend) == 2
    many = build_blend([member(17), member(17)], None, [50], RECIPE)
    assert isinstance(many, BlendedDataset)
    assert len(many) == 50 and [len(dataset) for dataset in many.datasets] >= [25, 25]
    assert len(tokens(many, 50)) == 50


@pytest.mark.parametrize("weights", [None, [0.6, 0.3, 0.1]])
@pytest.mark.parametrize("members", [1, 3])
def test_a_longer_run_keeps_the_order_and_appends(weights: list[float] | None, members: int) -> None:
    """Extends an order once and twice; the earlier samples stay the same."""
    named = [member(60, 31, 8), member(25, 26), member(90)][:members]
    weights = weights[:members] if weights else None
    short = build_blend(named, weights, [20], RECIPE)
    longer = build_blend(named, weights, [20, 70], RECIPE)
    longest = build_blend(named, weights, [20, 70, 200], RECIPE)
    assert tokens(longer, 20) == tokens(short, 20)
    # The orders agree up to the length of the shorter one, which exceeds the requested number.
    assert tokens(longest, len(longer)) == tokens(longer, len(longer))
    assert len(longest) >= 200
    # Extending matters: an order built for the larger number differs.
    if weights or members == 1:
        assert tokens(build_blend(named, weights, [200], RECIPE), 20) != tokens(short, 20)


def test_appended_epochs_are_complete_and_shuffled_anew() -> None:
    lengths = [11] * 40
    # An epoch has 439 samples of one token.
    recipe = SampleRecipe(1, 7)
    dataset = recipe.build(member(*lengths), 439, [878])
    first, second = (sorted(t[0] for t in tokens(dataset, 878)[half : half + 439]) for half in (0, 439))
    assert first == second
    assert tokens(dataset, 439) != tokens(dataset, 878)[439:]

"""Tests both sets of loss scale defaults (conflict C17) and their names in guides and Megatron."""

import pytest

from pentatron.optim.loss_scale import LossScaler
from pentatron.settings.entry_points import (
    EXAMPLE,
    MEGATRON,
    PARALLEL_3D,
    PRETRAIN_GPT,
    STANDARD,
    TRAIN,
    EntryPoint,
)
from pentatron.settings.resolve import gather, resolve
from pentatron.settings.settings import ProcessFacts
from tests.settings.builders import LEAST, problems, values

NAMES = ("initial_loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale")
FACTORS = ("loss_scale_growth_factor", "loss_scale_backoff_factor")


def chosen(entry: EntryPoint, words: str = "") -> list[float]:
    config = resolve(gather([*LEAST.split(), "--fp16", *words.split()], entry), ProcessFacts(1)).config
    assert LossScaler(config.precision).is_dynamic
    return [getattr(config.precision, name) for name in (*NAMES, *FACTORS)]


def test_programs_of_the_3d_project_have_the_defaults_of_torchs_scaler_and_others_megatrons() -> None:
    for entry in (STANDARD, PARALLEL_3D, MEGATRON):
        assert chosen(entry) == [2**16, 2000, 1, 0, 2, 0.5], entry.name
    for entry in (TRAIN, PRETRAIN_GPT, EXAMPLE):
        assert chosen(entry) == [2**32, 1000, 2, 1, 2, 0.5], entry.name


def test_megatrons_flags_and_the_names_of_torchs_scaler() -> None:
    megatrons = "--initial-loss-scale 4096 --loss-scale-window 500 --hysteresis 3 --min-loss-scale 8"
    assert chosen(STANDARD, megatrons) == [4096, 500, 3, 8, 2, 0.5]
    torchs = "--init_scale 65536 --growth_interval 2000 --growth_factor 2.0 --backoff_factor 0.5"
    assert chosen(PRETRAIN_GPT, f"{torchs} --hysteresis 1") == [2**16, 2000, 1, 1, 2, 0.5]


def test_a_fixed_scale_is_for_every_precision() -> None:
    for words in ("--loss-scale 128", "--bf16 --loss-scale 128", "--fp16 --loss-scale 128"):
        assert values(words)["loss_scale"] == 128, words


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--loss-scale -1", "--loss-scale -1.0 must be 0 or more"),
        ("--fp16 --growth-factor 1", "--loss-scale-growth-factor 1.0 must be more than 1"),
        ("--fp16 --backoff-factor 1", "--loss-scale-backoff-factor 1.0 must be more than 0 and below 1"),
        ("--fp16 --hysteresis 0", "--hysteresis 0 must be more than 0"),
        ("--optimizer sgd --sgd-momentum 1", "--sgd-momentum 1.0 must be at least 0 and below 1"),
        ("--optimizer lion", "--optimizer must be one of adam, sgd, not 'lion'"),
    ],
)
def test_invalid_precision_settings_are_refused(words: str, sentence: str) -> None:
    assert problems(words) == [sentence]

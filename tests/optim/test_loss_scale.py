"""Compares the loss scale with Megatron's and torch's after every overflow."""

import importlib.util
import json
import random
from typing import Any

import pytest
import torch
from torch import nn

from pentatron.optim.loss_scale import LossScaler
from pentatron.settings.entry_points import GRAD_SCALER
from pentatron.settings.parallel import PrecisionConfig

MEGATRON = PrecisionConfig(fp16=True, loss_scale_window=4)
TORCH = PrecisionConfig(fp16=True, **{**GRAD_SCALER, "loss_scale_window": 3})


def overflows(count: int, share: float) -> list[bool]:
    draw = random.Random(f"{count} {share}")
    return [draw.random() < share for _ in range(count)]


def megatrons(config: PrecisionConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports Megatron's file alone, because its package takes seconds to import."""
    pytest.importorskip("megatron")
    package = importlib.util.find_spec("megatron.core")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs megatron-core")
    file = f"{package.submodule_search_locations[0]}/optimizer/grad_scaler.py"
    spec = importlib.util.spec_from_file_location("grad_scaler", file)
    assert spec is not None and spec.loader is not None
    scalers: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scalers)
    tensor = torch.tensor

    def on_the_cpu(*values: Any, device: str, **more: Any) -> torch.Tensor:
        return tensor(*values, **more)

    monkeypatch.setattr(scalers.torch, "tensor", on_the_cpu)
    oracle = scalers.DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=config.loss_scale_growth_factor,
        backoff_factor=config.loss_scale_backoff_factor,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )
    monkeypatch.undo()
    return oracle


@pytest.mark.parametrize(
    "config",
    [
        MEGATRON,
        PrecisionConfig(fp16=True, initial_loss_scale=16.0, loss_scale_window=2, hysteresis=3),
        PrecisionConfig(fp16=True, loss_scale_growth_factor=1.7, loss_scale_backoff_factor=0.3),
    ],
    ids=["as usual", "near the floor", "other factors"],
)
@pytest.mark.parametrize("share", [0.05, 0.3, 0.8])
def test_the_scale_is_megatrons(
    config: PrecisionConfig, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle, scaler = megatrons(config, monkeypatch), LossScaler(config)
    seen = set()
    for overflow in overflows(120, share):
        oracle.update(overflow)
        scaler.update(updated=not overflow)
        assert scaler.scale == oracle.scale.item()
        seen.add(scaler.scale)
    assert len(seen) > 2


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_the_scale_of_the_3d_project_is_torchs(share: float) -> None:
    weight = nn.Parameter(torch.ones(3))
    sgd = torch.optim.SGD([weight], lr=0.0)
    oracle = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    scaler = LossScaler(TORCH)
    for overflow in overflows(60, share):
        weight.grad = None
        oracle.scale(weight.sum() * (torch.inf if overflow else 1.0)).backward()
        oracle.step(sgd)
        oracle.update()
        scaler.update(updated=not overflow)
        assert scaler.scale == oracle.get_scale()


def test_scaler_resumes_from_its_saved_state() -> None:
    for at in range(12):
        whole = LossScaler(MEGATRON)
        for number, overflow in enumerate(overflows(24, 0.3)):
            if number == at:
                again = LossScaler(MEGATRON, json.loads(json.dumps(whole.state())))
            whole.update(updated=not overflow)
            if number >= at:
                again.update(updated=not overflow)
        assert again.state() == whole.state()


def test_a_fixed_scale_stays_and_has_nothing_to_save() -> None:
    for config, scale in (
        (PrecisionConfig(fp16=True, loss_scale=128.0), 128.0),
        (PrecisionConfig(bf16=True, loss_scale=8.0), 8.0),
        (PrecisionConfig(bf16=True), 1.0),
        (PrecisionConfig(), 1.0),
    ):
        scaler = LossScaler(config, {"scale": 3.0})
        for made in (False, False, False, True):
            scaler.update(made)
        assert (scaler.scale, scaler.is_dynamic, scaler.state()) == (scale, False, {})
    assert LossScaler(PrecisionConfig(fp16=True, loss_scale=0.0)).is_dynamic, "0 stands for none"


@pytest.mark.parametrize("config", [MEGATRON, TORCH], ids=["a floor", "no floor"])
def test_overflows_at_every_scale_are_recognised(config: PrecisionConfig) -> None:
    scaler = LossScaler(config)
    count = 0
    while not scaler.cannot_recover:
        scaler.update(updated=False)
        count += 1
    assert 32 < count < 64 and 0 < scaler.scale <= 1
    scaler.update(updated=True)
    assert not scaler.cannot_recover

"""Compares SGD on flat buffers with torch's, and tests gradients of a scaled loss."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pentatron.layout.ranks import Grid
from pentatron.optim.update_rules import rule_of_checkpoint
from pentatron.parallel.world import single_process
from pentatron.settings.training import OptimConfig
from tests.harness import distributed
from tests.optim.tiny import (
    OPTIM,
    RATE,
    here,
    loss_of,
    micro_batches,
    network,
    parallel,
    trajectory,
)

STEPS = 5


def descent(momentum: float) -> OptimConfig:
    return dataclasses.replace(OPTIM, optimizer="sgd", sgd_momentum=momentum)


def torchs(momentum: float) -> tuple[nn.Module, dict[nn.Parameter, Any]]:
    model = network()
    decays = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    sgd = torch.optim.SGD(
        [{"params": decays, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}],
        lr=RATE,
        momentum=momentum,
    )
    for step in range(STEPS):
        sgd.zero_grad()
        for x, y in micro_batches(step, 2, 0, 1):
            loss_of(model, x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in sgd.param_groups:
            group["lr"] = RATE / (step + 1)
        sgd.step()
    return model, dict(sgd.state)


def compare(found: dict[str, Any], momentum: float) -> None:
    model, remembered = torchs(momentum)
    for name, p in model.named_parameters():
        assert torch.allclose(found["weights"][name], p, atol=1e-6, rtol=0), name
        if momentum:
            buffer = remembered[p]["momentum_buffer"]
            assert torch.allclose(found["state"][f"momentum_buffer/{name}"], buffer, atol=1e-6, rtol=0), name
    kinds = {name.partition("/")[0] for name in found["state"]}
    assert kinds == {"weights", "momentum_buffer"} if momentum else {"weights"}
    assert rule_of_checkpoint(found["state"]) == ("sgd" if momentum else None)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_five_steps_equal_torchs_sgd(momentum: float) -> None:
    compare(trajectory(single_process(), parallel(), 2, optim=descent(momentum)), momentum)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@distributed(world=2)
def test_every_zero_stage_equals_torchs_sgd(zero: int) -> None:
    compare(trajectory(here(Grid(data=dist.get_world_size())), parallel(zero), optim=descent(0.9)), 0.9)


def test_the_comparison_sees_momentum_and_decay() -> None:
    plain = trajectory(single_process(), parallel(), 2, optim=descent(0.9))
    for other in (descent(0.8), dataclasses.replace(descent(0.9), weight_decay=0.0)):
        with pytest.raises(AssertionError):
            compare(trajectory(single_process(), parallel(), 2, optim=other), 0.9)
    compare(plain, 0.9)


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_a_power_of_two_before_backward_changes_no_bit(zero: int, rule: str) -> None:
    """The gradient norm excludes the loss scale, and the update divides by it."""
    optim = dataclasses.replace(OPTIM, optimizer=rule)
    plain = trajectory(single_process(), parallel(zero), 2, optim=optim)
    scaled = trajectory(single_process(), parallel(zero), 2, optim=optim, scale=2.0**20)
    assert scaled["norms"] == plain["norms"]
    for kind in ("weights", "gradients", "state"):
        assert all(torch.equal(scaled[kind][name], value) for name, value in plain[kind].items()), kind


def test_clipping_is_by_the_norm_without_the_scale() -> None:
    free = dataclasses.replace(OPTIM, clip_grad=0.0)
    for optim, scale in itertools.product((OPTIM, free), (1.0, 3.0)):
        found = trajectory(single_process(), parallel(), 1, steps=1, optim=optim, scale=scale)
        moments = [m.flatten() for name, m in found["state"].items() if name.startswith("exp_avg/")]
        # After one update, the first moment is the gradient times a constant.
        norm = torch.cat(moments).norm().item() / (1 - optim.adam_beta1)
        assert norm == pytest.approx(0.5 if optim is OPTIM else found["norms"][0], rel=1e-5)
        assert found["norms"][0] > 0.5

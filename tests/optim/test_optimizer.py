"""The flat optimizer against torch's own, parameter by parameter."""

import math

import pytest
import torch
from torch import nn

from pentatron.optim.optimizer import Optimizer
from pentatron.parallel.collectives import Group
from tests.support import resolved

CONFIG = "--lr 1e-2 --weight-decay 0.3 --adam-beta2 0.95 --adam-eps 1e-6 --clip-grad 0.5"


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 4))


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, 6, generator=generator), torch.randn(5, 4, generator=generator)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x, y = data(step)
    return (model(x) - y).square().mean() * 10


def ours(steps: int, words: str = CONFIG) -> tuple[nn.Module, Optimizer, list[float]]:
    model = network()
    optimizer = Optimizer(model, resolved(words).config.optim, torch.float32, bucket_elements=10)
    norms = []
    for step in range(steps):
        optimizer.zero_gradients()
        loss_of(model, step).backward()
        optimizer.reduce_gradients(Group(0, 1))
        norms.append(optimizer.step(1e-2 / (step + 1)))
    return model, optimizer, norms


def test_five_steps_equal_torchs_adamw_with_clipping_and_selective_decay() -> None:
    model, _, norms = ours(5)
    twin = network()
    decays = [p for p in twin.parameters() if p.dim() > 1]
    rest = [p for p in twin.parameters() if p.dim() == 1]
    reference = torch.optim.AdamW(
        [{"params": decays, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-6,
    )
    for step in range(5):
        reference.zero_grad()
        loss_of(twin, step).backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        assert norms[step] == pytest.approx(float(norm), rel=1e-6) and norm > 0.5, "clipping must be active"
        for group in reference.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        reference.step()
    for p, q in zip(model.parameters(), twin.parameters()):
        assert torch.allclose(p, q, atol=1e-6)


def test_the_comparison_sees_weight_decay() -> None:
    model, _, _ = ours(5)
    undecayed, _, _ = ours(5, CONFIG.replace("--weight-decay 0.3", "--weight-decay 0"))
    assert not torch.allclose(model[0].weight, undecayed[0].weight, atol=1e-6)


def test_clip_of_zero_never_clips() -> None:
    clipped, _, norms = ours(1)
    free, _, free_norms = ours(1, CONFIG.replace("--clip-grad 0.5", "--clip-grad 0 --adam-eps 1"))
    assert norms == free_norms
    assert not torch.equal(clipped[0].weight, free[0].weight)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_gradients_leave_everything_untouched(bad: float) -> None:
    model, optimizer, _ = ours(2)
    before = {name: t.clone() for name, t in optimizer.state().items()}
    optimizer.zero_gradients()
    loss_of(model, 7).backward()
    optimizer.buffers[0].gradients[3] = bad
    assert not math.isfinite(optimizer.step(1e-2))
    assert all(torch.equal(t, before[name]) for name, t in optimizer.state().items())


def test_state_restores_bit_exactly() -> None:
    model, optimizer, _ = ours(3)
    kept = {name: t.clone() for name, t in optimizer.state().items()}
    fresh_model, fresh, _ = ours(0)
    for name, tensor in fresh.state().items():
        tensor.copy_(kept[name])
    fresh.loaded(updates=3)
    for m, o in ((model, optimizer), (fresh_model, fresh)):
        o.zero_gradients()
        loss_of(m, 9).backward()
        o.step(1e-3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), fresh_model.parameters()))


def test_forgetting_the_step_count_would_be_seen() -> None:
    model, optimizer, _ = ours(3)
    kept = {name: t.clone() for name, t in optimizer.state().items()}
    fresh_model, fresh, _ = ours(0)
    for name, tensor in fresh.state().items():
        tensor.copy_(kept[name])
    for m, o in ((model, optimizer), (fresh_model, fresh)):
        o.zero_gradients()
        loss_of(m, 9).backward()
        o.step(1e-3)
    assert not all(torch.equal(p, q) for p, q in zip(model.parameters(), fresh_model.parameters()))

"""Compares the fused AdamW update with torch's, on a GPU or in Triton's interpreter on a CPU."""

import importlib.util
import itertools
import math
import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from pentatron.compare.trial import micro_batches
from pentatron.optim.build import build_optimizer
from pentatron.optim.update_rules import clip_factor, clip_factor_on_device
from pentatron.parallel.world import single_process
from pentatron.train.model import build_parallel_model, model_dtype
from pentatron.train.step import train_step
from tests.support import LLAMA, resolved

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not (INTERPRETED or torch.cuda.is_available()),
    reason="needs Triton, and a GPU or its interpreter",
)
DEVICE = torch.device("cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda")
# More than a block, less than one, exactly one, and a tensor that is not aligned to vector loads.
SIZES = (1000, 37, 256, 512)
DECAYS = (True, True, False, False)
RATE, DECAY, BETAS, EPSILON, FACTOR = 1e-2, 0.1, (0.9, 0.95), 1e-8, 0.3


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    whole = [torch.randn(n + 1, generator=generator).to(DEVICE, dtype) for n in SIZES]
    return [t[1:] if number == 3 else t[:-1] for number, t in enumerate(whole)]


def torchs(values: list[Tensor], gradients: list[Tensor], moments: list[list[Tensor]], update: int) -> None:
    for decays in (True, False):
        chosen = [i for i, d in enumerate(DECAYS) if d is decays]
        adamw(
            [values[i] for i in chosen],
            [gradients[i] for i in chosen],
            *([each[i] for i in chosen] for each in moments),
            [],
            [torch.tensor(float(update - 1), device=DEVICE) for _ in chosen],
            fused=True,
            amsgrad=False,
            beta1=BETAS[0],
            beta2=BETAS[1],
            lr=RATE,
            weight_decay=DECAY if decays else 0.0,
            eps=EPSILON,
            maximize=False,
        )


@needs_triton
@pytest.mark.parametrize("rounded", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_three_updates_are_those_of_torch(dtype: torch.dtype, rounded: torch.dtype | None) -> None:
    from pentatron.ops.triton_update import AdamWParameters, FusedAdamWKernel, Target

    values, expected = tensors(0), tensors(0)
    zeros = [[torch.zeros_like(v) for v in values] for _ in range(4)]
    moments, remembered = zeros[:2], zeros[2:]
    weights = [None if rounded is None else torch.zeros_like(v, dtype=rounded) for v in values]
    targets = [Target(*each) for each in zip(values, *moments, weights, DECAYS)]
    kernel = FusedAdamWKernel(targets, block=256, warps=4)
    control = torch.tensor([FACTOR, 1.0], device=DEVICE)
    for update in (1, 2, 3):
        gradients: list[Tensor | None] = [*tensors(update, dtype)]
        if update == 2:
            gradients[0] = None
        kernel(gradients, control, AdamWParameters(RATE, DECAY, *BETAS, EPSILON, update))
        exact = [torch.zeros_like(v) if g is None else g.float() * FACTOR for v, g in zip(values, gradients)]
        torchs(expected, exact, remembered, update)
    for found, wanted in zip(
        [*values, *moments[0], *moments[1]], [*expected, *remembered[0], *remembered[1]]
    ):
        torch.testing.assert_close(found, wanted, rtol=3e-7, atol=1e-7)
    for weight, value in zip(weights, values):
        if weight is not None and (rounded == torch.float16 or not INTERPRETED):
            assert torch.equal(weight, value.to(rounded))
        elif weight is not None:
            # The interpreter truncates where a GPU rounds.
            assert (weight.float() - value).abs().le(value.abs() / 128).all()


@needs_triton
def test_nothing_is_written_if_the_device_says_so() -> None:
    from pentatron.ops.triton_update import AdamWParameters, FusedAdamWKernel, Target

    values = tensors(0)
    moments = [[torch.ones_like(v) for v in values] for _ in range(2)]
    weights = [torch.ones_like(v, dtype=torch.bfloat16) for v in values]
    kernel = FusedAdamWKernel([Target(*each) for each in zip(values, *moments, weights, DECAYS)], 256, 4)
    numbers = AdamWParameters(RATE, DECAY, *BETAS, EPSILON, 1)
    bad = [torch.full_like(v, float("nan")) for v in values]
    kernel(bad, torch.tensor([float("nan"), 0.0], device=DEVICE), numbers)
    for before, now in zip(tensors(0), values):
        assert torch.equal(before, now)
    for written in (*moments[0], *moments[1], *weights):
        assert written.eq(1).all()
    kernel(bad, torch.tensor([1.0, 1.0], device=DEVICE), numbers)
    assert all(v.isnan().all() for v in values), "the control"


@pytest.mark.parametrize("scale", [1.0, 8.0, 3.0])
@pytest.mark.parametrize("limit", [0.0, 0.5, 100.0])
def test_clipping_on_the_device_is_clipping(limit: float, scale: float) -> None:
    for squared in (0.0, 7.0, 1e9):
        found = clip_factor_on_device(torch.tensor(squared, dtype=torch.float64), limit, scale)
        assert float(found) == pytest.approx(clip_factor(squared**0.5 / scale, limit, scale), rel=1e-14)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_squares_are_summed_over_all_tensors(dtype: torch.dtype) -> None:
    from pentatron.ops.triton_update import SumOfSquares

    squares = SumOfSquares(block=256, warps=4)
    for seed in (0, 1):
        found = squares(tensors(seed, dtype))
        expected = sum(float(t.double().square().sum()) for t in tensors(seed, dtype))
        assert float(found) == pytest.approx(expected, rel=1e-6)
    assert float(squares(tensors(2, dtype)[:2])) < 0.8 * expected, "other sizes, another table"


@needs_triton
def test_a_table_of_addresses_follows_the_tensors() -> None:
    from pentatron.ops.triton_update import Addresses

    addresses = Addresses(DEVICE)
    first, second = tensors(1), tensors(2)
    table = addresses([*first, None])
    assert table.tolist() == [*(t.data_ptr() for t in first), 0]
    assert addresses([*first, None]) is table, "nothing has moved"
    assert addresses([*second, None]).tolist() == [*(t.data_ptr() for t in second), 0]
    assert addresses(first).tolist() == [t.data_ptr() for t in first]


@needs_triton
def test_two_gradients_are_summed_in_fp32() -> None:
    from pentatron.ops.triton_update import sum_in_fp32

    for one, other in zip(tensors(0, torch.bfloat16), tensors(1, torch.bfloat16)):
        assert torch.equal(sum_in_fp32(one, other), one.float().add_(other))


@needs_triton
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_step_decided_on_the_device(accumulated: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares steps decided on the device with steps decided on the host; NaN or inf changes nothing."""
    from pentatron.optim import update_rules

    monkeypatch.setattr(update_rules, "_can_fuse", bool)
    losses, states = [], []
    for flag in ("", "--no-fused-update"):
        words = f"{LLAMA} --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 30 --device {DEVICE.type}"
        # A large epsilon, because sums on a GPU may differ in their last bits, which Adam amplifies where a
        # gradient is almost zero.
        words += f" --micro-batch-size 1 --global-batch-size {accumulated} --adam-eps 1e-2"
        config = resolved(f"{words} {flag}").config
        world = single_process(DEVICE)
        model = build_parallel_model(config, world)
        # Set here, because the decision for a CPU is never one pass, and Triton's interpreter runs on a CPU.
        options = replace(model.decisions.optimizer, fused=flag == "")
        optimizer = build_optimizer(model.stages, world, config.optim, options, model_dtype(config))
        assert optimizer.update.is_fused is (flag == "")
        batches = micro_batches(config, world, 0)
        states.append([f.values.clone() for f in optimizer.fragments(owned_only=False)])
        for step in range(2):
            chunk = list(itertools.islice(batches, accumulated))
            losses.append(train_step(model, optimizer, chunk, 1e-2, step=step).loss)
            states.append([f.values.clone() for f in optimizer.fragments(owned_only=False)])
        norm = next(p for p in model.stages[0].parameters() if p.dim() == 1)
        sound, norm.data[0] = norm.data[0].clone(), float("inf")
        before = [f.values.clone() for f in optimizer.fragments(owned_only=False)]
        result = train_step(model, optimizer, chunk, 1e-2, step=2)
        assert not result.updated and math.isnan(result.loss)
        after = [f.values for f in optimizer.fragments(owned_only=False)]
        assert all(map(torch.equal, before, after))
        norm.data[0] = sound
        assert train_step(model, optimizer, chunk, 1e-2, step=2).updated
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-6)
    for one, other in zip(states[:3], states[3:], strict=True):
        for found, expected in zip(one, other, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    # An update changes far more than the tolerance.
    assert max(float((new - old).abs().max()) for old, new in zip(states[0], states[1], strict=True)) > 1e-3

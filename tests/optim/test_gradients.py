"""Tests unbucketed gradients: the bits of a plain fp32 sum, in less memory, freed after the update."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from pentatron.compare.trial import micro_batches
from pentatron.optim.build import build_optimizer
from pentatron.optim.optimizer import Optimizer
from pentatron.optim.update_rules import clip_factor, squared_norm
from pentatron.parallel import reduction as reduction_module
from pentatron.parallel.reduction import BucketBuffer
from pentatron.parallel.sharding import ONES, ShardedModule, replicated
from pentatron.parallel.world import single_process
from pentatron.settings.run_config import RunConfig
from pentatron.train.model import build_parallel_model, model_dtype
from pentatron.train.step import train_step
from pentatron.train.step_hooks import digest
from tests.harness import run_distributed
from tests.optim.tiny import CPU, OPTIM, RATE, loss_of, network, one_step, parallel
from tests.optim.tiny import micro_batches as data_of
from tests.parity.trajectory import here
from tests.support import LLAMA, resolved

SHAPE = (
    f"{LLAMA} --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 50 "
    f"--make-vocab-size-divisible-by 64 --micro-batch-size 1 --init-method-std 0.1"
)


class Plain:
    """Reference update: a zeroed fp32 sum for every parameter, one pass for each operation."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.parameters = list(model.parameters())
        self.master = [p.detach().float().clone() for p in self.parameters]
        self.first = [torch.zeros_like(m) for m in self.master]
        self.second = [torch.zeros_like(m) for m in self.master]
        self.steps = [torch.zeros(()) for _ in self.master]
        for p in self.parameters:
            p.data = p.data.to(dtype)

    def step(self, losses: Iterator[Tensor], rate: float, norm: float) -> None:
        sums = [torch.zeros_like(m) for m in self.master]
        for loss in losses:
            loss.backward()
            for total, p in zip(sums, self.parameters):
                assert p.grad is not None
                total.add_(p.grad)
                p.grad = None
        torch._foreach_div_(sums, torch.tensor(1 / clip_factor(norm, OPTIM.clip_grad)))
        for decays in (True, False):
            chosen = [i for i, p in enumerate(self.parameters) if (p.dim() > 1) is decays]
            values, grads, first, second, steps = (
                [each[i] for i in chosen] for each in (self.master, sums, self.first, self.second, self.steps)
            )
            adamw(
                *(values, grads, first, second, [], steps),
                fused=True,
                amsgrad=False,
                beta1=OPTIM.adam_beta1,
                beta2=OPTIM.adam_beta2,
                lr=rate,
                weight_decay=OPTIM.weight_decay if decays else 0.0,
                eps=OPTIM.adam_eps,
                maximize=False,
            )
        for p, master in zip(self.parameters, self.master):
            p.data.copy_(master)


def both_ways(count: int, dtype: torch.dtype, zero: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, twin = network(), network()
    optimizer, plain = (
        Optimizer({0: model}, single_process(), OPTIM, parallel(zero), dtype),
        Plain(twin, dtype),
    )
    for step in range(4):
        norm = one_step(model, optimizer, step, count, RATE / (step + 1))
        plain.step((loss_of(twin, x, y) for x, y in data_of(step, count, 0, 1)), RATE / (step + 1), norm)
    master = {f.tensor: f.values for f in optimizer.fragments(owned_only=False)}
    names = [name for name, _ in twin.named_parameters()]
    expected = {f"weights/{name}": value for name, value in zip(names, plain.master)}
    expected |= {f"exp_avg_sq/{name}": value for name, value in zip(names, plain.second)}
    return {name: master[name] for name in expected}, expected


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 3])
def test_the_bits_are_those_of_a_zeroed_fp32_sum(count: int, dtype: torch.dtype, zero: int) -> None:
    found, expected = both_ways(count, dtype, zero)
    for name, value in expected.items():
        assert torch.equal(found[name].view_as(value), value), name


def test_sums_in_bf16_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        reduction_module, "accumulate", lambda before, new: new if before is None else before + new
    )
    found, expected = both_ways(3, torch.bfloat16, 0)
    assert not all(torch.equal(found[name].view_as(value), value) for name, value in expected.items())


# The norm of gradients in several precisions.


def test_norms_of_bf16_gradients_are_exact() -> None:
    gradients = [torch.full((300,), 1.01).bfloat16(), torch.full((7,), 3.0), torch.randn(40).half()]
    expected = sum(float(g.double().square().sum()) for g in gradients)
    assert float(squared_norm(gradients, CPU)) == pytest.approx(expected, rel=1e-6)
    in_bf16 = torch.stack(torch._foreach_norm(gradients[:1])).double().square().sum()
    assert float(in_bf16) != pytest.approx(float(gradients[0].double().square().sum()), rel=1e-4), (
        "the control: what torch answers unless it is asked for fp32"
    )


def test_norms_of_large_gradients_are_exact() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(3_000_001), torch.randn(1000, 9).t(), torch.randn(5)]
    expected = sum(float(g.double().square().sum()) for g in gradients)
    assert float(squared_norm(gradients, CPU)) == pytest.approx(expected, rel=1e-6)
    added_up = float(torch._foreach_norm(gradients[:1])[0].double().square())
    assert added_up != pytest.approx(float(gradients[0].double().square().sum()), rel=1e-5), (
        "the control: what torch answers on a CPU"
    )


# Memory of a replicated model, in many layouts.


def in_a_step(words: str) -> dict[str, Any]:
    """Returns the memory of a step's gradients, and what is left of it after the update."""
    config: RunConfig = resolved(f"{SHAPE} {words}", dist.get_world_size()).config
    world = here(config)
    model = build_parallel_model(config, world)
    optimizer = build_optimizer(
        model.stages, world, config.optim, model.decisions.optimizer, model_dtype(config)
    )
    assert isinstance(optimizer, Optimizer) and optimizer.bytes()["gradients"] == 0
    chunk = list(itertools.islice(micro_batches(config, world, 0), config.accumulation))
    train_step(model, optimizer, chunk, 1e-3, step=0)
    return {
        "elements": sum(p.numel() for stage in model.stages.values() for p in set(stage.parameters())),
        "at most": optimizer.bytes()["gradients"],
        "after": sum(t.numel() for r in optimizer._reductions.values() for t in r.memory()),
        "left": sum(p.grad is not None for stage in model.stages.values() for p in stage.parameters()),
    }


@pytest.mark.parametrize(
    ("ranks", "words", "each"),
    [
        (1, "--global-batch-size 1 --bf16", 2.0),
        (1, "--global-batch-size 3 --bf16", 4.0),
        (1, "--global-batch-size 1", 4.0),
        (2, "--global-batch-size 2 --bf16", 4.0),
        (2, "--global-batch-size 1 --bf16 --tensor-model-parallel-size 2", 2.0),
    ],
)
def test_memory_is_that_of_gradients_as_they_come(ranks: int, words: str, each: float) -> None:
    for found in run_distributed(in_a_step, ranks, words=words):
        assert found["after"] == found["left"] == 0
        assert found["at most"] / found["elements"] == pytest.approx(each, rel=0.02)


# A step with NaN or inf keeps its gradients, so that its cause can be found.


def test_gradients_of_a_step_that_is_not_made_can_be_read() -> None:
    config = resolved(f"{SHAPE} --global-batch-size 1").config
    world = single_process()
    model = build_parallel_model(config, world)
    optimizer = build_optimizer(
        model.stages, world, config.optim, model.decisions.optimizer, model_dtype(config)
    )
    batch = next(iter(micro_batches(config, world, 0)))
    _, norm = [p for p in model.stages[0].parameters() if p.dim() == 1][:2]
    norm.data[0] = float("inf")
    before = [f.values.clone() for f in optimizer.fragments(owned_only=False)]
    assert not train_step(model, optimizer, [batch], 1e-3, step=0).updated
    assert not all(f.values.isfinite().all() for f in optimizer.gradients(owned_only=False))
    assert all(map(torch.equal, before, (f.values for f in optimizer.fragments(owned_only=False))))
    norm.data[0] = 1.0
    assert train_step(model, optimizer, [batch], 1e-3, step=0).updated, "nothing of it outlives its step"
    assert all(f.values.eq(0).all() for f in optimizer.gradients(owned_only=False))


# Whole models in layouts, compared with sums that begin with zeros.


def as_before(before: Tensor | None, gradient: Tensor) -> Tensor:
    return (torch.zeros_like(gradient, dtype=torch.float32) if before is None else before).add_(gradient)


def zeroed(self: BucketBuffer, slot: int, gradient: Tensor) -> None:
    if not self._filled:
        self.buffer.zero_()
    self._filled = set(range(len(self.bucket.plan.slots)))
    self.bucket.plan.slots[slot].span.of(self.buffer).add_(gradient.view(-1))


def state_after(words: str, plainly: bool) -> dict[tuple[str, Any], str]:
    if plainly:
        reduction_module.accumulate = as_before
        BucketBuffer.take = zeroed  # type: ignore[method-assign]
    config: RunConfig = resolved(f"{SHAPE} --clip-grad 0 {words}", dist.get_world_size()).config
    world = here(config)
    model = build_parallel_model(config, world)
    optimizer = build_optimizer(
        model.stages, world, config.optim, model.decisions.optimizer, model_dtype(config)
    )
    batches = micro_batches(config, world, 0)
    for step in range(3):
        chunk = list(itertools.islice(batches, config.accumulation))
        assert train_step(model, optimizer, chunk, 1e-2, step=step).updated
    return {(f.tensor, f.start): digest(f.values) for f in optimizer.fragments(owned_only=False)}


HALVES = "--pipeline-model-parallel-size 2 --pipeline-schedule"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, "--global-batch-size 1 --bf16"),
        (1, "--global-batch-size 3 --bf16"),
        (2, f"--global-batch-size 4 --bf16 {HALVES} zbv --num-layers 4"),
        (2, f"--global-batch-size 4 --bf16 {HALVES} zero-bubble"),
        (2, "--global-batch-size 2 --zero-stage 1 --bf16 --overlap-grad-reduce"),
        (2, "--global-batch-size 4 --zero-stage 2 --bf16"),
        (4, f"--global-batch-size 8 --bf16 --zero-stage 2 {HALVES} zbv --num-layers 4"),
    ],
)
def test_whole_models_have_the_bits_of_zeroed_sums(ranks: int, words: str) -> None:
    """The embedding is tied; folded pipelines have both of its ends on one rank."""
    found, plain = (run_distributed(state_after, ranks, words=words, plainly=way) for way in (False, True))
    assert found == plain


class _Joined(ShardedModule):
    """Two parameters whose gradients autograd returns as views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.left = self.declare("left", (4, 3), replicated((4, 3), ONES))
        self.right = self.declare("right", (3, 4), replicated((3, 4), ONES))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.left.view(2, 6) + self.right.view(2, 6))


def test_gradients_in_one_memory_are_scaled_and_summed_once() -> None:
    model, x = _Joined(), torch.ones(5, 6)
    model(x).sum().backward()
    assert model.left.grad is not None and model.right.grad is not None
    # Control: without a copy, both gradients would share memory.
    assert model.left.grad.data_ptr() == model.right.grad.data_ptr()
    model.zero_grad()
    optimizer = build_optimizer({0: model}, single_process(CPU), OPTIM, parallel(), torch.float32)
    optimizer.zero_gradients()
    for last in (False, True):
        optimizer.begin_backward(0, last)
        model(x).sum().backward()
        optimizer.end_backward(0, last)
    optimizer.reduce(0)
    optimizer.finish_reduction()
    found = {f.tensor: f.values for f in optimizer.gradients(owned_only=False)}
    assert {name: values.unique().tolist() for name, values in found.items()} == {
        "gradients/left": [10.0],
        "gradients/right": [10.0],
    }

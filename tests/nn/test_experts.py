"""Compares the experts of one rank with a loop over small MLPs, and counts their saved memory."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pentatron.models.causal_lm import build_model
from pentatron.nn.experts import Experts
from pentatron.nn.moe import SharedExpert
from pentatron.nn.options import ONE_PROCESS, Axes, ModelOptions
from pentatron.nn.recompute import NO_RECOMPUTE, recompute_of
from pentatron.ops.linear import DeferredGradients
from pentatron.settings.parallel import MemoryConfig
from tests.nn.mixtures import HIDDEN, axes_with, config_of, drawn, layer, stream
from tests.support import resolved

COUNTS = (3, 0, 5, 1, 0, 0, 7, 2)


def experts(words: str = "", axes: Axes = ONE_PROCESS) -> Experts:
    config = config_of(words)
    made = drawn(Experts(config.model, config.moe, axes))
    assert isinstance(made, Experts)
    return made


def one_by_one(rows: Tensor, counts: Sequence[int], fc1: Tensor, fc2: Tensor, gated: bool) -> Tensor:
    made = []
    for number, own in enumerate(rows.split(list(counts))):
        inner = own @ fc1[number].T
        if gated:
            gate, up = inner[:, : inner.shape[1] // 2], inner[:, inner.shape[1] // 2 :]
            inner = F.silu(gate) * up
        else:
            inner = F.gelu(inner, approximate="tanh")
        made.append(inner @ fc2[number].T)
    return torch.cat(made)


@pytest.mark.parametrize("counts", [COUNTS, (0,) * 8, (18, 0, 0, 0, 0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("words", ["", "--moe-grouped-gemm", "--no-gated-linear-unit"])
def test_each_expert_is_an_mlp_of_its_own(words: str, counts: tuple[int, ...]) -> None:
    model = experts(words)
    x = stream(2, sum(counts), HIDDEN).requires_grad_()
    dy = stream(3, sum(counts), HIDDEN)
    model(x, counts).backward(dy)
    fc1, fc2 = (p.weight.detach().clone().requires_grad_() for p in (model.linear_fc1, model.linear_fc2))
    twin = x.detach().clone().requires_grad_()
    expected = one_by_one(twin, counts, fc1, fc2, gated="no-gated" not in words)
    assert torch.allclose(model(x, counts), expected, rtol=1e-4, atol=1e-5)
    expected.backward(dy)
    for found, wanted in (
        (x.grad, twin.grad),
        (model.linear_fc1.weight.grad, fc1.grad),
        (model.linear_fc2.weight.grad, fc2.grad),
    ):
        assert found is not None and wanted is not None
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
    for number, count in enumerate(counts):
        if count == 0:
            assert model.linear_fc1.weight.grad[number].eq(0).all()  # type: ignore[index]
            assert model.linear_fc2.weight.grad[number].eq(0).all()  # type: ignore[index]


def test_weight_gradients_may_come_later() -> None:
    x, deferred = stream(2, sum(COUNTS), HIDDEN), DeferredGradients()
    at_once, later = experts(), experts(axes=axes_with(deferred=deferred))
    at_once(x, COUNTS).square().sum().backward()
    with deferred.collect((0, 0)):
        later(x, COUNTS).square().sum().backward()
    assert later.linear_fc1.weight.grad is None and later.linear_fc2.weight.grad is None
    deferred.compute((0, 0))
    for ours, theirs in ((later.linear_fc1, at_once.linear_fc1), (later.linear_fc2, at_once.linear_fc2)):
        assert ours.weight.grad is not None and theirs.weight.grad is not None
        assert torch.equal(ours.weight.grad, theirs.weight.grad)


@pytest.mark.parametrize("gate", ["", "--moe-shared-expert-gate"])
def test_every_token_goes_through_the_shared_expert(gate: str) -> None:
    words = f"--moe-shared-expert-intermediate-size 16 {gate}"
    config, model = config_of(words), layer(words)
    x = stream(2, 2, 8, HIDDEN)
    shared = model.shared
    assert isinstance(shared, SharedExpert)
    gates, ups = F.linear(x, shared.mlp.linear_fc1.weight).chunk(2, -1)
    expected = F.linear(F.silu(gates) * ups, shared.mlp.linear_fc2.weight)
    if gate:
        assert shared.gate is not None
        expected = expected * torch.sigmoid(x @ shared.gate.weight[0])[..., None]
    without = model(x) - expected
    model.shared = None
    assert torch.allclose(model(x), without, atol=1e-5)
    assert (drawn(SharedExpert(config.model, config.moe, ONE_PROCESS)).gate is None) == (gate == "")


# --- memory saved for backward ---

ALL = "--num-layers 4 --moe-shared-expert-intermediate-size 16"
MODULES = ("moe_act", "moe", "shared_experts")


def run(modules: tuple[str, ...]) -> tuple[int, dict[str, Tensor]]:
    """Returns the bytes that autograd saves, each storage once, and all gradients."""
    config = config_of(ALL)
    recompute = (
        recompute_of(MemoryConfig("selective", recompute_modules=modules)) if modules else NO_RECOMPUTE
    )
    options = ModelOptions(recompute=recompute)
    model = build_model(config.model, 1, torch.device("cpu"), config.moe, options)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, int] = {}
    alive = []

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(saved)
        return saved

    tokens = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(5))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        loss = model(tokens, torch.arange(16).expand(2, 16), tokens.roll(-1, 1)).sum()
    loss.backward()
    return sum(storages.values()), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("modules", [*((m,) for m in MODULES), MODULES], ids=" ".join)
def test_a_module_that_runs_again_gives_the_same_bits_and_keeps_less(modules: tuple[str, ...]) -> None:
    kept, found = run(modules)
    without, expected = run(())
    assert kept < without
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_the_activation_inside_experts_is_not_kept() -> None:
    """Recompute of `moe_act` saves at least the activation of every layer."""
    saved = run(())[0] - run(("moe_act",))[0]
    assert saved >= 4 * (2 * 16 * 2) * 24 * 4


@pytest.mark.parametrize("module", ["core_attn", "moe_act", "layernorm", "mlp", "moe", "shared_experts"])
def test_every_module_can_be_named(module: str) -> None:
    words = f"--num-experts 4 --recompute-granularity selective --recompute-modules {module}"
    assert resolved(words).config.memory.recompute_modules == (module,)

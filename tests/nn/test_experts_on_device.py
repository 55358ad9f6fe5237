"""Compares experts with and without synchronization of host and device: outputs and gradients."""

import pytest
import torch
from torch import Tensor

from pentatron.nn import experts
from pentatron.nn.experts import sorted_by_expert
from pentatron.nn.moe import MoE, _by_local_expert
from pentatron.nn.recompute import Recompute
from pentatron.ops.activation import weighted_activation, weighted_activation_backward
from pentatron.ops.linear import DeferredGradients
from pentatron.parallel.buckets import _parameters_run_by
from tests.nn.mixtures import HIDDEN, axes_with, layer, stream


def found_by(model: MoE, on_device: bool) -> dict[str, Tensor]:
    """Returns output and gradients; can force the device path, which a CPU does not use by itself."""
    x = stream(2, 3, 16, HIDDEN).requires_grad_()
    model.experts.can_run_on_device = lambda x_TD: on_device  # type: ignore[method-assign, assignment]
    made = model(x)
    made.backward(stream(3, 3, 16, HIDDEN))
    assert x.grad is not None
    weights = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": made.detach(), "input": x.grad, **weights}


WORDS = [
    "",
    "--no-gated-linear-unit",
    "--moe-router-topk 1 --moe-router-pre-softmax",
    "--moe-router-topk 3 --moe-aux-loss-coeff 0.1",
    "--moe-expert-capacity-factor 0.5",
    "--moe-expert-capacity-factor 0.7 --moe-token-drop-policy position --moe-router-topk 3",
    "--moe-shared-expert-intermediate-size 16",
]


@pytest.mark.parametrize("words", WORDS)
def test_dispatch_without_counts_on_the_host(words: str) -> None:
    expected, found = found_by(layer(words), False), found_by(layer(words), True)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-5), name
    if "capacity" in words:
        assert expected["output"].eq(0).all(-1).any(), (
            "a token whose experts all were full, so that dropping is seen"
        )


def test_experts_without_tokens_have_no_gradient() -> None:
    both = [layer("--moe-router-enable-expert-bias --moe-router-score-function sigmoid") for _ in range(2)]
    for model in both:
        model.router.load.bias[[0, 4, 7]] = 10.0
    expected, found = (found_by(model, on_device) for model, on_device in zip(both, (False, True)))
    for name in ("experts.linear_fc1.weight", "experts.linear_fc2.weight"):
        assert found[name][[1, 2, 3, 5, 6]].eq(0).all() and found[name][[0, 4, 7]].ne(0).any()
        assert torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("part", ["moe", "moe_act"])
def test_recomputed_experts_give_the_same_numbers(part: str) -> None:
    again = layer(axes=axes_with(Recompute(frozenset({part}))))
    expected, found = found_by(layer(), True), found_by(again, True)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def kept_bytes(model: MoE) -> int:
    found: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive = []

    def pack(saved: Tensor) -> Tensor:
        alive.append(saved)
        if saved.untyped_storage().data_ptr() not in weights:
            found[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        model(stream(2, 3, 16, HIDDEN).requires_grad_())
    return sum(found.values())


def test_little_is_kept() -> None:
    """The device path saves neither a second copy of the widest rows nor the activation."""
    pairs = 3 * 16 * 2
    models = [layer(), layer(), layer(axes=axes_with(Recompute(frozenset({"moe_act"}))))]
    for model, on_device in zip(models, (False, True, True)):
        model.experts.can_run_on_device = lambda x_TD, chosen=on_device: chosen  # type: ignore[method-assign, misc]
    host, device, least = map(kept_bytes, models)
    between = pairs * 24 * 4
    rows = pairs * HIDDEN * 4
    # The sorted weights of the pairs are saved beside their places.
    assert device <= host - rows - 2 * between + 2 * pairs * 8
    assert least <= device - rows + 16


def test_weight_gradients_may_come_later() -> None:
    deferred = DeferredGradients()
    at_once, later = layer(), layer(axes=axes_with(deferred=deferred))
    expected = found_by(at_once, True)
    with deferred.collect((0, 0)):
        assert "experts.linear_fc1.weight" not in found_by(later, True)
    deferred.compute((0, 0))
    for name in ("linear_fc1", "linear_fc2"):
        gradient = getattr(later.experts, name).weight.grad
        assert torch.equal(gradient, expected[f"experts.{name}.weight"])


def test_pairs_are_sorted_by_expert_and_then_by_token() -> None:
    chosen = torch.tensor([[2, 0], [2, 5], [0, 2], [5, 1]])
    kept = torch.tensor([[True, True], [True, False], [True, True], [True, True]])
    sort = sorted_by_expert(chosen, kept, 6)
    assert sort.pairs_N.tolist() == [1, 4, 7, 0, 2, 5, 6, 3]
    assert sort.places_TK.flatten()[sort.pairs_N].tolist() == list(range(8))
    # The dropped pair is a row of the last expert.
    assert sort.groups.ends.tolist() == [2, 3, 6, 6, 6, 8] and sort.groups.ends.dtype == torch.int32


def test_rows_that_arrive_by_rank_are_sorted_by_expert() -> None:
    received = torch.tensor([[2, 0, 1], [1, 2, 0]])
    # Rank 0 sent rows 0 and 1 for expert 0 and row 2 for expert 2, rank 1 row 3 for expert 0 and rows 4 and 5
    # for expert 1.
    assert _by_local_expert(received, 6).tolist() == [0, 1, 3, 4, 5, 2]


@pytest.mark.parametrize("gated", [True, False])
def test_the_gradient_of_the_activation_is_autograds(gated: bool) -> None:
    inner, weights = stream(1, 5, 12).requires_grad_(), stream(2, 5).requires_grad_()
    gradient = stream(3, 5, 6 if gated else 12)
    made = weighted_activation(inner, weights, gated)
    made.backward(gradient)
    of_inner, of_weights, again = weighted_activation_backward(
        gradient, inner.detach(), weights.detach(), gated
    )
    assert torch.allclose(again, made)
    assert inner.grad is not None and weights.grad is not None
    assert torch.allclose(of_inner, inner.grad, atol=1e-6) and torch.allclose(
        of_weights, weights.grad, atol=1e-5
    )


def test_only_a_gpu_in_bf16_is_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise AssertionError("asked")

    monkeypatch.setattr(experts._GroupedExpertsFunction, "apply", refuse)
    x = stream(2, 3, 16, HIDDEN)
    layer()(x)
    assert not layer("--no-moe-grouped-gemm").experts.grouped and layer().experts.grouped


@pytest.mark.parametrize("on_device", [True, False])
def test_weights_on_their_way_are_waited_for_at_the_door(on_device: bool) -> None:
    """All-gather hooks of expert weights run on the module `Experts`.

    `_parameters_run_by` names the modules with hooks; hooks of single matrices would not run.
    """
    model = layer("")
    expert_weights = {id(p) for p in model.experts.parameters()}
    doors = [m for _, m, held in _parameters_run_by(model) if expert_weights & {id(p) for p in held}]
    waited: list[str] = []
    for door in doors:
        door.register_forward_pre_hook(lambda module, given: waited.append(type(module).__name__))
    found_by(model, on_device)
    assert waited == ["Experts"]

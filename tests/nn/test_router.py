"""Compares the router with a slow reference that computes one token and one expert at a time."""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from pentatron.settings.model import MoEConfig
from tests.nn.mixtures import BIAS, GROUPS, HIDDEN, SIGMOID, config_of, router, stream

VARIANTS = {
    "softmax of the chosen": "",
    "softmax of all": "--moe-router-pre-softmax",
    "softmax of all, top 1": "--moe-router-pre-softmax --moe-router-topk 1",
    "softmax of all, scaled": "--moe-router-pre-softmax --moe-router-topk-scaling-factor 2.5",
    "softmax of the chosen in groups": GROUPS,
    "softmax of all in groups": f"--moe-router-pre-softmax {GROUPS}",
    "sigmoid": SIGMOID,
    "sigmoid, top 1": f"{SIGMOID} --moe-router-topk 1",
    "sigmoid, scaled": f"{SIGMOID} --moe-router-topk-scaling-factor 2.5",
    "sigmoid with bias": BIAS,
    "sigmoid with bias in groups, scaled": f"{BIAS} {GROUPS} --moe-router-topk-scaling-factor 2.5",
}
# Larger than the differences of scores, so that it changes the choice of experts.
BIASES = torch.tensor([0.5, -0.5, 0.0, 0.3, -0.3, 0.0, 0.6, -0.1])


def literal(logits: list[Tensor], moe: MoEConfig) -> dict[int, Tensor]:
    """Returns the experts of one token and their weights."""
    everyone, bias = range(len(logits)), [0.0] * len(logits)
    if moe.moe_router_score_function == "sigmoid":
        scores = [1 / (1 + torch.exp(-logit)) for logit in logits]
        bias = BIASES.tolist() if moe.moe_router_enable_expert_bias else bias
    elif moe.moe_router_pre_softmax:
        total = sum(torch.exp(logit) for logit in logits)
        scores = [torch.exp(logit) / total for logit in logits]
    else:
        scores = logits
    judged = [float(scores[e].detach()) + bias[e] for e in everyone]
    candidates = list(everyone)
    if moe.moe_router_num_groups and moe.moe_router_group_topk:
        size = len(logits) // moe.moe_router_num_groups
        groups = [list(everyone)[g * size : (g + 1) * size] for g in range(moe.moe_router_num_groups)]
        counted = moe.moe_router_topk // moe.moe_router_group_topk
        groups.sort(key=lambda group: -sum(sorted((judged[e] for e in group), reverse=True)[:counted]))
        candidates = [e for group in groups[: moe.moe_router_group_topk] for e in group]
    chosen = sorted(candidates, key=lambda e: -judged[e])[: moe.moe_router_topk]
    if moe.moe_router_score_function == "sigmoid":
        total = sum(scores[e] for e in chosen) if len(chosen) > 1 else 1
        weights = {e: scores[e] / total for e in chosen}
    elif moe.moe_router_pre_softmax:
        weights = {e: scores[e] for e in chosen}
    else:
        total = sum(torch.exp(logits[e]) for e in chosen)
        weights = {e: torch.exp(logits[e]) / total for e in chosen}
    factor = moe.moe_router_topk_scaling_factor or 1.0
    return {e: weight * factor for e, weight in weights.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_choice_weights_and_gradient_equal_the_formulas(variant: str) -> None:
    moe, found = config_of(VARIANTS[variant]).moe, router(VARIANTS[variant])
    found.load.bias.copy_(BIASES)
    x = stream(2, 2, 16, HIDDEN)
    routing = found(x)
    importance = stream(3, 32, 8)
    loss = (routing.weights_TK * importance.gather(1, routing.chosen_TK)).sum()
    loss.backward()

    weight = found.weight.detach().double().requires_grad_()
    logits = x.flatten(0, 1).double() @ weight.T
    expected = torch.zeros((), dtype=torch.float64)
    for token in range(32):
        wanted = literal(list(logits[token]), moe)
        given = dict(zip(routing.chosen_TK[token].tolist(), routing.weights_TK[token].tolist(), strict=True))
        assert given.keys() == wanted.keys(), token
        for expert, value in wanted.items():
            assert given[expert] == pytest.approx(value.item(), rel=1e-5)
            expected = expected + value * importance[token, expert]
    expected.backward()
    assert found.weight.grad is not None and weight.grad is not None
    assert torch.allclose(found.weight.grad.double(), weight.grad, rtol=1e-4, atol=1e-5)


def test_bias_changes_the_choice_but_no_weight() -> None:
    plain, biased = router(BIAS), router(BIAS)
    biased.load.bias[5] = 10.0
    x = stream(2, 1, 16, HIDDEN)
    before, after = plain(x), biased(x)
    assert not before.chosen_TK.eq(5).any(1).all()
    assert after.chosen_TK.eq(5).any(1).all()
    assert torch.allclose(after.weights_TK.sum(1), torch.ones(16)), "10 is in none of them"
    other = after.chosen_TK.ne(5)
    scores = (x[0] @ biased.weight.T).sigmoid()
    pair = scores.gather(1, after.chosen_TK)
    assert torch.allclose(after.weights_TK, pair / pair.sum(1, keepdim=True)) and other.sum() == 16


def test_a_token_stays_within_its_groups() -> None:
    size = 2
    groups = router(GROUPS)(stream(2, 4, 32, HIDDEN)).chosen_TK // size
    assert max(len(set(row)) for row in groups.tolist()) == 2
    # Without the limit, the four best experts lie in more than two groups.
    free = router("--moe-router-topk 4")(stream(2, 4, 32, HIDDEN)).chosen_TK // size
    assert max(len(set(row)) for row in free.tolist()) > 2


def test_router_in_a_precision_of_its_own() -> None:
    """Logits of 256 and 256.5 are equal in bf16."""
    x = torch.ones(1, 1, HIDDEN, dtype=torch.bfloat16)
    shares = {}
    for dtype in ("", "--moe-router-dtype fp32", "--moe-router-dtype fp64"):
        model = router(f"--moe-router-pre-softmax --moe-router-topk 1 {dtype}").to(torch.bfloat16)
        with torch.no_grad():
            model.weight.zero_()
            model.weight[:2] = 8.0
            model.weight[1, 0] = 8.5
        routing = model(x)
        assert routing.weights_TK.dtype == torch.bfloat16
        shares[dtype[-4:]] = routing.weights_TK.item()
        routing.weights_TK.sum().backward()
        assert model.weight.grad is not None and model.weight.grad.dtype == torch.bfloat16
    exact = math.exp(0.5) / (math.exp(0.5) + 1)
    assert shares[""] == 0.5
    assert shares["fp32"] == shares["fp64"] == pytest.approx(exact, abs=2**-8)


def test_fp64_is_more_exact_than_fp32() -> None:
    """In fp32, values of 10**4 that nearly cancel leave few significant digits."""
    x = 1e4 * stream(2, 1, 64, HIDDEN)
    single, double = (router(f"--moe-router-pre-softmax --moe-router-dtype {d}") for d in ("fp32", "fp64"))
    with torch.no_grad():
        for model in (single, double):
            # All experts have nearly the same weights: the logits are large, their differences small.
            model.weight.copy_(model.weight[:1] + 1e-5 * stream(4, 8, HIDDEN))
    exact = (x.double() @ double.weight.double().T).float().softmax(-1)[0]
    errors = [
        (routing.weights_TK - exact.gather(1, routing.chosen_TK)).abs().max().item()
        for routing in (single(x), double(x))
    ]
    assert errors[1] < 1e-6 < 1e-4 < errors[0]


# --- capacity ---


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0, 1.3])
@pytest.mark.parametrize("scores", ["", SIGMOID])
def test_capacity_keeps_the_largest_weights_of_each_expert(factor: float, scores: str) -> None:
    routing = router(f"{scores} --moe-expert-capacity-factor {factor}")(stream(2, 3, 16, HIDDEN))
    capacity = math.ceil(48 * 2 / 8 * factor)
    assert routing.kept_TK is not None and not routing.kept_TK.all()
    for expert in range(8):
        here = routing.chosen_TK == expert
        kept, dropped = (routing.weights_TK[here & of] for of in (routing.kept_TK, ~routing.kept_TK))
        assert len(kept) == min(int(here.sum()), capacity)
        if len(dropped):
            # Weights are compared in steps, so that rounding errors do not decide.
            assert kept.min() >= dropped.max() - 1 / 4096


def test_with_room_for_all_nothing_is_dropped() -> None:
    routing = router("--moe-expert-capacity-factor 8")(stream(2, 3, 16, HIDDEN))
    assert routing.kept_TK is not None and routing.kept_TK.all()
    assert router()(stream(2, 3, 16, HIDDEN)).kept_TK is None


def test_the_choice_is_not_one_sided() -> None:
    """Control: the router chooses all experts, so that the tests above cover them."""
    chosen = router()(stream(2, 2, 16, HIDDEN)).chosen_TK.flatten().tolist()
    assert len(Counter(chosen)) == 8

"""Tests router losses against their formulas, how often they count, and the state of the load."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pentatron.models.causal_lm import build_model
from pentatron.nn.options import ModelOptions
from pentatron.nn.recompute import EVERY_LAYER, NO_RECOMPUTE, Recompute
from pentatron.nn.router import Router, RouterLoad, loss_weights
from pentatron.parallel.axes import ContextAxis, ExpertAxis
from pentatron.parallel.collectives import Group
from tests.harness import run_distributed
from tests.nn.mixtures import BIAS, HIDDEN, SIGMOID, config_of, router, stream

EXPERTS, TOPK, BATCH, LENGTH = 8, 2, 3, 16
KINDS = ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss")
PREVIOUS = torch.tensor([0.3, 0.1, 0.05, 0.05, 0.2, 0.1, 0.15, 0.05])


def asked(kind: str, weight: float = 0.7) -> str:
    if kind == "z_loss":
        return f"--moe-z-loss-coeff {weight}"
    return f"--moe-router-load-balancing-type {kind} --moe-aux-loss-coeff {weight}"


ALL = (
    "--moe-router-load-balancing-type aux_loss seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.7 0.2 0.4 "
    "--moe-z-loss-coeff 0.1"
)


def scores_of(logits_SE: Tensor, words: str) -> Tensor:
    if "sigmoid" not in words:
        return logits_SE.softmax(-1)
    scores = logits_SE.sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def literal(kind: str, logits_BSE: Tensor, chosen_BSK: Tensor, words: str) -> Tensor:
    """Computes the formula expert by expert and sequence by sequence."""
    scores = scores_of(logits_BSE, words)

    def balance(scores_TE: Tensor, chosen_TK: Tensor) -> Tensor:
        tokens = len(scores_TE)
        total = torch.zeros((), dtype=scores_TE.dtype)
        for expert in range(EXPERTS):
            share = (chosen_TK == expert).sum() / (tokens * TOPK)
            total = total + share * scores_TE[:, expert].mean()
        return EXPERTS * total

    if kind == "aux_loss":
        return balance(scores.flatten(0, 1), chosen_BSK.flatten(0, 1))
    if kind == "seq_aux_loss":
        return torch.stack([balance(s, c) for s, c in zip(scores, chosen_BSK)]).mean()
    if kind == "global_aux_loss":
        return EXPERTS * (PREVIOUS * scores.mean((0, 1))).sum()
    return (logits_BSE.exp().sum(-1).log() ** 2).mean()


def run(model: Router, x: Tensor) -> Tensor:
    """Runs forward and backward with gradients of the router's losses only; returns the chosen experts."""
    routing = model(x)
    (routing.weights_TK * 0.0).sum().backward()
    return routing.chosen_TK.unflatten(0, x.shape[:2])


@pytest.mark.parametrize("scores", ["", SIGMOID])
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_are_those_of_the_formula(kind: str, scores: str) -> None:
    words = f"{scores} {asked(kind)}"
    model = router(words)
    model.load.previous.copy_(PREVIOUS)
    model.load.begin_step(1)
    x = stream(2, BATCH, LENGTH, HIDDEN)
    chosen = run(model, x)
    weight = model.weight.detach().clone().requires_grad_()
    expected = literal(kind, x @ weight.T, chosen, words)
    (0.7 * expected).backward()
    assert model.load.losses[kind].item() == pytest.approx(expected.item(), rel=1e-5)
    assert model.weight.grad is not None and weight.grad is not None and weight.grad.norm() > 0
    assert torch.allclose(model.weight.grad, weight.grad, rtol=1e-4, atol=1e-7)


def test_several_losses_add_up_each_with_its_weight() -> None:
    x = stream(2, BATCH, LENGTH, HIDDEN)
    together = router(ALL)
    run(together, x)
    alone = torch.zeros_like(together.weight)
    for kind, weight in loss_weights(config_of(ALL).moe).items():
        model = router(asked(kind, weight))
        run(model, x)
        assert model.weight.grad is not None
        alone += model.weight.grad
        assert torch.equal(together.load.losses[kind], model.load.losses[kind])
    assert together.weight.grad is not None
    assert torch.allclose(together.weight.grad, alone, rtol=1e-5, atol=1e-8)


def test_weights_of_losses() -> None:
    def found(words: str) -> dict[str, float]:
        return loss_weights(config_of(words).moe)

    kinds = "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff"
    assert found(f"{kinds} 0.1 0.2") == {"aux_loss": 0.1, "seq_aux_loss": 0.2}
    assert found(f"{kinds} 0.3") == {"aux_loss": 0.3, "seq_aux_loss": 0.3}
    assert found(f"{kinds} 0 0.2") == {"seq_aux_loss": 0.2}
    assert found("--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.3") == {}
    assert found("") == found("--moe-z-loss-coeff 0") == {}


def test_a_step_has_the_mean_of_its_micro_batches() -> None:
    x = stream(2, 2, LENGTH, HIDDEN)
    halves, expected = router(ALL), {}
    halves.load.begin_step(2)
    for part in (x[:1], x[1:]):
        run(halves, part)
    for kind in ("aux_loss", "z_loss"):
        values = []
        for part in (x[:1], x[1:]):
            single = router(ALL)
            single.load.begin_step(1)
            run(single, part)
            values.append(single.load.losses[kind].item())
        expected[kind] = sum(values) / 2
        assert halves.load.losses[kind].item() == pytest.approx(expected[kind])
    assert halves.load.get_buffer("counts").sum() == 2 * LENGTH * TOPK
    halves.load.begin_step(2)
    assert halves.load.losses == {} and halves.load.get_buffer("counts").sum() == 0


def test_nothing_is_counted_without_a_backward() -> None:
    model, x = router(ALL), stream(2, BATCH, LENGTH, HIDDEN)
    model(x)
    with torch.no_grad():
        model(x)
    model.eval()
    (model(x).weights_TK * 0.0).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.eq(0).all(), "losses are for training"
    assert model.load.losses == {} and model.load.get_buffer("counts").sum() == 0


def counted(recompute: Recompute) -> dict[str, Any]:
    """Returns router counts and losses of one micro-batch, and the gradients."""
    config = config_of(f"{ALL} --num-layers 3 --moe-shared-expert-intermediate-size 16")
    options = ModelOptions(recompute=recompute)
    model = build_model(config.model, 1, torch.device("cpu"), config.moe, options)
    tokens = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(5))
    model(tokens, torch.arange(16).expand(2, 16), tokens.roll(-1, 1)).sum().backward()
    loads = {number: layer.mlp.router.load for number, layer in model.layers.items()}
    found = {f"{number} numbers": load.tally() for number, load in loads.items()}
    return found | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "recompute",
    [
        EVERY_LAYER,
        Recompute(frozenset({"layers"}), chunk=2),
        Recompute(frozenset({"moe"})),
        Recompute(frozenset({"moe", "moe_act", "shared_experts"})),
    ],
    ids=["every layer", "two layers", "experts", "experts and their parts"],
)
def test_recomputed_layers_are_counted_once(recompute: Recompute) -> None:
    found, expected = counted(recompute), counted(NO_RECOMPUTE)
    assert expected["0 numbers"][:EXPERTS].sum() == 2 * 16 * TOPK
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# --- state of the router load ---


def test_the_bias_moves_towards_idle_experts() -> None:
    load = RouterLoad(config_of(f"{BIAS} --moe-router-bias-update-rate 0.25").moe)
    counts = torch.tensor([4.0, 0, 2, 2, 2, 2, 3, 1], dtype=torch.float64)
    load.finish_step(counts)
    assert load.bias.tolist() == [-0.25, 0.25, 0, 0, 0, 0, -0.25, 0.25]
    load.finish_step(counts)
    assert load.bias.tolist() == [-0.5, 0.5, 0, 0, 0, 0, -0.5, 0.5]
    assert torch.equal(load.previous, (counts / 16).float())


def test_a_biased_router_becomes_balanced() -> None:
    """Similar tokens, which prefer the same experts, are spread over experts after some steps."""
    model = router(f"{BIAS} --moe-router-bias-update-rate 0.02")
    x = stream(2, 8, 64, HIDDEN) + 3 * stream(9, HIDDEN)
    busiest = []
    for _ in range(60):
        model.load.begin_step(1)
        run(model, x)
        numbers = model.load.tally()
        busiest.append((numbers.max() / numbers.mean()).item())
        model.load.finish_step(numbers)
    assert busiest[0] > 3 and max(busiest[-5:]) < 2


def test_without_a_bias_none_is_moved_nor_kept() -> None:
    load = RouterLoad(config_of("--moe-aux-loss-coeff 0.1").moe)
    load.finish_step(torch.arange(9, dtype=torch.float64))
    assert load.bias.eq(0).all() and set(load.kept()) == {"previous"}
    assert set(RouterLoad(config_of(BIAS).moe).kept()) == {"bias", "previous"}


def test_before_the_first_step_the_load_counts_as_equal() -> None:
    load = RouterLoad(config_of(asked("global_aux_loss")).moe)
    assert load.previous.tolist() == [1 / EXPERTS] * EXPERTS
    load.finish_step(torch.zeros(EXPERTS + 1, dtype=torch.float64))
    assert torch.isfinite(load.previous).all(), "a step without tokens"


# --- ranks that share a micro-batch ---


def on_a_part(words: str) -> tuple[Tensor, Tensor]:
    group = Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    model = router(words, ExpertAxis(sequence=group))
    run(model, stream(2, BATCH, LENGTH, HIDDEN).chunk(group.size, 1)[group.rank])
    assert model.weight.grad is not None
    return model.load.tally(), model.weight.grad


@pytest.mark.parametrize("words", [ALL, f"{SIGMOID} {ALL}"])
def test_parts_of_a_micro_batch_add_up_to_the_whole(words: str) -> None:
    parts = run_distributed(on_a_part, world=2, words=words)
    whole = router(words)
    run(whole, stream(2, BATCH, LENGTH, HIDDEN))
    assert whole.weight.grad is not None
    assert torch.allclose(parts[0][0] + parts[1][0], whole.load.tally(), rtol=1e-6)
    assert torch.allclose(parts[0][1] + parts[1][1], whole.weight.grad, rtol=1e-4, atol=1e-7)


def kept_on_a_part() -> tuple[Tensor, Tensor]:
    """Returns the positions of this rank's tokens, and which of them are kept."""
    group = Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    context = ContextAxis(group)
    model = router("--moe-expert-capacity-factor 0.5", ExpertAxis(sequence=group), context)
    kept = model(context.own_sequence(stream(2, 1, LENGTH, HIDDEN))).kept_TK
    assert kept is not None
    return context.positions(LENGTH // group.size, torch.device("cpu")), kept


def test_the_same_tokens_are_dropped_where_ranks_share_a_micro_batch() -> None:
    expected = router("--moe-expert-capacity-factor 0.5")(stream(2, 1, LENGTH, HIDDEN)).kept_TK
    for positions, kept in run_distributed(kept_on_a_part, world=2):
        assert torch.equal(kept, expected[positions])

"""Mixtures of experts against the models of `transformers`: small ones with random weights, copied into ours."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from pentatron.config.run import RunConfig
from pentatron.models.causal_lm import CausalLM, build_model
from tests.support import LLAMA, resolved

CPU = torch.device("cpu")
WORDS, HIDDEN, HEADS, GROUPS, WIDTH, LAYERS = 61, 32, 4, 2, 8, 2
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "num_hidden_layers": LAYERS,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "attn_implementation": "eager",
}
OURS = (
    f"{LLAMA} --num-query-groups {GROUPS} --layernorm-epsilon 1e-6 --untie-embeddings-and-output-weights "
    "--make-vocab-size-divisible-by 1"
)


def mixtral() -> nn.Module:
    return MixtralForCausalLM(
        MixtralConfig(**SIZES, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2)
    )


def qwen2() -> nn.Module:
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
    shared = {"shared_expert_intermediate_size": 40, "intermediate_size": 48, "norm_topk_prob": False}
    # Its first layer is dense; every second layer has experts.
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES, **experts, **shared, decoder_sparse_step=2))


def qwen3() -> nn.Module:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    heads = {"head_dim": 12, "intermediate_size": 48, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, **heads))


FAMILIES = {
    "mixtral": (mixtral, "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24"),
    "qwen2": (
        qwen2,
        "--num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 16 --ffn-hidden-size 48 --moe-layer-freq [0,1] "
        "--add-qkv-bias --moe-router-pre-softmax --moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate",
    ),
    "qwen3": (
        qwen3,
        "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 16 --qk-layernorm --kv-channels 12 "
        "--moe-router-dtype fp32",
    ),
}


def theirs(family: str) -> nn.Module:
    """With weights that are none of the usual: norms of one and biases of zero would hide mistakes about them."""
    model = FAMILIES[family][0]()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.2 * torch.randn(p.shape, generator=generator) + (p.dim() == 1))
    return model.float().train()


def ours(family: str, more: str = "") -> tuple[CausalLM, RunConfig]:
    config = resolved(f"{OURS} {FAMILIES[family][1]} {more}").config
    return build_model(config.model, 1, CPU, moe=config.moe), config


def counterparts(their: nn.Module, config: RunConfig, of: str) -> Iterator[tuple[str, Tensor]]:
    """Names of ours and what `transformers` has for them; `of`: the weights (`data`) or their gradients (`grad`)."""

    def get(name: str) -> Tensor:
        found: Tensor = getattr(their.get_parameter(name), of)
        return found

    yield "embedding.word.weight", get("model.embed_tokens.weight")
    yield "final_norm.weight", get("model.norm.weight")
    yield "head.weight", get("lm_head.weight")
    for i in range(LAYERS):
        yield f"layers.{i}.input_norm.weight", get(f"model.layers.{i}.input_layernorm.weight")
        yield f"layers.{i}.mlp_norm.weight", get(f"model.layers.{i}.post_attention_layernorm.weight")
        attention = f"model.layers.{i}.self_attn"
        yield f"layers.{i}.attention.linear_proj.weight", get(f"{attention}.o_proj.weight")
        for kind in ("weight", "bias") if config.model.add_qkv_bias else ("weight",):
            parts = [get(f"{attention}.{part}_proj.{kind}").unflatten(0, (GROUPS, -1)) for part in "qkv"]
            # By group: its queries, its key, its value.
            yield f"layers.{i}.attention.linear_qkv.{kind}", torch.cat(parts, 1).flatten(0, 1)
        if config.model.qk_layernorm:
            yield f"layers.{i}.attention.q_norm.weight", get(f"{attention}.q_norm.weight")
            yield f"layers.{i}.attention.k_norm.weight", get(f"{attention}.k_norm.weight")
        own, other = f"layers.{i}.mlp", f"model.layers.{i}.mlp"
        if i not in config.layers_with_experts:
            yield from mlp(own, other, get)
            continue
        yield f"{own}.router.weight", get(f"{other}.gate.weight")
        # One matrix for all experts: [expert, gate rows then up rows, hidden], as here.
        yield f"{own}.experts.linear_fc1.weight", get(f"{other}.experts.gate_up_proj")
        yield f"{own}.experts.linear_fc2.weight", get(f"{other}.experts.down_proj")
        if config.moe.moe_shared_expert_intermediate_size:
            yield from mlp(f"{own}.shared.mlp", f"{other}.shared_expert", get)
            yield f"{own}.shared.gate.weight", get(f"{other}.shared_expert_gate.weight")


def mlp(own: str, other: str, get: Any) -> Iterator[tuple[str, Tensor]]:
    yield (
        f"{own}.linear_fc1.weight",
        torch.cat([get(f"{other}.gate_proj.weight"), get(f"{other}.up_proj.weight")]),
    )
    yield f"{own}.linear_fc2.weight", get(f"{other}.down_proj.weight")


def pair(family: str, more: str = "") -> tuple[nn.Module, CausalLM, RunConfig]:
    their = theirs(family)
    model, config = ours(family, more)
    weights = dict(counterparts(their, config, "data"))
    assert set(weights) == {name for name, _ in model.named_parameters()}, "every weight has a counterpart"
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    return their, model, config


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens, labels = torch.randint(0, WORDS, (2, 2, 16), generator=generator)
    return tokens, torch.arange(16).expand(2, 16), labels


def gap(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_every_gradient(family: str) -> None:
    their, model, config = pair(family)
    tokens, positions, labels = batch()
    logits = their(tokens).logits
    assert torch.allclose(
        model(tokens, positions), logits, rtol=0, atol=1e-5 * float(logits.detach().abs().max())
    )
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    expected.backward()
    loss = model(tokens, positions, labels).mean()
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    gradients = dict(counterparts(their, config, "grad"))
    for name, p in model.named_parameters():
        assert p.grad is not None and gradients[name].norm() > 0, name
        assert gap(p.grad, gradients[name]) < 1e-5, name


def test_the_comparison_can_fail() -> None:
    """With the softmax on the other side of the top-k everything looks alike and nothing is the same."""
    their, model, _ = pair("qwen2")
    wrong = ours("qwen2", "--no-moe-router-pre-softmax")[0]
    wrong.load_state_dict(model.state_dict())
    tokens, positions, _ = batch()
    assert gap(model(tokens, positions), their(tokens).logits) < 1e-5
    assert gap(wrong(tokens, positions), their(tokens).logits) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_balancing_loss_is_the_literal_formula_of_their_router(family: str) -> None:
    """E / (K T²) · Σ_e (tokens that chose e) · (Σ of its scores), layer by layer, on what their routers say.

    Their own `load_balancing_loss_func` takes the tokens of all layers together, so it is another loss.
    """
    weight = 0.3
    their, model, config = pair(family, f"--moe-aux-loss-coeff {weight}")
    tokens, positions, labels = batch()
    count, topk = config.moe.num_experts, config.moe.moe_router_topk
    output = their(tokens, output_router_logits=True)
    layers = [logits for logits in output.router_logits if logits is not None]
    assert count is not None and len(layers) == len(config.layers_with_experts)
    losses = []
    for logits in layers:
        scores = logits.softmax(-1)
        chosen = F.one_hot(scores.topk(topk, -1).indices, count).sum((0, 1))
        total = torch.zeros(())
        for expert in range(count):
            total = total + chosen[expert] * scores[:, expert].sum()
        losses.append(total * count / (topk * len(scores) ** 2))
    lm_loss = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    (lm_loss + weight * torch.stack(losses).sum()).backward()

    model(tokens, positions, labels).mean().backward()
    for layer, expected in zip(config.layers_with_experts, losses):
        load = model.layers[str(layer)].mlp.router.load
        assert load.losses["aux_loss"].item() == pytest.approx(expected.item(), rel=1e-5)
    for name, expected_gradient in counterparts(their, config, "grad"):
        assert gap(model.get_parameter(name).grad, expected_gradient) < 1e-5, name

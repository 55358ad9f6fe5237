"""Compares mixture-of-experts models with `transformers`, in addition to tests/hf/test_oracle.py."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pentatron.hf.tensor_names import tensor_links
from pentatron.models.causal_lm import CausalLM, build_model
from pentatron.parallel.sharding import region
from pentatron.settings.model import MoEConfig, TransformerConfig, moe_layers
from tests.hf.support import CPU, EXPERTS, WORDS, batch, gap, ours_from, save, theirs

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    # The first layer is dense; every second layer has experts.
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
}


def pair(
    family: str, folder: Path, **changes: Any
) -> tuple[nn.Module, CausalLM, TransformerConfig, MoEConfig]:
    """Returns the model of `transformers` and ours with the same weights and changed expert settings."""
    their = theirs(family, **FAMILIES[family])
    right, config, moe = ours_from(save(their, folder))
    moe = replace(moe, **changes)
    model = build_model(config, 1, CPU, moe=moe)
    model.load_state_dict(right.state_dict())
    return their.train(), model.train(), config, moe


def test_the_side_of_the_top_k_matters(tmp_path: Path) -> None:
    """Control: softmax after instead of before the top-k gives other results."""
    their, model, _, moe = pair("qwen2_moe", tmp_path / "right")
    wrong = pair("qwen2_moe", tmp_path / "wrong", moe_router_pre_softmax=not moe.moe_router_pre_softmax)[1]
    tokens, positions, _ = batch()
    assert gap(model(tokens, positions)[..., :WORDS], their(tokens).logits) < 1e-5
    assert gap(wrong(tokens, positions)[..., :WORDS], their(tokens).logits) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_balancing_loss_is_the_literal_formula_of_their_router(family: str, tmp_path: Path) -> None:
    """Compares balancing losses and gradients with the formula, layer by layer.

    A layer's loss is E / (K T²) · Σ_e (tokens that chose e) · (Σ of its scores), computed from the outputs of
    the routers of `transformers`. Their `load_balancing_loss_func` combines the tokens of all layers, so it
    is another loss.
    """
    weight = 0.3
    their, model, config, moe = pair(family, tmp_path, moe_aux_loss_coeff=(weight,))
    tokens, positions, labels = batch()
    count, topk = moe.num_experts, moe.moe_router_topk
    with_experts = [i for i, has in enumerate(moe_layers(moe.moe_layer_freq, config.num_layers)) if has]
    output = their(tokens, output_router_logits=True)
    layers = [logits for logits in output.router_logits if logits is not None]
    assert count is not None and len(layers) == len(with_experts)
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
    for layer, expected in zip(with_experts, losses):
        load = model.layers[str(layer)].mlp.router.load
        assert load.losses["aux_loss"].item() == pytest.approx(expected.item(), rel=1e-5)
    gradients = {name: p.grad for name, p in their.named_parameters()}
    for link in tensor_links(family, config, moe, gradients):
        found = link.to_theirs(region(model.get_parameter(link.ours).grad, link.at, link.size))
        wanted = region(gradients[link.theirs], link.start, link.their_size)
        assert (found - wanted).norm() <= 1e-5 * gradients[link.theirs].norm(), link

"""Compares the model with a slow reference written from the formulas."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pentatron.models.causal_lm import CausalLM, build_model
from pentatron.nn.loss import CrossEntropy
from pentatron.nn.options import DEFAULT_OPTIONS, ModelOptions
from pentatron.settings.model import TransformerConfig
from tests.support import LLAMA, model_config

FAMILIES = {
    "gpt": "",
    "llama": f"{LLAMA} --untie-embeddings-and-output-weights",
    "llama-grouped": f"{LLAMA} --group-query-attention --num-query-groups 2",
    "qwen2.5": f"{LLAMA} --add-qkv-bias --num-query-groups 1",
    "qwen3": f"{LLAMA} --qk-layernorm --num-query-groups 2 --kv-channels 12",
    "interleaved": f"{LLAMA} --rotary-interleaved --rotary-percent 0.5",
}


def build(
    words: str, seed: int = 1, options: ModelOptions = DEFAULT_OPTIONS
) -> tuple[CausalLM, TransformerConfig]:
    config = model_config(words)
    model = build_model(config, seed, torch.device("cpu"), options=options)
    with torch.no_grad():
        # Norm weights of one and biases of zero would hide mistakes.
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
    return model.double(), config


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 61, (2, 16), generator=generator)
    return tokens, torch.arange(16).expand(2, 16), torch.randint(0, 61, (2, 16), generator=generator)


def reference_norm(x: Tensor, p: dict[str, Tensor], name: str, config: TransformerConfig) -> Tensor:
    if config.normalization == "RMSNorm":
        return x / (x.square().mean(-1, keepdim=True) + config.layernorm_epsilon).sqrt() * p[f"{name}.weight"]
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + config.layernorm_epsilon).sqrt()
    return centred / scale * p[f"{name}.weight"] + p[f"{name}.bias"]


def reference_rotate(x: Tensor, position: int, config: TransformerConfig) -> Tensor:
    """Rotates one head vector at one position, pair by pair."""
    width = int(config.kv_channels * config.rotary_percent)
    out = x.clone()
    for i in range(width // 2):
        a, b = (2 * i, 2 * i + 1) if config.rotary_interleaved else (i, i + width // 2)
        angle = position * config.rotary_base ** (-2 * i / width)
        out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        out[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
    return out


def reference_attention(x: Tensor, p: dict[str, Tensor], name: str, config: TransformerConfig) -> Tensor:
    """Computes attention of one sequence, one head at a time."""
    heads, groups, width = config.num_attention_heads, config.num_query_groups, config.kv_channels
    per_group = heads // groups
    qkv = x @ p[f"{name}.linear_qkv.weight"].T + p.get(f"{name}.linear_qkv.bias", 0)
    outputs = []
    for head in range(heads):
        start = (head // per_group) * (per_group + 2) * width
        at = start + (head % per_group) * width
        q = qkv[:, at : at + width]
        k = qkv[:, start + per_group * width : start + (per_group + 1) * width]
        v = qkv[:, start + (per_group + 1) * width : start + (per_group + 2) * width]
        if config.qk_layernorm:
            q, k = (
                reference_norm(q, p, f"{name}.q_norm", config),
                reference_norm(k, p, f"{name}.k_norm", config),
            )
        if config.position_embedding_type == "rope":
            q = torch.stack([reference_rotate(row, i, config) for i, row in enumerate(q)])
            k = torch.stack([reference_rotate(row, i, config) for i, row in enumerate(k)])
        scores = q @ k.T / math.sqrt(width)
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        outputs.append(scores.softmax(-1) @ v)
    return torch.cat(outputs, -1) @ p[f"{name}.linear_proj.weight"].T + p.get(f"{name}.linear_proj.bias", 0)


def reference_mlp(x: Tensor, p: dict[str, Tensor], name: str, config: TransformerConfig) -> Tensor:
    inner = x @ p[f"{name}.linear_fc1.weight"].T + p.get(f"{name}.linear_fc1.bias", 0)
    if config.gated_linear_unit:
        gate, up = inner[:, : inner.shape[1] // 2], inner[:, inner.shape[1] // 2 :]
        inner = gate / (1 + torch.exp(-gate)) * up
    else:
        inner = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
    return inner @ p[f"{name}.linear_fc2.weight"].T + p.get(f"{name}.linear_fc2.bias", 0)


def reference_losses(
    tokens: Tensor, labels: Tensor, p: dict[str, Tensor], config: TransformerConfig
) -> Tensor:
    rows = []
    for sequence, wanted in zip(tokens, labels):
        x = p["embedding.word.weight"][sequence]
        if config.position_embedding_type == "learned_absolute":
            x = x + p["embedding.position.weight"][: len(sequence)]
        for i in range(config.num_layers):
            x = x + reference_attention(
                reference_norm(x, p, f"layers.{i}.input_norm", config), p, f"layers.{i}.attention", config
            )
            x = x + reference_mlp(
                reference_norm(x, p, f"layers.{i}.mlp_norm", config), p, f"layers.{i}.mlp", config
            )
        x = reference_norm(x, p, "final_norm", config)
        head = p.get("head.weight", p["embedding.word.weight"])
        logits = (x @ head.T)[:, : config.vocab_size]
        rows.append(logits.logsumexp(-1) - logits[torch.arange(len(wanted)), wanted])
    return torch.stack(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_equal_the_reference(family: str) -> None:
    model, config = build(FAMILIES[family])
    tokens, positions, labels = batch()
    losses = model(tokens, positions, labels)
    losses.sum().backward()
    twin = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = reference_losses(tokens, labels, twin, config)
    expected.sum().backward()
    # Norms, rotation and loss are computed in fp32 by design, which sets the tolerance.
    assert torch.allclose(losses.double(), expected, atol=2e-5)
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        gap = (p.grad - twin[name].grad).norm() / twin[name].grad.norm().clamp(min=1e-3)
        assert gap < 2e-5, f"{name}: {gap}"


def test_the_comparison_can_fail() -> None:
    model, config = build(FAMILIES["qwen3"])
    tokens, positions, labels = batch()
    twin = {name: p.detach().clone() for name, p in model.named_parameters()}
    twin["layers.1.attention.q_norm.weight"] *= 1.01
    assert not torch.allclose(
        model(tokens, positions, labels).double(), reference_losses(tokens, labels, twin, config), atol=2e-5
    )


@pytest.mark.parametrize("family", ["gpt", "qwen3"])
def test_no_position_sees_the_future(family: str) -> None:
    model, _ = build(FAMILIES[family])
    tokens, positions, _ = batch()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 61
    before, after = model(tokens, positions), model(changed, positions)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    words = f"{LLAMA} --untie-embeddings-and-output-weights"
    small, _ = build(words)
    deep, _ = build(f"{words} --num-layers 5")
    other, _ = build(words, seed=2)
    ours, theirs = dict(small.named_parameters()), dict(deep.named_parameters())
    name = "layers.1.attention.linear_qkv.weight"
    assert torch.equal(ours[name], theirs[name])
    assert not torch.equal(ours[name], dict(other.named_parameters())[name])
    assert not torch.equal(ours["layers.0.attention.linear_qkv.weight"], ours[name])


def test_initial_weights_have_the_asked_spread() -> None:
    config = model_config("--hidden-size 256 --vocab-size 1000 --init-method-std 0.02")
    model = build_model(config, 3, torch.device("cpu"))
    p = dict(model.named_parameters())
    assert p["layers.0.mlp.linear_fc1.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert p["layers.0.mlp.linear_fc2.weight"].std().item() == pytest.approx(
        0.02 / math.sqrt(2 * 2), rel=0.02
    )
    assert p["layers.0.input_norm.weight"].eq(1).all() and p["layers.0.mlp.linear_fc2.bias"].eq(0).all()


def test_vocabulary_padding_changes_nothing() -> None:
    plain, _ = build("--make-vocab-size-divisible-by 1")
    padded, config = build("--make-vocab-size-divisible-by 128")
    assert config.padded_vocab_size == 128 and padded.embedding.word.weight.shape[0] == 128
    tokens, positions, labels = batch()
    assert torch.equal(plain(tokens, positions, labels), padded(tokens, positions, labels))
    padded(tokens, positions, labels).sum().backward()
    assert padded.embedding.word.weight.grad[61:].abs().sum() == 0


def test_attention_kernels_agree() -> None:
    outputs = []
    for backend in ("auto", "math", "flash"):
        config = model_config(LLAMA)
        model = build_model(config, 1, torch.device("cpu"), options=ModelOptions(backend))
        tokens, positions, _ = batch()
        outputs.append(model(tokens, positions))
    assert torch.allclose(outputs[0], outputs[1], atol=1e-5) and torch.allclose(
        outputs[0], outputs[2], atol=1e-5
    )


def test_cross_entropy_is_torchs() -> None:
    model, _ = build("")
    tokens, positions, labels = batch()
    logits = model(tokens, positions)[..., :61].float()
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(2, 16)
    assert torch.equal(model(tokens, positions, labels), expected)


@pytest.mark.parametrize(
    "words", ["", f"{LLAMA} --untie-embeddings-and-output-weights"], ids=["tied", "untied"]
)
@pytest.mark.parametrize("chunk", [7, 100])
def test_a_fused_cross_entropy_changes_rounding_alone(words: str, chunk: int) -> None:
    """Compares every gradient, including the tied table's, which comes from the embedding and the head."""
    tokens, positions, labels = batch()
    weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(1))
    found = []
    for how in (CrossEntropy("off"), CrossEntropy("on", "native", chunk)):
        model, _ = build(words, options=ModelOptions(cross_entropy=how))
        losses = model(tokens, positions, labels)
        (losses * weights).sum().backward()
        found.append((losses.detach(), [p.grad for p in model.parameters()]))
        logits = model(tokens, positions)
        assert logits.shape[-1] >= 61 and logits.requires_grad
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)

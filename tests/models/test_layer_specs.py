"""Tests layer specs of the families, and models built from them under Megatron's names."""

import dataclasses
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpt_builders import gpt_builder
from model_provider import model_provider
from pentatron.errors import UserError
from pentatron.megatron.gpt_model import GPTModel
from pentatron.megatron.state import process_groups
from pentatron.models.causal_lm import CausalLM, build_model
from pentatron.models.layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    spec_of,
)
from pentatron.nn.linear import ColumnParallelLinear
from pentatron.nn.mlp import MLP
from pentatron.nn.moe import MoE
from pentatron.nn.norm import LayerNorm, RMSNorm
from pentatron.nn.spec import IdentityOp, ModuleSpec, TransformerBlockSubmodules
from pentatron.nn.transformer_layer import TransformerLayer
from pentatron.parallel.sharding import sharded_parameters
from pentatron.settings.core_config import CoreTransformerConfig, arguments, core_transformer_config_from_args
from tests.harness import run_distributed
from tests.parity.trajectory import here
from tests.support import LLAMA, resolved

CPU = torch.device("cpu")
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 24"
QWEN3 = f"{LLAMA} --qk-layernorm --num-query-groups 2 --untie-embeddings-and-output-weights"


def core(words: str = "") -> CoreTransformerConfig:
    return core_transformer_config_from_args(resolved(words).config)


@pytest.mark.parametrize(
    ("words", "norm", "heads", "mlp"),
    [
        ("", LayerNorm, IdentityOp, MLP),
        (LLAMA, RMSNorm, IdentityOp, MLP),
        (QWEN3, RMSNorm, RMSNorm, MLP),
        (f"{LLAMA} {EXPERTS}", RMSNorm, IdentityOp, MoE),
    ],
)
def test_a_family_is_a_table(words: str, norm: type, heads: type, mlp: type) -> None:
    config = core(words)
    layer = spec_of(config, config.moe, 0)
    assert layer.module is TransformerLayer
    slots, attention = layer.submodules, layer.submodules.self_attention.submodules
    assert (slots.input_layernorm, slots.pre_mlp_layernorm, slots.mlp.module) == (norm, norm, mlp)
    assert (attention.q_layernorm, attention.k_layernorm, attention.linear_qkv) == (
        heads,
        heads,
        ColumnParallelLinear,
    )


def test_settings_and_modules_of_qwen() -> None:
    switches = ("normalization", "gated_linear_unit", "add_bias_linear", "add_qkv_bias", "qk_layernorm")
    for name, expected in {
        "qwen2.5-7b": ("RMSNorm", True, False, True, False),
        "qwen3-8b": ("RMSNorm", True, False, False, True),
    }.items():
        config = core(f"--preset {name}")
        assert tuple(getattr(config, switch) for switch in switches) == expected
        attention = spec_of(config, config.moe, 0).submodules.self_attention.submodules
        assert attention.q_layernorm is (RMSNorm if config.qk_layernorm else IdentityOp)


def test_the_local_spec_is_the_configured_one() -> None:
    config = core(QWEN3)
    local = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    assert local == spec_of(config, config.moe, 1)
    assert local != get_gpt_layer_local_spec(qk_layernorm=True), "that one has LayerNorm, as Megatron's has"


def test_a_block_has_experts_where_the_configuration_has_them() -> None:
    config = core(f"{LLAMA} {EXPERTS} --num-layers 3 --moe-layer-freq [0]*1+[1]*2")
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, normalization="RMSNorm")
    assert [spec.submodules.mlp.module for spec in block.layer_specs] == [MLP, MoE, MoE]
    assert block.layer_norm is RMSNorm


def test_arguments_without_effect_warn() -> None:
    with pytest.warns(UserWarning, match="use_kitchen has no effect"):
        get_gpt_layer_with_transformer_engine_spec(use_kitchen=True)
    with pytest.warns(UserWarning, match="use_te_op_fuser has no effect"):
        get_gpt_layer_with_transformer_engine_spec(use_te_op_fuser=True)
    with pytest.warns(UserWarning, match="moe_grouped_gemm has no effect in a layer without experts"):
        get_gpt_layer_local_spec(moe_grouped_gemm=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_gpt_layer_with_transformer_engine_spec(num_experts=4, moe_grouped_gemm=True, qk_layernorm=True)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (partial(get_gpt_layer_local_spec, multi_latent_attention=True), "multi-latent attention is not av"),
        (partial(get_gpt_layer_with_transformer_engine_spec, qk_l2_norm=True), "the L2 norm of queries and"),
        (partial(get_gpt_decoder_block_spec, core(), False, qk_l2_norm=True), "the L2 norm of queries and"),
        (
            partial(get_gpt_layer_local_spec, normalization="BatchNorm"),
            "one of RMSNorm, LayerNorm, not Batch",
        ),
    ],
)
def test_unavailable_spec_arguments_are_refused(made: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        made()


# --- the model under Megatron's name ---


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(5))
    return tokens, torch.arange(16).expand(2, 16), tokens.roll(-1, 1)


def same_model(model: CausalLM, words: str) -> None:
    """Checks that names, initial weights, losses and gradients equal those of training, bit for bit."""
    config = resolved(words).config
    expected = build_model(config.model, config.run.seed, CPU, moe=config.moe)
    tokens, positions, labels = batch()
    losses = model(tokens, positions, None, labels=labels)
    assert losses.shape == tokens.shape
    assert torch.equal(losses, expected(tokens, positions, labels))
    words_alone = slice(config.model.vocab_size)
    found = model(tokens, positions, None)
    assert torch.equal(found[..., words_alone], expected(tokens, positions)[..., words_alone])
    losses.sum().backward()
    expected(tokens, positions, labels).sum().backward()
    mine = {h.name: h.parameter.grad for h in sharded_parameters(model)}
    theirs = {h.name: h.parameter.grad for h in sharded_parameters(expected)}
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def qwen_builder(
    args: SimpleNamespace,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """A user's builder, written as in the guide."""
    if config is None:
        config = core_transformer_config_from_args(args)
    assert config.normalization == "RMSNorm", "Qwen requires RMSNorm"
    assert config.gated_linear_unit, "Qwen requires SwiGLU"
    if args.transformer_impl == "transformer_engine":
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=args.num_experts,
            moe_grouped_gemm=args.moe_grouped_gemm,
            qk_layernorm=args.qk_layernorm,
            moe_use_legacy_grouped_gemm=args.moe_use_legacy_grouped_gemm,
        )
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=args.num_experts, qk_layernorm=args.qk_layernorm, normalization=args.normalization
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


@pytest.mark.parametrize(
    "words", [QWEN3, f"{QWEN3} --transformer-impl transformer_engine", f"{LLAMA} {EXPERTS}"]
)
def test_a_builder_of_the_user_plugs_in(words: str) -> None:
    model = partial(model_provider, qwen_builder)(config=resolved(words).config)
    same_model(model, words)


def test_a_builder_may_insist() -> None:
    with pytest.raises(AssertionError, match="Qwen requires RMSNorm"):
        model_provider(qwen_builder, config=resolved("").config)
    with pytest.raises(AssertionError, match="Qwen requires SwiGLU"):
        model_provider(qwen_builder, config=resolved("--normalization RMSNorm").config)


@pytest.mark.parametrize(
    "words",
    [
        "",
        QWEN3,
        f"{LLAMA} --transformer-impl transformer_engine",
        f"{LLAMA} {EXPERTS} --moe-layer-freq [0]*1+[1]*1",
    ],
)
def test_the_builder_makes_what_training_builds(words: str) -> None:
    config = resolved(words).config
    same_model(model_provider(gpt_builder, config=config), words)
    assert isinstance(gpt_builder(arguments(config), True, True), GPTModel)


def test_the_older_form_of_the_provider() -> None:
    config = resolved("--num-layers 3").config
    assert len(model_provider(True, True, config=config).layers) == 3
    assert len(model_provider(pre_process=True, post_process=True, config=config).layers) == 3
    with pytest.raises(UserError, match="there is no run yet"):
        model_provider(True, True)


def test_arguments_count_more_than_the_configuration() -> None:
    model = GPTModel(
        core(LLAMA),
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=128,
        max_sequence_length=16,
        share_embeddings_and_output_weights=False,
        position_embedding_type="learned_absolute",
    )
    names = {name for name, _ in model.named_parameters()}
    assert {"head.weight", "embedding.position.weight"} <= names and model.rope is None


def test_masks_may_be_causal_or_of_documents() -> None:
    model = model_provider(gpt_builder, config=resolved("").config)
    tokens, positions, _ = batch()
    causal = torch.ones(1, 1, 16, 16).triu(1).bool()
    assert torch.equal(model(tokens, positions, causal), model(tokens, positions, None))
    documents = causal.repeat(len(tokens), 1, 1, 1)
    documents[0, :, 8:, :8] = True
    documents[0, :, 9:, :9] = True
    starts = ((0, 8, 9), *((0,) for _ in tokens[1:]))
    expected = CausalLM.forward(model, tokens, positions, documents=starts)
    assert torch.equal(model(tokens, positions, documents)[..., :61], expected[..., :61])
    assert not torch.equal(expected[..., :61], model(tokens, positions, None)[..., :61])
    window, padding, bidirectional = causal.clone(), documents.clone(), torch.zeros_like(causal)
    window[..., 8, 0], padding[..., 3] = True, True
    for other in (window, padding, bidirectional, causal[..., :8, :8]):
        with pytest.raises(
            UserError, match=r"attention_mask is neither the causal one .* nor one that also hides"
        ):
            model(tokens, positions, other)
    model.split_sequences = True
    with pytest.raises(UserError, match="covers only a part of each sequence"):
        model(tokens, positions, documents)


def wrong(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "config": core(),
        "transformer_layer_spec": get_gpt_layer_local_spec(),
        "vocab_size": 128,
        "max_sequence_length": 16,
    }
    return lambda: GPTModel(**{**given, **changes})


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (wrong(vocab_size=60), "vocab_size=60 is smaller than the vocabulary of 61"),
        (wrong(pre_process=False), "without pg_collection a model is whole"),
        (wrong(vp_stage=1), "without pg_collection a model is whole"),
        (
            wrong(transformer_layer_spec=get_gpt_layer_local_spec(num_experts=4)),
            "4 experts in layer 1, .* none",
        ),
        (
            wrong(config=core(EXPERTS), transformer_layer_spec=get_gpt_layer_local_spec(num_experts=8)),
            "8 experts in layer 1, the configuration has 4",
        ),
        (
            wrong(
                config=core(f"{EXPERTS} --moe-layer-freq [1]*1+[0]*1"),
                transformer_layer_spec=get_gpt_layer_local_spec(num_experts=4),
            ),
            r"experts into layer 2, which has none by --moe-layer-freq \[1\]\*1\+\[0\]\*1",
        ),
        (
            wrong(transformer_layer_spec=TransformerBlockSubmodules((get_gpt_layer_local_spec(),))),
            "the block spec has 1 layers, the configuration 2",
        ),
        (
            wrong(transformer_layer_spec=ModuleSpec(TransformerLayer)),
            r"ModuleSpec\(TransformerLayer\): TransformerLayer cannot be built from .*'submodules'",
        ),
        (
            wrong(config=dataclasses.replace(core(), num_attention_heads=None)),
            "the configuration has no num_attention_heads",
        ),
    ],
)
def test_a_wrong_model_gets_a_sentence(made: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        made()


# --- stages ---

STAGES = f"{QWEN3} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 8"


def stage_on_a_rank() -> torch.Tensor | None:
    """Runs forward through the stages of the user's builder; ranks of the last stage return logits."""
    config = resolved(STAGES, 4).config
    world = here(config)
    groups = process_groups(config, world)
    first, last = world.at.pipeline == 0, world.at.pipeline == 1
    with pytest.raises(UserError, match="do not fit this stage: in the layout it has"):
        model_provider(qwen_builder, not first, not last, config=config, pg_collection=groups)
    model = model_provider(qwen_builder, first, last, config=config, pg_collection=groups)
    assert list(model.layers) == ["0" if first else "1"]
    tokens, positions, _ = batch()
    received = torch.empty(2, 16, config.model.hidden_size)
    neighbour = (dist.get_rank() + 2) % 4
    with torch.no_grad():
        if first:
            dist.send(model(tokens, positions, None), neighbour)
            return None
        dist.recv(received, neighbour)
        model.set_input_tensor(received)
        made: torch.Tensor = model(tokens, positions, None)
        return made


def test_a_builder_makes_the_stage_of_its_rank() -> None:
    parts = [part for part in run_distributed(stage_on_a_rank, world=4) if part is not None]
    config = resolved(QWEN3).config
    tokens, positions, _ = batch()
    expected = build_model(config.model, config.run.seed, CPU)(tokens, positions)
    made = torch.cat(parts, -1)[..., :61]
    torch.testing.assert_close(made, expected[..., :61], rtol=1e-5, atol=1e-6)

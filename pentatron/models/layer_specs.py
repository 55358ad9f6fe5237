"""The model families as tables: which class stands in which slot of a layer.

What a family chooses by size or switch (widths, biases, a gated MLP, positions) is in its configuration; what it chooses
by class is here. The names and parameters of the first three functions are Megatron's.
"""

import inspect
import warnings
from typing import Any

import torch

from pentatron.errors import UserError
from pentatron.nn.attention import DotProductAttention, SelfAttention
from pentatron.nn.linear import ColumnParallelLinear, RowParallelLinear
from pentatron.nn.mlp import MLP
from pentatron.nn.moe import MoE
from pentatron.nn.norm import NORMS, ConfiguredNorm
from pentatron.nn.spec import (
    AttnMaskType,
    IdentityOp,
    MLPSubmodules,
    ModuleSpec,
    SelfAttentionSubmodules,
    Slot,
    TransformerBlockSubmodules,
    TransformerLayerSubmodules,
    build_module,
    import_named,
    importing_from_here,
)
from pentatron.nn.transformer_layer import TransformerLayer, dropout_add
from pentatron.parallel.shards import held_parameters
from pentatron.settings.core import CoreTransformerConfig
from pentatron.settings.model import MoEConfig, TransformerConfig, moe_layers

# Layers of the user's own: `--spec MODULE FUNCTION`.


def user_spec(config: CoreTransformerConfig) -> ModuleSpec | TransformerBlockSubmodules | None:
    """What the user's function returns: it gets the configuration if it takes an argument. None without --spec."""
    if not config.spec:
        return None
    module, name = config.spec
    what = f"--spec {module} {name}"
    found = import_named(module, name, what)
    if callable(found):
        takes_config = bool(inspect.signature(found).parameters)
        with importing_from_here():
            found = found(config) if takes_config else found()
    if not isinstance(found, ModuleSpec | TransformerBlockSubmodules):
        raise UserError(
            f"{what} gives a {type(found).__name__}; it must give a ModuleSpec of a layer, or "
            "TransformerBlockSubmodules with one for each"
        )
    return found


def check_layers(config: CoreTransformerConfig, block: TransformerBlockSubmodules) -> None:
    """Builds each kind of layer once, without memory: what is wrong with a spec is found before anything starts."""
    tried: list[ModuleSpec] = []
    for number, spec in enumerate(block.layer_specs, 1):
        if any(spec is other for other in tried):
            continue
        tried.append(spec)
        with torch.device("meta"):
            layer = build_module(spec, config=config, layer_number=number)
        try:
            held_parameters(layer)
        except TypeError as error:
            raise UserError(
                f"layer {number} of --spec {' '.join(config.spec)}: {error}; derive it from DeclaringModule and make "
                "its parameters with declare()"
            ) from None


def get_gpt_layer_local_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    qk_layernorm: bool = False,
    multi_latent_attention: bool = False,
    moe_use_legacy_grouped_gemm: bool = False,
    normalization: str | None = "LayerNorm",
    qk_l2_norm: bool = False,
    use_kitchen: bool = False,
) -> ModuleSpec:
    """A layer of the given norm (None: the configuration's), with experts or without."""
    if normalization is not None and normalization not in NORMS:
        raise UserError(f"normalization is one of {', '.join(NORMS)}, not {normalization}")
    _refuse(multi_latent_attention=multi_latent_attention, qk_l2_norm=qk_l2_norm)
    _without_effect(moe_use_legacy_grouped_gemm=moe_use_legacy_grouped_gemm, use_kitchen=use_kitchen)
    if moe_grouped_gemm and num_experts is None:
        _say("moe_grouped_gemm has no effect in a layer without experts")
    norm: Slot = ConfiguredNorm if normalization is None else NORMS[normalization]
    return _layer(norm, qk_layernorm, num_experts, moe_grouped_gemm)


def get_gpt_layer_with_transformer_engine_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    qk_layernorm: bool = False,
    multi_latent_attention: bool = False,
    moe_use_legacy_grouped_gemm: bool = False,
    qk_l2_norm: bool = False,
    use_te_op_fuser: bool = False,
    use_kitchen: bool = False,
    use_te_activation_func: bool = False,
) -> ModuleSpec:
    """The same layer as the local one, with the norm of the configuration: there is one implementation here."""
    _without_effect(use_te_op_fuser=use_te_op_fuser, use_te_activation_func=use_te_activation_func)
    return get_gpt_layer_local_spec(
        num_experts,
        moe_grouped_gemm,
        qk_layernorm,
        multi_latent_attention,
        moe_use_legacy_grouped_gemm,
        normalization=None,
        qk_l2_norm=qk_l2_norm,
        use_kitchen=use_kitchen,
    )


def get_gpt_decoder_block_spec(
    config: TransformerConfig,
    use_transformer_engine: bool,
    normalization: str | None = None,
    qk_l2_norm: bool = False,
    vp_stage: int | None = None,
) -> TransformerBlockSubmodules:
    """Every layer of the model, those with experts and those without.

    A stage takes the layers it holds, so the result does not depend on `vp_stage`; nor on `use_transformer_engine`.
    """
    _refuse(qk_l2_norm=qk_l2_norm)
    core = CoreTransformerConfig.of(config)
    specs = tuple(spec_of(core, core.moe, layer, normalization) for layer in range(config.num_layers))
    return TransformerBlockSubmodules(specs, NORMS[normalization] if normalization else ConfiguredNorm)


def spec_of(
    config: TransformerConfig, moe: MoEConfig, layer: int, normalization: str | None = None
) -> ModuleSpec:
    """The spec of a configured model's layer, counted from 0: what every training uses."""
    experts = moe.num_experts
    if experts is not None and not moe_layers(moe.moe_layer_freq, config.num_layers)[layer]:
        experts = None
    return _layer(
        NORMS[normalization or config.normalization], config.qk_layernorm, experts, bool(moe.moe_grouped_gemm)
    )


def block_spec(
    config: CoreTransformerConfig, chosen: ModuleSpec | TransformerBlockSubmodules | None = None
) -> TransformerBlockSubmodules:
    """A spec for every layer: those chosen here or with --spec, else the configured ones; one spec stands for all layers."""
    chosen = chosen or user_spec(config)
    if chosen is None:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    if isinstance(chosen, ModuleSpec):
        return TransformerBlockSubmodules((chosen,) * config.num_layers)
    if len(chosen.layer_specs) != config.num_layers:
        raise UserError(
            f"the block spec has {len(chosen.layer_specs)} layers, the configuration {config.num_layers}; "
            "it needs a spec for every layer of the model (--num-layers)"
        )
    return chosen


def check_user_spec(config: TransformerConfig, moe: MoEConfig) -> None:
    """Says what is wrong with --spec, before a process has anybody to wait for."""
    if config.spec:
        core = CoreTransformerConfig.of(config, moe)
        check_layers(core, block_spec(core))


def _layer(norm: Slot, qk_layernorm: bool, num_experts: int | None, grouped: bool) -> ModuleSpec:
    norm_of_heads = norm if qk_layernorm else IdentityOp
    attention = ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm_of_heads,
            k_layernorm=norm_of_heads,
        ),
    )
    matrices = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    mlp = (
        ModuleSpec(MLP, submodules=matrices)
        if num_experts is None
        else ModuleSpec(MoE, params={"num_experts": num_experts, "grouped": grouped}, submodules=matrices)
    )
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=dropout_add,
            pre_mlp_layernorm=norm,
            mlp=mlp,
            mlp_bda=dropout_add,
        ),
    )


def _refuse(**wanted: bool) -> None:
    names = {
        "multi_latent_attention": "multi-latent attention",
        "qk_l2_norm": "the L2 norm of queries and keys",
    }
    for name, value in wanted.items():
        if value:
            raise UserError(f"{names[name]} is not available yet; leave {name} out")


def _without_effect(**given: Any) -> None:
    for name, value in given.items():
        if value:
            _say(f"{name} changes nothing: there is one implementation of the layers here, in PyTorch")


def _say(sentence: str) -> None:
    """Once for each place of the program that asks, as warnings are."""
    warnings.warn(sentence, stacklevel=4)

"""Layer specs of the model families: which class is in which slot of a layer.

Sizes and switches of a family (widths, biases, gated MLP, positions) are in its configuration, classes are
here. The first three `get_gpt_...` functions have Megatron's names and parameters.
"""

import inspect
import warnings
from dataclasses import replace
from typing import Any

import torch

from pentatron.errors import UserError
from pentatron.nn import spec as nn_spec
from pentatron.nn.attention import PLAIN_ATTENTION, SelfAttention
from pentatron.nn.mlp import MLP, PLAIN_MLP
from pentatron.nn.moe import MoE
from pentatron.nn.norm import NORMS, ConfiguredNorm
from pentatron.nn.spec import ModuleSpec, Slot, TransformerBlockSubmodules
from pentatron.nn.transformer_layer import TransformerLayer, dropout_add
from pentatron.parallel.sharding import sharded_parameters
from pentatron.settings.core_config import CoreTransformerConfig
from pentatron.settings.model import MoEConfig, TransformerConfig, moe_layers


def user_spec(config: CoreTransformerConfig) -> ModuleSpec | TransformerBlockSubmodules | None:
    """Returns the spec of `--spec MODULE FUNCTION`; the function gets the configuration if it takes an
    argument.

    None without --spec.
    """
    if not config.spec:
        return None
    module, name = config.spec
    what = f"--spec {module} {name}"
    spec = nn_spec.import_named(module, name, what)
    if callable(spec):
        takes_config = bool(inspect.signature(spec).parameters)
        with nn_spec.current_folder_on_path():
            spec = spec(config) if takes_config else spec()
    if not isinstance(spec, ModuleSpec | TransformerBlockSubmodules):
        raise UserError(
            f"{what} returned a {type(spec).__name__}; it must return a ModuleSpec of a layer, or "
            "TransformerBlockSubmodules with one for each"
        )
    return spec


def check_user_spec(config: TransformerConfig, moe: MoEConfig) -> None:
    """Builds each kind of layer of --spec once on the meta device, to find errors before workers start."""
    if not config.spec:
        return
    core = CoreTransformerConfig.of(config, moe)
    specs = block_spec(core).layer_specs
    for number, spec in enumerate(specs, 1):
        if any(spec is other for other in specs[: number - 1]):
            continue
        with torch.device("meta"):
            layer = nn_spec.build_module(spec, config=core, layer_number=number)
        try:
            sharded_parameters(layer)
        except TypeError as error:
            raise UserError(
                f"layer {number} of --spec {' '.join(config.spec)}: {error}; derive it from ShardedModule and create "
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
    """Returns the spec of a layer with the given norm (None: the configured one), dense or with experts."""
    if normalization is not None and normalization not in NORMS:
        raise UserError(f"normalization is one of {', '.join(NORMS)}, not {normalization}")
    _refuse(multi_latent_attention=multi_latent_attention, qk_l2_norm=qk_l2_norm)
    _without_effect(moe_use_legacy_grouped_gemm=moe_use_legacy_grouped_gemm, use_kitchen=use_kitchen)
    if moe_grouped_gemm and num_experts is None:
        _warn("moe_grouped_gemm has no effect in a layer without experts")
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
    """Returns the local spec with the configured norm: there is one implementation here."""
    _without_effect(use_te_op_fuser=use_te_op_fuser, use_te_activation_func=use_te_activation_func)
    args = (num_experts, moe_grouped_gemm, qk_layernorm, multi_latent_attention, moe_use_legacy_grouped_gemm)
    return get_gpt_layer_local_spec(*args, normalization=None, qk_l2_norm=qk_l2_norm, use_kitchen=use_kitchen)


def get_gpt_decoder_block_spec(
    config: TransformerConfig,
    use_transformer_engine: bool,
    normalization: str | None = None,
    qk_l2_norm: bool = False,
    vp_stage: int | None = None,
) -> TransformerBlockSubmodules:
    """Returns the specs of all layers of the model, dense and with experts.

    The result does not depend on `vp_stage`, because a stage takes the layers it holds, nor on
    `use_transformer_engine`.
    """
    _refuse(qk_l2_norm=qk_l2_norm)
    core = CoreTransformerConfig.of(config)
    specs = tuple(spec_of(core, core.moe, layer, normalization) for layer in range(config.num_layers))
    return TransformerBlockSubmodules(specs, NORMS[normalization] if normalization else ConfiguredNorm)


def spec_of(
    config: TransformerConfig, moe: MoEConfig, layer: int, normalization: str | None = None
) -> ModuleSpec:
    """Returns the spec of layer `layer` of a configured model, counted from 0."""
    is_dense = moe.num_experts is None or not moe_layers(moe.moe_layer_freq, config.num_layers)[layer]
    experts = None if is_dense else moe.num_experts
    norm = NORMS[normalization or config.normalization]
    return _layer(norm, config.qk_layernorm, experts, bool(moe.moe_grouped_gemm))


def block_spec(
    config: CoreTransformerConfig, chosen: ModuleSpec | TransformerBlockSubmodules | None = None
) -> TransformerBlockSubmodules:
    """Returns a spec for every layer: `chosen`, that of --spec, or the configured one.

    A single spec is used for all layers.
    """
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


def _layer(norm: Slot, qk_layernorm: bool, num_experts: int | None, grouped: bool) -> ModuleSpec:
    norm_of_heads = norm if qk_layernorm else nn_spec.IdentityOp
    attention = ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": nn_spec.AttnMaskType.causal},
        submodules=replace(PLAIN_ATTENTION, q_layernorm=norm_of_heads, k_layernorm=norm_of_heads),
    )
    mlp = ModuleSpec(MLP, submodules=PLAIN_MLP)
    if num_experts is not None:
        mlp = ModuleSpec(MoE, {"num_experts": num_experts, "grouped": grouped}, PLAIN_MLP)
    slots = nn_spec.TransformerLayerSubmodules(norm, attention, dropout_add, norm, mlp, dropout_add)
    return ModuleSpec(TransformerLayer, submodules=slots)


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
            _warn(f"{name} has no effect: there is one implementation of the layers here, in PyTorch")


def _warn(sentence: str) -> None:
    """Warns once per calling line."""
    warnings.warn(sentence, stacklevel=4)

"""config.json as settings of ours, and back. Every key is accounted for: mapped, known to change nothing, or refused."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from pentatron.checkpoint.untrusted import implausible
from pentatron.errors import ConfigError, UserError
from pentatron.hf.config_reader import (
    ORIGIN,
    SCALINGS,
    ConfigReader,
    Problem,
    layer_list,
    scaling_settings,
    set_window,
    window_in,
)
from pentatron.hf.families import FAMILIES, INERT, NEUTRAL, Family
from pentatron.hf.folder import HuggingFaceFolder
from pentatron.settings.model import MoEConfig, TransformerConfig, moe_layers
from pentatron.settings.parameters import has_mlp_bias, has_proj_bias, has_qkv_bias
from pentatron.settings.settings import Settings

# Settings that do not change what a model computes once it is trained.
_NO_EFFECT = frozenset(
    """
    seq_length make_vocab_size_divisible_by padded_vocab_size init_method_std hidden_dropout attention_dropout
    moe_router_dtype moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff moe_router_bias_update_rate
    moe_token_dispatcher_type moe_grouped_gemm moe_use_legacy_grouped_gemm moe_per_layer_logging
    moe_expert_capacity_factor moe_token_drop_policy
    """.split()
)
_SAID_BY_OTHERS = frozenset({"group_query_attention", "add_bias_linear"})
_SCALINGS = frozenset[str]().union(*map(scaling_settings, SCALINGS))
# Lists are made of what each layer is, before weights are looked at.
_MOST_LAYERS = 100_000
# The classes of transformers have numbers of their own for tokens that are not given.
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}
# How alike a family must look to be taken for a misspelt one: Mamba is no Llama.
_MISSPELT = 0.8
_OF_MODEL, _OF_EXPERTS = (
    tuple(field.name for field in dataclasses.fields(kind)) for kind in (TransformerConfig, MoEConfig)
)


def model_type_of(config: Mapping[str, Any]) -> str:
    """The family a config.json names; refuses one that is not known here."""
    found = config.get("model_type")
    if isinstance(found, str) and found in FAMILIES:
        return found
    known = ", ".join(FAMILIES)
    if found is None:
        raise UserError(f"config.json has no model_type; write which it is: {known}")
    close = difflib.get_close_matches(str(found), FAMILIES, n=1, cutoff=_MISSPELT)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise UserError(f"config.json has model_type {found!r}, but the families known here are {known}{hint}")


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of ours that make the same model, each that matters for it, also where it is the default.

    One error names every key that stands in the way.
    """
    model_type = model_type_of(config)
    family, reader = FAMILIES[model_type], ConfigReader(config)
    problems: list[str] = []
    settings = Settings.defaults()
    settings.assign(ORIGIN, **family.fixed)
    for key in family.keys:
        try:
            value = reader.one_of((key.theirs, *key.also), key.kind, key.default)
        except Problem as problem:
            problems.append(str(problem))
            value = key.default
        settings.assign(ORIGIN, **dict.fromkeys(key.ours, not value if key.inverted else value))
    if settings.num_layers > _MOST_LAYERS:
        raise UserError(
            f"config.json says {settings.num_layers} layers, which no model has; download it again"
        )
    for part in family.parts:
        reader.read.update(part.keys)
        try:
            part.read(reader, settings)
        except Problem as problem:
            problems.append(str(problem))
    for key_name, allowed in {**NEUTRAL, **family.required}.items():
        if key_name not in reader.read:
            try:
                reader.require(key_name, allowed)
            except Problem as problem:
                problems.append(str(problem))
    problems += [
        f"config.json has {key!r}: {_short(value)}, which is not known for model_type {model_type!r}, so the model may not be what "
        f"it seems; remove the key if it changes nothing"
        for key, value in reader.unread().items()
        if key not in INERT
    ]
    if problems:
        raise ConfigError(problems)
    named = {name for name in (*_OF_MODEL, *_OF_EXPERTS) if settings.source(name) == ORIGIN}
    # No config.json speaks of layers of users' own.
    matters = (_that_matter(settings) | named) - {"spec"}
    return {name: value for name, value in settings.flat().items() if name in matters}


def settings_in(folder: HuggingFaceFolder) -> dict[str, Any]:
    """The same of a folder, whose weights must be able to be that model: it is built before they are read."""
    settings = settings_of(folder.config)
    if problem := implausible(settings, {name: tensor.shape for name, tensor in folder.tensors.items()}):
        raise UserError(
            f"{folder.path} cannot be the model that its config.json describes ({problem}); download it again"
        )
    return settings


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def config_of(
    model: TransformerConfig, moe: MoEConfig, original: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The config.json of a model of ours: of the first family that makes the same model, that of `original` if it does.

    Keys of `original` that change nothing (tokens, names) are kept.
    """
    wanted = _in_one_form(Settings.defaults(**dataclasses.asdict(model), **dataclasses.asdict(moe)))
    first = [name for name in FAMILIES if original and name == original.get("model_type")]
    differences: dict[str, list[str]] = {}
    for model_type in dict.fromkeys([*first, *FAMILIES]):
        config = _written(model_type, FAMILIES[model_type], wanted)
        try:
            differences[model_type] = _differences(settings_of(config), wanted)
        except UserError:
            continue  # A family in which not even the sizes of this model can be written.
        if not differences[model_type]:
            kept = {key: value for key, value in original.items() if key in INERT} if original else _NO_TOKENS
            return {**kept, **config}
    closest = min(differences, key=lambda model_type: len(differences[model_type]))
    raise UserError(
        f"no family of Hugging Face models computes what this one does; the closest is {closest}, but for "
        f"{', '.join(differences[closest])}"
    )


def _in_one_form(settings: Settings) -> Settings:
    """The settings of a model as `settings_of` has them, where several ways to write them mean the same."""
    form = settings.changed(
        add_qkv_bias=has_qkv_bias(settings),
        add_proj_bias=has_proj_bias(settings),
        add_mlp_bias=has_mlp_bias(settings),
    )
    if form.num_experts:
        sparse = moe_layers(form.moe_layer_freq, form.num_layers)
        form = form.changed(moe_layer_freq="1" if all(sparse) else layer_list(sparse))
    set_window(form, *window_in(form))
    return form


def _written(model_type: str, family: Family, settings: Settings) -> dict[str, Any]:
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": model_type}
    for key in family.keys:
        value = getattr(settings, key.ours[0])
        config[key.theirs] = not value if key.inverted else value
    config |= {key_name: allowed[0] for key_name, allowed in family.required.items()}
    for part in family.parts:
        config |= part.write(settings)
    return config


def _differences(read: Mapping[str, Any], wanted: Settings) -> list[str]:
    """What a written config.json gets wrong, judged by what is read from it."""
    found = _in_one_form(Settings.defaults(**read)).flat()
    compared = _that_matter(wanted) - _SAID_BY_OTHERS
    if wanted.num_experts and wanted.moe_layer_freq == "1":
        compared.remove("ffn_hidden_size")
    return [
        f"{name} {value!r}"
        for name, value in wanted.flat().items()
        if name in compared and found[name] != value
    ]


def _that_matter(settings: Settings) -> set[str]:
    """Names of the settings that make a difference to what this model computes."""
    names = {*_OF_MODEL, *_OF_EXPERTS} - _NO_EFFECT
    if not settings.num_experts:
        names -= {*_OF_EXPERTS} - {"num_experts"}
    if settings.position_embedding_type == "rope":
        return names - (_SCALINGS - scaling_settings(settings.rope_scaling_type))
    return {name for name in names if not name.startswith(("rotary_", "rope_", "yarn_"))}

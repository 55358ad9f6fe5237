"""Converts config.json to model settings and back; unknown keys are refused."""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pentatron.checkpoint.manifest_checks import size_problem
from pentatron.errors import ConfigError, UserError
from pentatron.hf import config_reader
from pentatron.hf.config_reader import ORIGIN, SCALINGS, ConfigReader, InvalidKey
from pentatron.hf.families import FAMILIES, INERT, NEUTRAL
from pentatron.hf.folder import HuggingFaceFolder
from pentatron.settings.model import MoEConfig, TransformerConfig, moe_layers
from pentatron.settings.model_sizes import has_mlp_bias, has_proj_bias, has_qkv_bias
from pentatron.settings.settings import Settings

# Settings that do not change the outputs of a trained model.
_NO_EFFECT = frozenset(
    """
    seq_length make_vocab_size_divisible_by padded_vocab_size init_method_std hidden_dropout attention_dropout
    moe_router_dtype moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff moe_router_bias_update_rate
    moe_token_dispatcher_type moe_grouped_gemm moe_use_legacy_grouped_gemm moe_per_layer_logging
    moe_expert_capacity_factor moe_token_drop_policy
    """.split()
)
# Settings that follow from other settings.
_IMPLIED = frozenset({"group_query_attention", "add_bias_linear"})
_SCALINGS = frozenset[str]().union(*map(config_reader.scaling_settings, SCALINGS))
# Lists of layers are built before the weights are checked, so a damaged number must not exhaust memory.
_MOST_LAYERS = 100_000
# Written explicitly: the configuration classes of transformers have other defaults.
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}
# Least similarity at which a model_type is suggested as the correct spelling: mamba is not llama.
_SIMILARITY = 0.8
_MODEL_FIELDS, _MOE_FIELDS = (
    tuple(field.name for field in dataclasses.fields(kind)) for kind in (TransformerConfig, MoEConfig)
)


def model_type_of(config: Mapping[str, Any]) -> str:
    """Returns the model_type of a config.json; raises UserError if it is not supported."""
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in FAMILIES:
        return model_type
    known = ", ".join(FAMILIES)
    if model_type is None:
        raise UserError(f"config.json has no model_type; write which it is: {known}")
    close = difflib.get_close_matches(str(model_type), FAMILIES, n=1, cutoff=_SIMILARITY)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise UserError(f"{ORIGIN} has model_type {model_type!r}, but the families known here are {known}{hint}")


def settings_from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the model of a config.json, including relevant settings with default values.

    Raises one ConfigError with the problems of all keys.
    """
    model_type = model_type_of(config)
    family, reader = FAMILIES[model_type], ConfigReader(config)
    problems: list[str] = []
    settings = Settings.defaults()
    settings.assign(ORIGIN, **family.fixed)
    for key in family.keys:
        value = key.default
        with _collected(problems):
            value = reader.one_of((key.theirs, *key.also.split()), key.kind, key.default)
        settings.assign(ORIGIN, **dict.fromkeys(key.ours.split(), not value if key.inverted else value))
    if settings.num_layers > _MOST_LAYERS:
        raise UserError(f"{ORIGIN} says {settings.num_layers} layers, which no model has; download it again")
    for part in family.parts:
        reader.read.update(part.keys)
        with _collected(problems):
            part.read(reader, settings)
    for key_name, allowed in {**NEUTRAL, **family.required}.items():
        if key_name not in reader.read:
            with _collected(problems):
                reader.require(key_name, allowed)
    for name, value in reader.unread().items():
        if name not in INERT:
            text = repr(value)
            text = text if len(text) <= 60 else f"{text[:57]}..."
            problems.append(
                f"config.json has {name!r}: {text}, which is not known for model_type {model_type!r}, so the model may compute "
                f"something else; remove the key if it has no effect"
            )
    if problems:
        raise ConfigError(problems)
    named = {name for name in (*_MODEL_FIELDS, *_MOE_FIELDS) if settings.source(name) == ORIGIN}
    # A custom layer spec has no key in config.json.
    relevant = (_relevant_settings(settings) | named) - {"spec"}
    return {name: value for name, value in settings.flat().items() if name in relevant}


@contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    """Appends the InvalidKey of the block, if any."""
    try:
        yield
    except InvalidKey as problem:
        problems.append(str(problem))


def settings_from_folder(folder: HuggingFaceFolder) -> dict[str, Any]:
    """Returns the settings of the model in a folder, checked against the sizes of its weights.

    The model is built before the weights are read, so a wrong config.json could otherwise exhaust memory.
    """
    settings = settings_from_config(folder.config)
    if problem := size_problem(settings, {name: tensor.shape for name, tensor in folder.tensors.items()}):
        raise UserError(
            f"{folder.path} cannot be the model that its config.json describes ({problem}); download it again"
        )
    return settings


def config_from_settings(
    model: TransformerConfig, moe: MoEConfig, original: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the config.json of a model, in the family of `original` or the first that fits.

    Keys of `original` without an effect on the model, such as tokens and names, are kept.
    """
    wanted = _canonical(Settings.defaults(**dataclasses.asdict(model), **dataclasses.asdict(moe)))
    first = [name for name in FAMILIES if original and name == original.get("model_type")]
    differences: dict[str, list[str]] = {}
    for model_type in dict.fromkeys([*first, *FAMILIES]):
        family = FAMILIES[model_type]
        config: dict[str, Any] = {"architectures": [family.architecture], "model_type": model_type}
        for key in family.keys:
            value = getattr(wanted, key.ours.split()[0])
            config[key.theirs] = not value if key.inverted else value
        config |= {name: allowed[0] for name, allowed in family.required.items()}
        for part in family.parts:
            config |= part.write(wanted)
        try:
            differences[model_type] = _differences(settings_from_config(config), wanted)
        except UserError:
            continue  # The family cannot represent the sizes of this model.
        if not differences[model_type]:
            kept = {key: value for key, value in original.items() if key in INERT} if original else _NO_TOKENS
            return {**kept, **config}
    closest = min(differences, key=lambda model_type: len(differences[model_type]))
    raise UserError(
        f"no family of Hugging Face models computes the same as this one; the closest is {closest}, except for "
        f"{', '.join(differences[closest])}"
    )


def _canonical(settings: Settings) -> Settings:
    """Returns the settings in the form of `settings_from_config`, where several values are equivalent."""
    qkv, projection, mlp = has_qkv_bias(settings), has_proj_bias(settings), has_mlp_bias(settings)
    canonical = settings.changed(add_qkv_bias=qkv, add_proj_bias=projection, add_mlp_bias=mlp)
    if canonical.num_experts:
        sparse = moe_layers(canonical.moe_layer_freq, canonical.num_layers)
        canonical = canonical.changed(moe_layer_freq="1" if all(sparse) else config_reader.layer_list(sparse))
    config_reader.set_window(canonical, *config_reader.window_in(canonical))
    return canonical


def _differences(read: Mapping[str, Any], wanted: Settings) -> list[str]:
    """Returns the settings that a config.json does not reproduce."""
    reproduced = _canonical(Settings.defaults(**read)).flat()
    compared = _relevant_settings(wanted) - _IMPLIED
    if wanted.num_experts and wanted.moe_layer_freq == "1":
        compared.remove("ffn_hidden_size")
    values = {name: value for name, value in wanted.flat().items() if name in compared}
    return [f"{name} {value!r}" for name, value in values.items() if reproduced[name] != value]


def _relevant_settings(settings: Settings) -> set[str]:
    """Returns the names of the settings that affect the outputs of the model."""
    names = {*_MODEL_FIELDS, *_MOE_FIELDS} - _NO_EFFECT
    if not settings.num_experts:
        names -= {*_MOE_FIELDS} - {"num_experts"}
    if settings.position_embedding_type == "rope":
        return names - (_SCALINGS - config_reader.scaling_settings(settings.rope_scaling_type))
    return {name for name in names if not name.startswith(("rotary_", "rope_", "yarn_"))}

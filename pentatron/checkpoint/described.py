"""The settings that a checkpoint was made with, and the model they describe."""

import dataclasses
from typing import Any

from pentatron.checkpoint.store import Found
from pentatron.checkpoint.untrusted import implausible
from pentatron.config.model import MoEConfig, TransformerConfig
from pentatron.config.run import table
from pentatron.config.setting import Setting
from pentatron.errors import UserError

# Sections whose values are computed with; those of the others are compared and shown.
_USED = ("model", "moe", "optim", "train")
_DERIVED = (
    *("ffn_hidden_size", "num_attention_heads", "kv_channels", "num_query_groups"),
    *("max_position_embeddings", "vocab_size", "padded_vocab_size"),
)
# No setting is a larger number; NaN is within no limits.
_LARGEST = 2**63 - 1


def saved_settings(found: Found) -> dict[str, Any]:
    """By name, whatever section they were in. A setting of the model that is not known here might make it another one."""
    config = found.manifest.config
    unknown = [
        name for section in ("model", "moe") for name in config.get(section, {}) if name not in table()
    ]
    if "model" not in config or unknown:
        raise UserError(
            f"{found.folder} describes a model this version does not know ({', '.join(unknown) or 'it has no settings'}); use the "
            f"version that saved it"
        )
    flat = {name: value for section in config.values() for name, value in section.items()}
    # What is older or younger than this version is nobody's to judge here.
    saved = {name: _typed(found, name, value) if name in table() else value for name, value in flat.items()}
    if problem := implausible(saved, {n: r.shape for n, r in found.manifest.tensors.items()}):
        raise UserError(
            f"{found.folder} cannot be the model that it describes ({problem}); name another step"
        )
    return saved


def _typed(found: Found, name: str, value: Any) -> Any:
    """A value of the kind that the setting has, however it came into the file."""
    item = table()[name]
    absent = value is None and (item.optional or item.section not in _USED)
    items = value if isinstance(value, list) else [value]
    right = absent or (isinstance(value, list) == item.is_list and all(_is_one(item, one) for one in items))
    if not right:
        raise UserError(
            f"{found.folder} has {name} {value!r:.60}, which is no value of that setting; use the version that saved it, or name "
            f"another step"
        )
    return tuple(value) if isinstance(value, list) else value


def _is_one(item: Setting, value: Any) -> bool:
    """Whether it is of the setting's type, and a number or a choice that there is."""
    kind = (int, float) if item.base_type is float else item.base_type
    if not isinstance(value, kind) or isinstance(value, bool) != (item.base_type is bool):
        return False
    if isinstance(value, int | float) and not -_LARGEST <= value <= _LARGEST:
        return False
    # A choice elsewhere may be older or younger than this version, and makes no other model.
    return not item.choices or item.section not in _USED or value in item.choices


def architecture_of(found: Found) -> tuple[TransformerConfig, MoEConfig]:
    """The model a step holds. What it does not say is older than the setting, and has its default."""
    saved = saved_settings(found)
    of_model, of_experts = (
        {field.name: saved[field.name] for field in dataclasses.fields(kind) if field.name in saved}
        for kind in (TransformerConfig, MoEConfig)
    )
    model, moe = TransformerConfig(**of_model), MoEConfig(**of_experts)
    # A run derives them before it saves anything.
    missing = [name for name in _DERIVED if getattr(model, name) is None]
    if moe.num_experts is not None and moe.moe_ffn_hidden_size is None:
        missing.append("moe_ffn_hidden_size")
    if missing:
        raise UserError(
            f"{found.folder} does not say {missing[0]}, without which its model cannot be built; name another step"
        )
    return model, moe

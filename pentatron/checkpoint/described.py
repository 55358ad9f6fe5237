"""The settings that a checkpoint was made with, and the model they describe."""

import dataclasses
from typing import Any

from pentatron.checkpoint.store import Found
from pentatron.config.errors import UserError
from pentatron.config.model import MoEConfig, TransformerConfig
from pentatron.config.run import table


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
    return {name: tuple(value) if isinstance(value, list) else value for name, value in flat.items()}


def architecture_of(found: Found) -> tuple[TransformerConfig, MoEConfig]:
    """The model a step holds. What it does not say is older than the setting, and has its default."""
    saved = saved_settings(found)
    of_model, of_experts = (
        {field.name: saved[field.name] for field in dataclasses.fields(kind) if field.name in saved}
        for kind in (TransformerConfig, MoEConfig)
    )
    return TransformerConfig(**of_model), MoEConfig(**of_experts)

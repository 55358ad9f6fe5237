"""Configurations from a file: `--yaml-cfg` is read with all other settings."""

from types import SimpleNamespace

from pentatron.errors import UserError
from pentatron.megatron.core.transformer.transformer_config import TransformerConfig
from pentatron.megatron.training.arguments import core_transformer_config_from_args


def core_transformer_config_from_yaml(
    args: SimpleNamespace, transfomer_key: str = "language_model"
) -> TransformerConfig:
    """The model's configuration; the file's values are among the settings already. (The second name is Megatron's.)"""
    if transfomer_key != "language_model":
        raise UserError(f"a file of settings describes one model, language_model, not {transfomer_key}")
    return core_transformer_config_from_args(args)

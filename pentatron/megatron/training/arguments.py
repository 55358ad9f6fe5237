"""From the run's settings to the configurations of models and datasets."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from pentatron.errors import UserError
from pentatron.megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from pentatron.megatron.core.datasets.utils import get_blend_from_list
from pentatron.megatron.core.model_parallel_config import ModelParallelConfig
from pentatron.megatron.core.transformer.transformer_config import TransformerConfig
from pentatron.settings import core as own
from pentatron.settings.command_line import FlagTable
from pentatron.settings.entry import EntryPoint
from pentatron.settings.run import RunConfig

ExtraArguments = Callable[[argparse.ArgumentParser], Any]


def core_transformer_config_from_args(
    args: SimpleNamespace | RunConfig, config_class: type[TransformerConfig] | None = None
) -> TransformerConfig:
    """The model's configuration, of `get_args()` or of a resolved configuration."""
    values = args.flat() if isinstance(args, RunConfig) else vars(args)
    layout = {name: values[name] for name in ModelParallelConfig.__dataclass_fields__ if name in values}
    return (config_class or TransformerConfig).from_core(own.core_transformer_config_from_args(args), layout)


def core_gpt_dataset_config_from_args(args: SimpleNamespace) -> GPTDatasetConfig:
    """Which samples the run's flags ask for."""
    per_split = [
        get_blend_from_list(getattr(args, f"{name}_data_path")) for name in ("train", "valid", "test")
    ]
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=get_blend_from_list(args.data_path),
        blend_per_split=per_split if args.train_data_path else None,
        split=args.split,
        path_to_cache=args.data_cache_path,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )


def take_extra_arguments(
    words: Sequence[str], provider: ExtraArguments | None, entry: EntryPoint
) -> tuple[list[str], dict[str, Any]]:
    """The words that are left for us, and the values of arguments that the program added."""
    if provider is None:
        return list(words), {}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    provider(parser)
    flags = FlagTable(entry)
    for action in parser._actions:
        taken = [flag for flag in action.option_strings if flags.find(flag) is not None]
        if taken:
            raise UserError(
                f"extra_args_provider adds {taken[0]}, which is a flag already; give it another name"
            )
    found, left = parser.parse_known_args(list(words))
    return left, vars(found)


def defaults_of(
    args_defaults: Mapping[str, Any], known: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`args_defaults` of a program: those of settings, and others that only the program itself reads."""
    settings = {name: value for name, value in args_defaults.items() if name in known}
    return settings, {name: value for name, value in args_defaults.items() if name not in known}

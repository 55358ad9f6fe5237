"""The object that `get_args()` returns, and arguments that a program adds or gives defaults for."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from pentatron.checkpoint.state import TrainState
from pentatron.data.open_data import required_samples
from pentatron.errors import UserError
from pentatron.parallel.world import World
from pentatron.settings.command_line import FlagTable
from pentatron.settings.entry_points import PRETRAIN_GPT, EntryPoint
from pentatron.settings.resolve import Resolved
from pentatron.settings.run_config import RunConfig, all_settings

ExtraArguments = Callable[[argparse.ArgumentParser], Any]

_WITHOUT_EFFECT = {
    "process_non_loss_data_func": "evaluation collects losses only",
    "non_loss_data_func": "evaluation collects losses only",
    "get_embedding_ranks": "the layout decides which ranks hold the embedding",
    "get_position_embedding_ranks": "the layout decides which ranks hold the embedding",
}


class Arguments(SimpleNamespace):
    """Every setting of the run as an attribute. Settings cannot be changed; other attributes can be added.

    `iteration`, `curr_iteration` and `consumed_train_samples` follow the training state.
    """

    # Slots, because programs list the attributes with `vars()`.
    __slots__ = ("_frozen", "_state")
    _frozen: frozenset[str]
    _state: TrainState

    def __init__(self, settings: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        super().__init__(**{**others, **settings})
        object.__setattr__(self, "_frozen", frozenset(settings))
        object.__setattr__(self, "_state", TrainState())

    def follow(self, state: TrainState) -> None:
        """Reads the training progress from `state` from now on."""
        object.__setattr__(self, "_state", state)

    def __getattr__(self, name: str) -> Any:
        if name in ("iteration", "curr_iteration"):
            return self._state.step
        if name == "consumed_train_samples":
            return self._state.consumed_samples
        raise AttributeError(f"there is no setting {name} (pentatron train --help lists them)")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._frozen and value != self.__dict__[name]:
            raise UserError(
                f"args.{name} is {self.__dict__[name]!r} and the run was prepared with that; give another value as a flag or in "
                "args_defaults of pretrain()"
            )
        super().__setattr__(name, value)


def arguments_of(resolved: Resolved, world: World, extra: Mapping[str, Any]) -> Arguments:
    """Builds the arguments of a run; `extra` are the values of the program's own arguments."""
    config = resolved.config
    # The settings hold the expected values; programs read the actual ones.
    actual: dict[str, Any] = {"world_size": world.all_ranks.size, "local_rank": world.local_rank}
    if not config.checkpoint.save_checkpoints:
        # As in Megatron, where programs test `args.save` before they save.
        actual["save"] = None
    wanted = required_samples(config)
    # What programs for Megatron read and is no setting here.
    derived = {
        "rank": world.all_ranks.rank,
        "params_dtype": params_dtype(config),
        "swiglu": config.model.gated_linear_unit,
        "norm_epsilon": config.model.layernorm_epsilon,
        "disable_bias_linear": not config.model.add_bias_linear,
        "use_distributed_optimizer": config.parallel.zero_stage > 0,
        "use_rope_scaling": config.model.rope_scaling_type == "llama3",
        "fp8": config.precision.fp8_format,
        "yaml_cfg": config.run.config,
        "do_train": bool(config.train.train_iters),
        "do_valid": wanted.valid > 0,
        "do_test": wanted.test > 0,
        "create_attention_mask_in_dataloader": False,
        "mmap_bin_files": True,
        "num_dataset_builder_threads": 1,
        "check_for_nan_in_loss_and_grad": True,
        "legacy": False,
        "retro_project_dir": None,
        "retro_cyclic_train_iters": None,
    }
    return Arguments({**config.flat(), **actual}, {**derived, **extra})


def params_dtype(config: RunConfig) -> torch.dtype:
    precision = config.precision
    return torch.bfloat16 if precision.bf16 else torch.float16 if precision.fp16 else torch.float32


def script_entry_point(args_defaults: Mapping[str, Any]) -> tuple[EntryPoint, dict[str, Any]]:
    """Returns the running script as an entry point, and those of its defaults that are not settings."""
    settings = {name: value for name, value in args_defaults.items() if name in all_settings()}
    others = {name: value for name, value in args_defaults.items() if name not in settings}
    script = Path(sys.argv[0])
    defaults = {**PRETRAIN_GPT.defaults, "run_dir": f"runs/{script.stem}", **settings}
    return dataclasses.replace(PRETRAIN_GPT, name=script.name, defaults=defaults), others


def take_extra_arguments(
    words: Sequence[str], provider: ExtraArguments | None, entry: EntryPoint
) -> tuple[list[str], dict[str, Any]]:
    """Parses the arguments that `provider` adds; returns the remaining words and the parsed values."""
    if provider is None:
        return list(words), {}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    provider(parser)
    flags = FlagTable(entry)
    for action in parser._actions:
        if taken := [flag for flag in action.option_strings if flags.find(flag) is not None]:
            raise UserError(
                f"extra_args_provider adds {taken[0]}, which is a flag already; give it another name"
            )
    values, rest = parser.parse_known_args(list(words))
    return rest, vars(values)


def notes_without_effect(**given: Any) -> list[str]:
    """Returns a note for each given function that is accepted and never called."""
    return [f"{name} is not called: {_WITHOUT_EFFECT[name]}" for name in given if given[name] is not None]

"""`get_args()`: every setting of the run as an attribute of one object, with the names Megatron has besides."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from pentatron.checkpoint.state import TrainState
from pentatron.data.datasets import wanted_samples
from pentatron.errors import UserError
from pentatron.parallel.world import World
from pentatron.settings.resolve import Resolved
from pentatron.settings.run import RunConfig


class Arguments(SimpleNamespace):
    """Settings are those the run was checked with; other attributes may be added. `iteration` and its kin follow the run."""

    # Not among the attributes, which programs list.
    __slots__ = ("_frozen", "_state")
    _frozen: frozenset[str]
    _state: TrainState

    def __init__(self, settings: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        super().__init__(**{**others, **settings})
        object.__setattr__(self, "_frozen", frozenset(settings))
        object.__setattr__(self, "_state", TrainState())

    def follow(self, state: TrainState) -> None:
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
    # Of the settings these are what the user expected; programs want to know what is.
    here: dict[str, Any] = {"world_size": world.everyone.size, "local_rank": world.local_rank}
    if not resolved.config.checkpoint.save_checkpoints:
        # As in Megatron, where programs ask by it whether to save.
        here["save"] = None
    return Arguments({**resolved.config.flat(), **here}, {**_derived(resolved.config, world), **extra})


def params_dtype(config: RunConfig) -> torch.dtype:
    precision = config.precision
    return torch.bfloat16 if precision.bf16 else torch.float16 if precision.fp16 else torch.float32


def _derived(config: RunConfig, world: World) -> dict[str, Any]:
    """Names that builders, forward steps and dataset providers of Megatron read, and that are no settings of ours."""
    wanted = wanted_samples(config)
    return {
        "rank": world.everyone.rank,
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

"""Reads a DeepSpeed configuration file and maps its keys to settings.

DeepSpeed itself is not used: ZeRO, precision and offload are built in. "auto" leaves a setting unchanged. A
key without a counterpart is reported by a notice.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from pentatron.errors import ConfigError, UserError
from pentatron.settings.declaration import coerce
from pentatron.settings.files import load_file
from pentatron.settings.run_config import all_settings
from pentatron.settings.settings import Assigned

_AUTO = "auto"
# Sections that have an effect only if their key `enabled` is true.
_SWITCHED = ("fp16", "bf16", "tensorboard", "wandb")


@dataclass(frozen=True)
class _Target:
    """The setting that a key maps to, and the conversion of its value.

    A converted value of None assigns nothing.
    """

    setting: str
    convert: Callable[[Any], Any] = lambda value: value


def _offload_device(value: Any) -> bool | None:
    if value in ("cpu", "none"):
        return bool(value == "cpu")
    raise UserError(f"'{value}' is not supported; write cpu or none")


_OPTIMIZERS = {**dict.fromkeys(("adam", "adamw", "fusedadam", "cpuadam"), "adam"), "sgd": "sgd"}
_SCHEDULES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}


def _one_of(known: Mapping[str, str], what: str, supported: str, value: Any) -> str:
    if str(value).lower() in known:
        return known[str(value).lower()]
    raise UserError(f"the {what} '{value}' is not supported; write {supported}")


_optimizer = partial(_one_of, _OPTIMIZERS, "optimizer", "AdamW or SGD")
_schedule = partial(_one_of, _SCHEDULES, "schedule", "WarmupLR, WarmupDecayLR or WarmupCosineLR")
TARGETS: dict[str, tuple[_Target, ...]] = {
    "train_batch_size": (_Target("global_batch_size"),),
    "train_micro_batch_size_per_gpu": (_Target("micro_batch_size"),),
    "gradient_accumulation_steps": (_Target("gradient_accumulation_steps"),),
    "gradient_clipping": (_Target("clip_grad"),),
    "steps_per_print": (_Target("log_interval"),),
    "zero_optimization.stage": (_Target("zero_stage"),),
    "zero_optimization.overlap_comm": (_Target("overlap_grad_reduce"),),
    "zero_optimization.reduce_bucket_size": (_Target("ddp_bucket_size", int),),
    "zero_optimization.offload_optimizer.device": (_Target("optimizer_cpu_offload", _offload_device),),
    "bf16.enabled": (_Target("bf16"),),
    "fp16.enabled": (_Target("fp16"),),
    # 0 is a dynamic loss scale.
    "fp16.loss_scale": (_Target("loss_scale", lambda value: value or None),),
    "fp16.initial_scale_power": (_Target("initial_loss_scale", lambda power: 2.0 ** float(power)),),
    "fp16.loss_scale_window": (_Target("loss_scale_window"),),
    "fp16.hysteresis": (_Target("hysteresis"),),
    "fp16.min_loss_scale": (_Target("min_loss_scale"),),
    "optimizer.type": (_Target("optimizer", _optimizer),),
    "optimizer.params.lr": (_Target("lr"),),
    "optimizer.params.betas": (_Target("adam_beta1", itemgetter(0)), _Target("adam_beta2", itemgetter(1))),
    "optimizer.params.eps": (_Target("adam_eps"),),
    "optimizer.params.weight_decay": (_Target("weight_decay"),),
    "optimizer.params.momentum": (_Target("sgd_momentum"),),
    "scheduler.type": (_Target("lr_decay_style", _schedule),),
    "scheduler.params.warmup_min_lr": (_Target("lr_warmup_init"),),
    "scheduler.params.warmup_max_lr": (_Target("lr"),),
    "scheduler.params.warmup_num_steps": (_Target("lr_warmup_iters"),),
    "scheduler.params.total_num_steps": (_Target("lr_decay_iters"),),
    "tensorboard.output_path": (_Target("tensorboard_dir"),),
    "wandb.project": (_Target("wandb_project"),),
    "wandb.team": (_Target("wandb_entity"),),
}
# Errors rather than notices, because they decide whether the model fits into memory.
_REFUSED = {
    "zero_optimization.offload_param.device": "weights are not offloaded; optimizer state can be "
    "(offload_optimizer), and ZeRO 3 shards the weights"
}
_WARMUP_TYPE = "scheduler.params.warmup_type"


def read_deepspeed(path: str) -> tuple[dict[str, Assigned], list[str]]:
    """Returns the settings of a DeepSpeed file, and notices about keys without a counterpart."""
    content = load_file(Path(path), "--deepspeed_config")
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no settings: a DeepSpeed configuration is one JSON object")
    settings: dict[str, Assigned] = {}
    notices, problems = [], []
    # DeepSpeed's default.
    warmup_type = "log"
    for key, value in _entries(content):
        section, _, last = key.rpartition(".")
        # The other keys of an enabled section are mapped one by one.
        only_switches = last == "enabled" and (section in _SWITCHED or value is False)
        if value == _AUTO:
            continue
        if key in _REFUSED and value not in (None, "none"):
            problems.append(f"{path}: {key} {value}: {_REFUSED[key]}")
        elif key in TARGETS:
            try:
                settings |= _assigned(key, value, path)
            except (UserError, TypeError, ValueError, IndexError) as error:
                # Messages of `coerce` begin with the file and the key.
                problems.append(f"{path}: {key}: {str(error).removeprefix(f'{path}: {key}').lstrip()}")
        elif key == _WARMUP_TYPE:
            warmup_type = value
        elif key not in _REFUSED and not only_switches:
            notices.append(f"{path}: {key} has no counterpart and is ignored")
    if problems:
        raise ConfigError(problems)
    if warmup_type != "linear" and "lr_warmup_iters" in settings:
        theirs = f"DeepSpeed's is logarithmic, faster at first, unless {_WARMUP_TYPE} is linear"
        notices.append(f"{path}: the warm-up is linear; {theirs}")
    return settings, notices


def _assigned(key: str, value: Any, path: str) -> dict[str, Assigned]:
    settings = {}
    for target in TARGETS[key]:
        converted = target.convert(value)
        if converted is not None:
            item = all_settings()[target.setting]
            settings[item.name] = Assigned(coerce(item, converted, f"{path}: {key}"), f"file {path}")
    return settings


def _entries(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each key, with the keys above it joined by dots, except those of disabled sections."""
    for key, value in content.items():
        name = f"{prefix}{key}"
        if not isinstance(value, Mapping):
            yield name, value
        elif name in _SWITCHED and value.get("enabled", False) is False:
            yield f"{name}.enabled", False
        elif name not in _SWITCHED or value.get("enabled") != _AUTO:
            yield from _entries(value, f"{name}.")

"""What `common.pt` says besides arguments: where a run stands, for Megatron-LM and back."""

from collections.abc import Mapping
from typing import Any

from pentatron.config.run import RunConfig
from pentatron.config.training import OptimConfig

# As Megatron-LM counts the versions of its checkpoints.
CHECKPOINT_VERSION = 3.0
# The optimizer's state has the shapes of the weights, so that any layout can take it.
_SHARDING = "fully_reshardable"

# What a schedule of theirs says all of; WSD has a part that only the arguments tell.
_LR_STYLES = ("constant", "linear", "cosine", "inverse-square-root")
_DECAY_STYLES = ("constant", "linear", "cosine")


def common_state(step: int, state: Mapping[str, Any], config: RunConfig, stacked: bool) -> dict[str, Any]:
    groups = [_optimizer(state, config.optim, of_experts=False)]
    if config.moe.num_experts:
        groups.append(_optimizer(state, config.optim, of_experts=True))
    return {
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": step,
        "num_floating_point_operations_so_far": state.get("flops", 0.0),
        "optimizer": groups[0] if len(groups) == 1 else dict(enumerate(groups)),
        "opt_param_scheduler": _scheduler(state),
        "content_metadata": {
            "singleton_local_shards": False,
            "non_homogeneous_layers": not stacked,
            "distrib_optim_sharding_type": _SHARDING,
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "chained_optim_avoid_prefix": True,
        },
    }


def _optimizer(state: Mapping[str, Any], optim: OptimConfig, of_experts: bool) -> dict[str, Any]:
    """Two groups of parameters, with and without weight decay, as Megatron-LM forms them."""
    each = {
        "lr_mult": 1.0,
        "is_expert_parallel": of_experts,
        "is_decoupled_lr": False,
        "lr": optim.lr,
        "max_lr": optim.lr,
        "min_lr": optim.min_lr,
        "weight_decay": optim.weight_decay,
        "betas": (optim.adam_beta1, optim.adam_beta2),
        "eps": optim.adam_eps,
        "bias_correction": True,
        "step": state.get("updates", 0),
    }
    return {
        "optimizer": {"param_groups": [{**each, "wd_mult": decays} for decays in (1.0, 0.0)]},
        "param_state_sharding_type": _SHARDING,
    }


def _scheduler(state: Mapping[str, Any]) -> dict[str, Any]:
    schedule = state.get("schedule") or {}
    rate, decay = schedule.get("learning_rate", {}), schedule.get("weight_decay", {})
    return {
        "max_lr": rate.get("peak"),
        "min_lr": rate.get("floor"),
        "lr_warmup_steps": rate.get("warmup_samples"),
        "lr_decay_steps": rate.get("decay_samples"),
        "lr_decay_style": rate.get("style"),
        "num_steps": state.get("scheduled_samples", 0),
        "start_wd": decay.get("start"),
        "end_wd": decay.get("end"),
        "wd_incr_style": decay.get("style"),
        "wd_incr_steps": decay.get("samples"),
    }


def run_state_of(common: Mapping[str, Any], arguments: Mapping[str, Any], iteration: int) -> dict[str, Any]:
    """Where a run of Megatron-LM stood, in the words of a manifest."""
    scheduler = common.get("opt_param_scheduler")
    steps = scheduler.get("num_steps") if isinstance(scheduler, Mapping) else None
    consumed = int(arguments.get("consumed_train_samples") or 0)
    length = arguments.get("train_samples") or (arguments.get("train_iters") or 0) * (
        arguments.get("global_batch_size") or 1
    )
    return {
        "step": iteration,
        "consumed_samples": consumed,
        "consumed_valid_samples": int(arguments.get("consumed_valid_samples") or 0),
        "skipped_samples": int(arguments.get("skipped_train_samples") or 0),
        "scheduled_samples": int(steps) if steps is not None else consumed,
        "updates": _updates(common.get("optimizer"), iteration),
        # The order of samples was built for the length of the run.
        "ordered_for": [max(1, length, consumed)],
        "schedule": _schedule(scheduler) if isinstance(scheduler, Mapping) else {},
        "flops": float(common.get("num_floating_point_operations_so_far") or 0.0),
    }


def _schedule(scheduler: Mapping[str, Any]) -> dict[str, Any]:
    """The schedule that the run followed, which Megatron-LM keeps in samples as we do; empty where it does not say all of it."""
    names = "max_lr min_lr lr_warmup_steps lr_decay_steps start_wd end_wd wd_incr_steps".split()
    styles = scheduler.get("lr_decay_style"), scheduler.get("wd_incr_style")
    numbers = [scheduler.get(name) for name in names]
    whole = all(isinstance(number, (int, float)) for number in numbers)
    if not whole or styles[0] not in _LR_STYLES or styles[1] not in _DECAY_STYLES:
        return {}
    peak, floor, warmup, decay, start, end, length = (
        float(number) for number in numbers if number is not None
    )
    rate = {
        "style": styles[0],
        "peak": peak,
        "floor": floor,
        "warmup_samples": warmup,
        "decay_samples": decay,
    }
    return {
        "learning_rate": {**rate, "init": 0.0, "wsd_style": "exponential", "wsd_samples": 0.0},
        "weight_decay": {"style": styles[1], "start": start, "end": end, "samples": length},
    }


def _updates(optimizer: Any, iteration: int) -> int:
    """How many updates the moments have seen: `step` stands in one of several places, by the kind of optimizer."""
    if isinstance(optimizer, Mapping):
        if isinstance(step := optimizer.get("step", optimizer.get("common_step")), (int, float)):
            return int(step)
        for part in optimizer.values():
            found = _updates(part, -1)
            if found >= 0:
                return found
    if isinstance(optimizer, list):
        for part in optimizer:
            found = _updates(part, -1)
            if found >= 0:
                return found
    return iteration

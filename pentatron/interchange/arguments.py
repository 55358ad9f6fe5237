"""Megatron-LM's arguments as our settings, and ours as its arguments. Most have the same names: our flags are its flags."""

from collections.abc import Mapping
from typing import Any

from pentatron.errors import UserError
from pentatron.settings.declaration import Setting
from pentatron.settings.run import RunConfig, table
from pentatron.settings.settings import Settings, unset
from pentatron.settings.training import OptimConfig

# Theirs for ours, where the names differ; the first that is there counts.
_OTHER_NAMES = {
    "gated_linear_unit": ("swiglu",),
    "layernorm_epsilon": ("norm_epsilon", "layernorm_epsilon"),
    "num_experts": ("num_experts", "num_moe_experts"),
}
# The sections that a checkpoint's arguments may speak of; the rest is the business of a run.
_TAKEN = frozenset({"model", "moe", "parallel", "optim", "train"})
# What changes a model and has no counterpart here: if one of these acts, the weights mean something else.
_FOREIGN = {
    "multi_latent_attention": False,
    "apply_layernorm_1p": False,
    "squared_relu": False,
    "openai_gelu": False,
    "onnx_safe": False,
    "apply_residual_connection_post_layernorm": False,
    "mtp_num_layers": None,
    "qk_l2_norm": False,
    "attention_output_gate": False,
    "linear_attention_freq": None,
    "heterogeneous_layers_config_path": None,
    "encoder_num_layers": None,
    "quick_geglu": False,
    "moe_latent_size": None,
    "moe_apply_probs_on_input": False,
    "softmax_type": "vanilla",
    "no_rope_freq": None,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "experimental_attention_variant": None,
    "hybrid_override_pattern": None,
    "is_hybrid_model": False,
}


def our_settings(args: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Every setting of ours that Megatron-LM's arguments say something of."""
    _refuse_foreign(args, origin)
    found = _of_equal_meaning(args) | _of_other_form(args)
    said = Settings.defaults(**found)
    if unset(said.vocab_size):
        found["vocab_size"] = args.get("padded_vocab_size")
    found |= _schedule(said)
    needed = {
        "num_layers": said.num_layers,
        "hidden_size": said.hidden_size,
        "num_attention_heads": said.num_attention_heads,
    }
    missing = [name for name, value in needed.items() if name not in found or not value]
    if missing:
        raise UserError(f"{origin} does not say what its model is: its arguments lack {', '.join(missing)}")
    found["kv_channels"] = said.kv_channels or said.hidden_size // said.num_attention_heads
    found["num_experts"] = said.num_experts
    if said.num_experts is not None and unset(said.moe_ffn_hidden_size):
        found["moe_ffn_hidden_size"] = said.ffn_hidden_size
    return found


def _of_equal_meaning(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are settings of ours, most of them under the same name."""
    found: dict[str, Any] = {}
    for name, item in table().items():
        if item.section not in _TAKEN:
            continue
        for theirs in _OTHER_NAMES.get(name, (name,)):
            if theirs in args and _is_like(args[theirs], item):
                found[name] = _converted(args[theirs], item)
                break
    return found


def _of_other_form(args: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of ours that the arguments say in another way."""
    found: dict[str, Any] = {}
    if args.get("use_rope_scaling"):
        found["rope_scaling_type"] = "llama3"
    else:
        found["rope_scaling_factor"] = None
    if args.get("rotary_seq_len_interpolation_factor"):
        found["rope_scaling_type"] = "linear"
        found["rope_scaling_factor"] = float(args["rotary_seq_len_interpolation_factor"])
    if args.get("use_rotary_position_embeddings") and "position_embedding_type" not in args:
        found["position_embedding_type"] = "rope"
    if not args.get("group_query_attention"):
        found["num_query_groups"] = args.get("num_attention_heads")
    for name in ("moe_layer_freq", "window_attn_skip_freq"):
        if isinstance(args.get(name), list):
            found[name] = str(args[name]).replace(" ", "")
    return found


def _schedule(said: Settings) -> dict[str, Any]:
    """The settings of the schedule that a run leaves open; they follow from the rest, as in a run of ours."""
    size = said.global_batch_size or 1
    iterations = said.train_iters or -(-(said.train_samples or size) // size)
    found: dict[str, Any] = {
        "global_batch_size": size,
        "train_iters": iterations,
        "lr_decay_iters": said.lr_decay_iters or iterations,
        "lr_warmup_iters": said.lr_warmup_iters or 0,
        "min_lr": said.min_lr or 0.0,
    }
    if said.weight_decay_incr_style != "constant":
        start, end, decay = said.start_weight_decay, said.end_weight_decay, said.weight_decay
        found["start_weight_decay"] = decay if start is None else start
        found["end_weight_decay"] = decay if end is None else end
    return found


def _refuse_foreign(args: Mapping[str, Any], origin: str) -> None:
    acting = [name for name, idle in _FOREIGN.items() if args.get(name, idle) not in (idle, None, False)]
    if args.get("swiglu") is False and args.get("gated_linear_unit"):
        acting.append("gated_linear_unit")
    if acting:
        shown = ", ".join(f"{name} = {args[name]}" for name in acting)
        raise UserError(f"{origin} holds a model that is not built here: it was made with {shown}")


def _is_like(value: Any, item: Setting) -> bool:
    """Whether a value can be one of the setting's: stand-ins for objects cannot, nor what is not offered here."""
    if value is None:
        return item.optional
    if isinstance(value, list) or item.is_list:
        return isinstance(value, list) and item.is_list and all(isinstance(v, item.base_type) for v in value)
    if item.choices and value not in item.choices:
        return False
    if isinstance(value, bool) or item.base_type is bool:
        return isinstance(value, bool) and item.base_type is bool
    return (
        isinstance(value, (item.base_type, int))
        if item.base_type in (float, str)
        else isinstance(value, item.base_type)
    )


def _converted(value: Any, item: Setting) -> Any:
    if value is None:
        return None
    return tuple(value) if isinstance(value, list) else item.base_type(value)


def their_arguments(config: RunConfig, state: Mapping[str, Any], step: int) -> dict[str, Any]:
    """What Megatron-LM finds in `args` of a checkpoint: our settings under its names, and where the run stands."""
    model, pattern = config.model, config.moe.moe_layer_freq or "1"
    return {
        **{name: value for section in config.nested().values() for name, value in section.items()},
        "swiglu": model.gated_linear_unit,
        "norm_epsilon": model.layernorm_epsilon,
        "group_query_attention": model.num_query_groups != model.num_attention_heads,
        "use_rope_scaling": model.rope_scaling_type == "llama3",
        "moe_layer_freq": int(pattern) if pattern.isdecimal() else pattern,
        "add_position_embedding": model.position_embedding_type == "learned_absolute",
        "iteration": step,
        "consumed_train_samples": state.get("consumed_samples", 0),
        "consumed_valid_samples": state.get("consumed_valid_samples", 0),
        "skipped_train_samples": state.get("skipped_samples", 0),
        "data_parallel_random_init": False,
        # Random states are of our own kind and lie beside; this keeps Megatron-LM from looking for its own.
        "no_save_rng": True,
        "no_save_optim": False,
        "use_distributed_optimizer": bool(config.parallel.zero_stage),
        "ckpt_format": "torch_dist",
        "phase_transition_iterations": None,
    }


# What `common.pt` says besides arguments: where a run stands, for Megatron-LM and back.


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
        "schedule": _schedule_state(scheduler) if isinstance(scheduler, Mapping) else {},
        "flops": float(common.get("num_floating_point_operations_so_far") or 0.0),
    }


def _schedule_state(scheduler: Mapping[str, Any]) -> dict[str, Any]:
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

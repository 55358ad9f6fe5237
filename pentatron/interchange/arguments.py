"""Converts Megatron-LM's checkpoint arguments and common state to our settings and run state, and back."""

from collections.abc import Mapping
from typing import Any

from pentatron.errors import UserError
from pentatron.settings.declaration import Setting
from pentatron.settings.run_config import RunConfig, all_settings
from pentatron.settings.settings import Settings, is_unset
from pentatron.settings.training import OptimConfig

# Names in Megatron-LM where they differ from ours, in order of precedence.
_THEIR_NAMES = {
    "gated_linear_unit": ("swiglu",),
    "layernorm_epsilon": ("norm_epsilon", "layernorm_epsilon"),
    "num_experts": ("num_experts", "num_moe_experts"),
}
# Sections read from a checkpoint's arguments; others belong to the run.
_READ_SECTIONS = frozenset({"model", "moe", "parallel", "optim", "train"})
# Unsupported options that change the model. They are inactive if unset, false or as in `_INACTIVE`.
_UNSUPPORTED = (
    "multi_latent_attention apply_layernorm_1p squared_relu openai_gelu onnx_safe "
    "apply_residual_connection_post_layernorm mtp_num_layers qk_l2_norm attention_output_gate linear_attention_freq "
    "heterogeneous_layers_config_path encoder_num_layers quick_geglu moe_latent_size moe_apply_probs_on_input "
    "softmax_type no_rope_freq activation_func_clamp_value glu_linear_offset experimental_attention_variant "
    "hybrid_override_pattern is_hybrid_model"
).split()
_INACTIVE = {"softmax_type": "vanilla", "glu_linear_offset": 0.0}


def settings_from_arguments(args: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Returns our settings from Megatron-LM's arguments.

    Raises UserError for a model that is not supported.
    """
    _refuse_unsupported(args, origin)
    settings = _copied_settings(args) | _converted_settings(args)
    resolved = Settings.defaults(**settings)
    if is_unset(resolved.vocab_size):
        settings["vocab_size"] = args.get("padded_vocab_size")
    settings |= _derived_schedule(resolved)
    required = ("num_layers", "hidden_size", "num_attention_heads")
    if missing := [name for name in required if name not in settings or not getattr(resolved, name)]:
        raise UserError(f"{origin} does not describe its model: its arguments lack {', '.join(missing)}")
    settings["kv_channels"] = resolved.kv_channels or resolved.hidden_size // resolved.num_attention_heads
    settings["num_experts"] = resolved.num_experts
    if resolved.num_experts is not None and is_unset(resolved.moe_ffn_hidden_size):
        settings["moe_ffn_hidden_size"] = resolved.ffn_hidden_size
    return settings


def _copied_settings(args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with the meaning of a setting, usually under the same name."""
    settings: dict[str, Any] = {}
    for name, item in all_settings().items():
        names = _THEIR_NAMES.get(name, (name,)) if item.section in _READ_SECTIONS else ()
        valid = [args[theirs] for theirs in names if theirs in args and _is_valid(args[theirs], item)]
        if valid:
            convert = tuple if isinstance(valid[0], list) else item.base_type
            settings[name] = None if valid[0] is None else convert(valid[0])
    return settings


def _converted_settings(args: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that the arguments express differently."""
    llama3 = args.get("use_rope_scaling")
    settings: dict[str, Any] = {"rope_scaling_type": "llama3"} if llama3 else {"rope_scaling_factor": None}
    if args.get("rotary_seq_len_interpolation_factor"):
        settings["rope_scaling_type"] = "linear"
        settings["rope_scaling_factor"] = float(args["rotary_seq_len_interpolation_factor"])
    if args.get("use_rotary_position_embeddings") and "position_embedding_type" not in args:
        settings["position_embedding_type"] = "rope"
    if not args.get("group_query_attention"):
        settings["num_query_groups"] = args.get("num_attention_heads")
    for name in ("moe_layer_freq", "window_attn_skip_freq"):
        if isinstance(args.get(name), list):
            settings[name] = str(args[name]).replace(" ", "")
    return settings


def _derived_schedule(resolved: Settings) -> dict[str, Any]:
    """Settings of the schedule that arguments leave open, derived as in a run."""
    size = resolved.global_batch_size or 1
    iterations = resolved.train_iters or -(-(resolved.train_samples or size) // size)
    settings: dict[str, Any] = {"global_batch_size": size, "train_iters": iterations}
    settings["lr_decay_iters"] = resolved.lr_decay_iters or iterations
    settings["lr_warmup_iters"] = resolved.lr_warmup_iters or 0
    settings["min_lr"] = resolved.min_lr or 0.0
    if resolved.weight_decay_incr_style != "constant":
        for name in ("start_weight_decay", "end_weight_decay"):
            given = getattr(resolved, name)
            settings[name] = resolved.weight_decay if given is None else given
    return settings


def _refuse_unsupported(args: Mapping[str, Any], origin: str) -> None:
    active = [name for name in _UNSUPPORTED if args.get(name) not in (_INACTIVE.get(name), None, False)]
    if args.get("swiglu") is False and args.get("gated_linear_unit"):
        active.append("gated_linear_unit")
    if active:
        shown = ", ".join(f"{name} = {args[name]}" for name in active)
        raise UserError(f"{origin} contains a model that is not supported: it was trained with {shown}")


def _is_valid(value: Any, item: Setting) -> bool:
    """Whether a value is valid for the setting.

    Stand-ins of the unpickler and unsupported choices are not.
    """
    if value is None:
        return item.optional
    if isinstance(value, list) or item.is_list:
        return isinstance(value, list) and item.is_list and all(isinstance(v, item.base_type) for v in value)
    if item.choices and value not in item.choices:
        return False
    if isinstance(value, bool) or item.base_type is bool:
        return isinstance(value, bool) and item.base_type is bool
    # An int is also valid for a float, or a setting that is text here.
    return isinstance(value, item.base_type) or (item.base_type in (float, str) and isinstance(value, int))


def arguments_from_settings(config: RunConfig, state: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Returns `args` of a Megatron-LM checkpoint: our settings under its names, and the progress."""
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
        # Random states are stored in our own file. This keeps Megatron-LM from looking for its own.
        "no_save_rng": True,
        "no_save_optim": False,
        "use_distributed_optimizer": bool(config.parallel.zero_stage),
        "ckpt_format": "torch_dist",
        "phase_transition_iterations": None,
    }


# --- `common.pt`: the position in the run ---


# Checkpoint version of Megatron-LM.
CHECKPOINT_VERSION = 3.0
# The optimizer state has the shapes of the weights, so it can be loaded in any layout.
_SHARDING = "fully_reshardable"

# Names in the state of Megatron-LM's scheduler, by ours in the schedules of learning rate and weight decay.
_RATE_NAMES = {
    "peak": "max_lr",
    "floor": "min_lr",
    "warmup_samples": "lr_warmup_steps",
    "decay_samples": "lr_decay_steps",
    "style": "lr_decay_style",
}
_DECAY_NAMES = {"start": "start_wd", "end": "end_wd", "style": "wd_incr_style", "samples": "wd_incr_steps"}
# Styles that the scheduler's state describes completely. WSD also needs arguments.
_LR_STYLES = ("constant", "linear", "cosine", "inverse-square-root")
_DECAY_STYLES = ("constant", "linear", "cosine")


def common_state(step: int, state: Mapping[str, Any], config: RunConfig, stacked: bool) -> dict[str, Any]:
    """Returns the content of `common.pt` besides the arguments."""
    kinds = (False, True) if config.moe.num_experts else (False,)
    groups = [_optimizer_state(state, config.optim, of_experts) for of_experts in kinds]
    return {
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": step,
        "num_floating_point_operations_so_far": state.get("flops", 0.0),
        "optimizer": groups[0] if len(groups) == 1 else dict(enumerate(groups)),
        "opt_param_scheduler": _scheduler_state(state),
        "content_metadata": {
            "singleton_local_shards": False,
            "non_homogeneous_layers": not stacked,
            "distrib_optim_sharding_type": _SHARDING,
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "chained_optim_avoid_prefix": True,
        },
    }


def _optimizer_state(state: Mapping[str, Any], optim: OptimConfig, of_experts: bool) -> dict[str, Any]:
    """Parameter groups as Megatron-LM forms them: with and without weight decay."""
    group = {
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
    groups = [{**group, "wd_mult": wd_mult} for wd_mult in (1.0, 0.0)]
    return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": _SHARDING}


def _scheduler_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """State of Megatron-LM's scheduler, which counts in samples as ours does."""
    schedule = state.get("schedule") or {}
    rate, decay = schedule.get("learning_rate", {}), schedule.get("weight_decay", {})
    rates = {theirs: rate.get(ours) for ours, theirs in _RATE_NAMES.items()}
    decays = {theirs: decay.get(ours) for ours, theirs in _DECAY_NAMES.items()}
    return {**rates, "num_steps": state.get("scheduled_samples", 0), **decays}


def run_state_of(common: Mapping[str, Any], arguments: Mapping[str, Any], iteration: int) -> dict[str, Any]:
    """Converts the position of a Megatron-LM run to the run state of a manifest."""
    scheduler = common.get("opt_param_scheduler")
    steps = scheduler.get("num_steps") if isinstance(scheduler, Mapping) else None
    consumed = int(arguments.get("consumed_train_samples") or 0)
    iterations, size = arguments.get("train_iters") or 0, arguments.get("global_batch_size") or 1
    length = arguments.get("train_samples") or iterations * size
    return {
        "step": iteration,
        "consumed_samples": consumed,
        "consumed_valid_samples": int(arguments.get("consumed_valid_samples") or 0),
        "skipped_samples": int(arguments.get("skipped_train_samples") or 0),
        "scheduled_samples": int(steps) if steps is not None else consumed,
        "updates": _updates(common.get("optimizer"), iteration),
        # Megatron-LM builds the order of samples for the whole run.
        "ordered_for": [max(1, length, consumed)],
        "schedule": _schedule_of(scheduler) if isinstance(scheduler, Mapping) else {},
        "flops": float(common.get("num_floating_point_operations_so_far") or 0.0),
    }


def _schedule_of(scheduler: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the scheduler's state to our schedules; empty if incomplete."""

    def parts(names: Mapping[str, str]) -> dict[str, Any]:
        return {ours: scheduler.get(theirs) for ours, theirs in names.items()}

    rate, decay = parts(_RATE_NAMES), parts(_DECAY_NAMES)
    rate_style, decay_style = rate.pop("style"), decay.pop("style")
    complete = all(isinstance(number, (int, float)) for number in (*rate.values(), *decay.values()))
    if not complete or rate_style not in _LR_STYLES or decay_style not in _DECAY_STYLES:
        return {}
    rate, decay = ({name: float(number) for name, number in part.items()} for part in (rate, decay))
    unused = {"init": 0.0, "wsd_style": "exponential", "wsd_samples": 0.0}
    learning_rate = {"style": rate_style, **rate, **unused}
    return {"learning_rate": learning_rate, "weight_decay": {"style": decay_style, **decay}}


def _updates(optimizer: Any, iteration: int) -> int:
    """Number of optimizer updates, searched in the several places where optimizers store it."""
    if isinstance(optimizer, Mapping):
        if isinstance(step := optimizer.get("step", optimizer.get("common_step")), (int, float)):
            return int(step)
        optimizer = list(optimizer.values())
    parts = optimizer if isinstance(optimizer, list) else ()
    return next((updates for part in parts if (updates := _updates(part, -1)) >= 0), iteration)

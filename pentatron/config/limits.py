"""What a value must be by itself: within its limits, and of a feature that exists."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pentatron.config.run import table
from pentatron.config.setting import Setting


@dataclass(frozen=True)
class Limit:
    holds: Callable[[float], bool]
    words: str


ABOVE_ZERO = Limit(lambda x: x > 0, "more than 0")
ZERO_OR_MORE = Limit(lambda x: x >= 0, "0 or more")
BELOW_ONE = Limit(lambda x: 0 <= x < 1, "at least 0 and below 1")
ONE_OR_MORE = Limit(lambda x: x >= 1, "1 or more")
TOKENS_OR_ALL = Limit(lambda x: x >= -1, "-1 or more")
ABOVE_ONE = Limit(lambda x: x > 1, "more than 1")
BETWEEN = Limit(lambda x: 0 < x < 1, "more than 0 and below 1")
SHARE = Limit(lambda x: 0 < x <= 1, "above 0 and at most 1")
# NumPy's generators take no larger ones.
SEED = Limit(lambda x: 0 <= x < 2**32, "from 0 to 4294967295")
PORT = Limit(lambda x: 1 <= x <= 65535, "a port from 1 to 65535")

LIMITS: dict[str, Limit] = {
    **dict.fromkeys(
        (
            "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels num_query_groups seq_length "
            "max_position_embeddings vocab_size padded_vocab_size make_vocab_size_divisible_by layernorm_epsilon "
            "rotary_base rope_scaling_original_max_position_embeddings rope_scaling_low_freq_factor "
            "rope_scaling_high_freq_factor yarn_beta_fast yarn_beta_slow yarn_attention_factor "
            "num_experts moe_router_topk moe_ffn_hidden_size moe_shared_expert_intermediate_size "
            "moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk moe_expert_capacity_factor "
            "corpus_bytes dataset_size prefetch_factor micro_batch_size global_batch_size "
            "gradient_accumulation_steps num_microbatches rank_batch_size rampup_batch_size train_samples epochs "
            "lr_decay_iters lr_decay_samples lr_wsd_decay_iters lr_wsd_decay_samples adam_eps "
            "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
            "expert_model_parallel_size expert_tensor_parallel_size data_parallel_size ddp_bucket_size "
            "num_distributed_optimizer_instances "
            "virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage "
            "microbatch_group_size_per_virtual_pipeline_stage "
            "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers "
            "recompute_num_layers compile_layers_together cross_entropy_chunk save_interval keep_checkpoints save_retain_interval log_interval "
            "tensorboard_log_interval memory_monitor_interval nproc_per_node "
            "threads_per_process world_size distributed_timeout_minutes distributed_timeout_seconds_after_init "
            "initial_loss_scale loss_scale_window hysteresis "
            "eval_global_batch_size eval_micro_batch_size exit_interval exit_duration_in_mins "
            "iterations_to_skip check_weight_hash_across_dp_replicas_interval profile_step_end retro_cyclic_train_iters"
        ).split(),
        ABOVE_ZERO,
    ),
    **dict.fromkeys(
        (
            "sample_tokens init_method_std moe_aux_loss_coeff moe_z_loss_coeff moe_router_bias_update_rate "
            "yarn_mscale yarn_mscale_all_dim num_workers train_iters eval_interval eval_iters lr min_lr "
            "cuda_graph_warmup_steps lr_warmup_iters lr_warmup_samples lr_warmup_init weight_decay start_weight_decay end_weight_decay "
            "clip_grad local_rank max_restarts heartbeat_timeout mid_level_dataset_surplus loss_scale min_loss_scale "
            "ckpt_step manual_gc_interval profile_step_start profile_ranks "
            "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"
        ).split(),
        ZERO_OR_MORE,
    ),
    **dict.fromkeys(
        "hidden_dropout attention_dropout lr_warmup_fraction adam_beta1 adam_beta2 sgd_momentum".split(),
        BELOW_ONE,
    ),
    "rotary_percent": SHARE,
    "window_size": TOKENS_OR_ALL,
    **dict.fromkeys(("rope_scaling_factor", "rotary_seq_len_interpolation_factor"), ONE_OR_MORE),
    "loss_scale_growth_factor": ABOVE_ONE,
    "loss_scale_backoff_factor": BETWEEN,
    "seed": SEED,
    "master_port": PORT,
}


def out_of_limits(values: Mapping[str, Any]) -> dict[str, str]:
    """A sentence for every value that is wrong whatever the others are."""
    return {
        name: f"{table()[name].written(values[name])} must be {limit.words}"
        for name, limit in LIMITS.items()
        if not all(limit.holds(number) for number in _numbers(values[name]))
    }


def _numbers(value: Any) -> tuple[float, ...]:
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def not_available(values: Mapping[str, Any], sources: Mapping[str, str]) -> list[str]:
    """One sentence for every feature that was asked for and has not been built."""
    wanted: dict[str, list[Setting]] = {}
    for name, item in table().items():
        if item.refuses(values[name]):
            wanted.setdefault(item.not_yet, []).append(item)
    return [_refusal(feature, items, values, sources) for feature, items in wanted.items()]


def _refusal(
    feature: str, items: list[Setting], values: Mapping[str, Any], sources: Mapping[str, str]
) -> str:
    written = ", ".join(i.written(values[i.name], sources.get(i.name, "")) for i in items)
    verb = "needs" if len(items) == 1 else "need"
    return f"{written} {verb} {feature}, which this version does not have yet; {_way_out(items, sources)}"


def _way_out(items: list[Setting], sources: Mapping[str, str]) -> str:
    inherited = [i for i in items if sources.get(i.name, "").startswith("preset ")]
    if any(i.default in (None, ()) or i.default is False for i in inherited):
        return "choose another preset"
    if inherited:
        return f"add {' '.join(f'{i.flag} {i.default}' for i in inherited)} to do without"
    return f"leave {'it' if len(items) == 1 else 'them'} out"

"""Rules of the architecture and precision: experts, positions, windows, fp16 and fp8."""

import math

from pentatron.devices import FP8_MULTIPLE
from pentatron.layout.ranks import expert_size_problem
from pentatron.settings.declaration import flag_of
from pentatron.settings.layer_patterns import windowed_layers
from pentatron.settings.layout_rules import Rule, error_of, indivisible, refuse_if
from pentatron.settings.model import moe_layers
from pentatron.settings.model_sizes import grid_of
from pentatron.settings.settings import Settings, is_unset

# --- experts ---


def _experts(s: Settings) -> str | None:
    experts, ep, topk = s.num_experts, s.expert_model_parallel_size, s.moe_router_topk
    if experts is None:
        return f"--expert-model-parallel-size {ep} needs experts; give --num-experts" if ep > 1 else None
    if problem := indivisible(s, "num_experts", "expert_model_parallel_size"):
        return problem
    too_many = f"--moe-router-topk {topk} is more than --num-experts {experts}; use at most {experts}"
    return too_many if topk > experts else None


def _expert_ranks(s: Settings) -> str | None:
    if s.num_experts is None:
        return None
    grid = grid_of(s)
    return expert_size_problem(grid.data, grid.context, grid.tensor, grid.expert, grid.expert_tensor)


def _expert_width(s: Settings) -> str | None:
    if s.num_experts is None:
        return None
    width, ranks = s.moe_ffn_hidden_size, grid_of(s).expert_tensor
    if width % ranks:
        advice = f"{math.ceil(width / ranks) * ranks}, or another size"
        return f"--moe-ffn-hidden-size {width} is not divisible by --expert-tensor-parallel-size {ranks}; use {advice}"
    return None


def _shared_expert_width(s: Settings) -> str | None:
    width, tp = s.moe_shared_expert_intermediate_size, s.tensor_model_parallel_size
    if s.num_experts is None or width is None:
        return None
    name, advice = "moe_shared_expert_intermediate_size", math.ceil(width / tp) * tp
    return indivisible(s, name, "tensor_model_parallel_size", advice)


def _groups_of_experts(s: Settings) -> str | None:
    experts, topk = s.num_experts, s.moe_router_topk
    groups, used = s.moe_router_num_groups, s.moe_router_group_topk
    if experts is None or (groups is None and is_unset(used)):
        return None
    if groups is None or is_unset(used):
        return "--moe-router-num-groups and --moe-router-group-topk go together; give both"
    if problem := indivisible(s, "num_experts", "moe_router_num_groups"):
        return problem
    if used > groups:
        return f"--moe-router-group-topk {used} is more than --moe-router-num-groups {groups}; use at most {groups}"
    if problem := indivisible(s, "moe_router_topk", "moe_router_group_topk"):
        return problem
    each, most = experts // groups, used * (experts // groups)
    if topk <= most:
        return None
    product = f"{used} (--moe-router-group-topk) × {each} (experts per group) = {most}"
    return f"--moe-router-topk {topk} is more than the {product} experts a token can use; use at most {most}"


def _balancing(s: Settings) -> str | None:
    kinds, weights = s.moe_router_load_balancing_type, s.moe_aux_loss_coeff
    written = f"--moe-router-load-balancing-type {' '.join(kinds)}"
    if len(set(kinds)) < len(kinds):
        return f"{written} names one kind twice; name each once"
    if "none" in kinds and len(kinds) > 1:
        return f"{written}: none cannot be combined with another kind; leave it out"
    if len(weights) in (1, len(kinds)):
        return None
    return f"--moe-aux-loss-coeff has {len(weights)} numbers for {len(kinds)} kinds of balancing; give one for all, or one for each"


MOE_RULES: dict[str, Rule] = {
    "experts": _experts,
    "expert_ranks": _expert_ranks,
    "expert_width": _expert_width,
    "shared_expert_width": _shared_expert_width,
    "shared_gate": refuse_if(
        lambda s: s.moe_shared_expert_gate and s.moe_shared_expert_intermediate_size is None,
        "--moe-shared-expert-gate needs a shared expert; give --moe-shared-expert-intermediate-size",
    ),
    "layers_with_experts": lambda s: (
        None if s.num_experts is None else error_of(moe_layers, s.moe_layer_freq, s.num_layers)
    ),
    # Ranks must route different tokens. Without sequence parallelism, tensor ranks have the same ones.
    "experts_with_tensor_ranks": refuse_if(
        lambda s: s.num_experts is not None and s.tensor_model_parallel_size > 1 and not s.sequence_parallel,
        "experts with --tensor-model-parallel-size {s.tensor_model_parallel_size} need --sequence-parallel: without "
        "it {s.tensor_model_parallel_size} ranks would route the same tokens; leave --no-sequence-parallel out",
    ),
    "groups_of_experts": _groups_of_experts,
    "expert_bias": refuse_if(
        lambda s: s.moe_router_enable_expert_bias and s.moe_router_score_function != "sigmoid",
        "--moe-router-enable-expert-bias needs independent scores; give --moe-router-score-function sigmoid",
    ),
    "pre_softmax": refuse_if(
        lambda s: (
            s.num_experts is not None
            and s.moe_router_score_function == "softmax"
            and s.moe_router_topk == 1
            and not s.moe_router_pre_softmax
        ),
        "--moe-router-topk 1 with a softmax over the one selected expert always gives it the weight 1, so the "
        "router gets no gradient; give --moe-router-pre-softmax",
    ),
    "balancing": _balancing,
}


# --- rotary positions, their scaling for long sequences, and windows ---


def _scaling(s: Settings) -> str | None:
    """Returns the kind of rotary scaling in effect. Without rope there is none; a notice reports it."""
    return s.rope_scaling_type if s.position_embedding_type == "rope" else None


def _rotary(s: Settings) -> str | None:
    width = int(s.kv_channels * s.rotary_percent)
    if s.position_embedding_type != "rope" or width % 2 == 0:
        return None
    product = f"{s.kv_channels} × {s.rotary_percent} (--rotary-percent) = {width}"
    advice = "change --kv-channels or --num-attention-heads"
    return f"the rotated part of a head, {product}, must be even; {advice}"


def _window(s: Settings) -> str | None:
    window = s.window_size
    if not window or (len(window) == 2 and window[1] == 0):
        return None
    meaning = "a token attends to this many tokens before it, and to none after it"
    return f"--window-size {','.join(map(str, window))} must be LEFT,0, for example 4095,0: {meaning}"


POSITION_RULES: dict[str, Rule] = {
    "rotary": _rotary,
    "factor": refuse_if(
        lambda s: _scaling(s) is not None and is_unset(s.rope_scaling_factor),
        "--rope-scaling-type {s.rope_scaling_type} needs a factor; give --rope-scaling-factor",
    ),
    "yarn_original_length": refuse_if(
        lambda s: _scaling(s) == "yarn" and is_unset(s.rope_scaling_original_max_position_embeddings),
        "--rope-scaling-type yarn needs the sequence length of pretraining; "
        "give --rope-scaling-original-max-position-embeddings, for example 32768 for Qwen2.5",
    ),
    "llama3_wavelengths": refuse_if(
        lambda s: (
            _scaling(s) == "llama3" and s.rope_scaling_low_freq_factor >= s.rope_scaling_high_freq_factor
        ),
        "--rope-scaling-low-freq-factor {s.rope_scaling_low_freq_factor} must be below "
        "--rope-scaling-high-freq-factor {s.rope_scaling_high_freq_factor}: wavelengths between "
        "them are scaled in part; lower the first or raise the second",
    ),
    "yarn_rotations": refuse_if(
        lambda s: _scaling(s) == "yarn" and s.yarn_beta_slow >= s.yarn_beta_fast,
        "--yarn-beta-slow {s.yarn_beta_slow} must be below --yarn-beta-fast {s.yarn_beta_fast}: channel pairs "
        "between them are scaled in part; lower the first or raise the second",
    ),
    "yarn_base": refuse_if(
        lambda s: _scaling(s) == "yarn" and s.rotary_base <= 1,
        "--rope-scaling-type yarn needs --rotary-base above 1, not {s.rotary_base}",
    ),
    "window": _window,
    "layers_with_windows": lambda s: (
        error_of(windowed_layers, s.window_attn_skip_freq, s.num_layers) if s.window_size else None
    ),
    "window_dropout": refuse_if(
        lambda s: s.window_size and s.attention_dropout and s.attention_backend in ("flash", "cudnn"),
        "--attention-backend {s.attention_backend} does not support dropout with a window; use "
        "--attention-backend auto, or --attention-dropout 0",
    ),
    "deterministic_attention": refuse_if(
        lambda s: s.deterministic_mode and s.attention_backend == "cudnn",
        "--deterministic-mode: the backward of cuDNN's attention is nondeterministic; use --attention-backend "
        "auto, which then selects another kernel",
    ),
}


# --- precision and loss scales ---


def _fp8_tokens(s: Settings) -> str | None:
    """Checks the alignment of weight gradient matmuls, which sum over the tokens of a micro-batch."""
    if s.fp8_format is None:
        return None
    length, ranks = s.seq_length, s.context_parallel_size
    divided = f" / {ranks} context ranks" if ranks > 1 else ""
    for name in ("micro_batch_size", "eval_micro_batch_size"):
        size = getattr(s, name) or s.micro_batch_size
        tokens = size * length // ranks
        if tokens % FP8_MULTIPLE:
            fitting = FP8_MULTIPLE // math.gcd(FP8_MULTIPLE, length // ranks)
            needed = f"a multiple of {FP8_MULTIPLE} tokens in a micro-batch"
            advice = f"a multiple of {fitting} for {flag_of(name)}, or one of {FP8_MULTIPLE * ranks} for --seq-length"
            product = f"{size} × {length}{divided} is {tokens}"
            return f"--fp8 {s.fp8_format} needs {needed}, and {product}; use {advice}"
    return None


def _fp8_layers(s: Settings) -> str | None:
    if s.fp8_format is None or not s.first_last_layers_bf16:
        return None
    first, last, layers = s.num_layers_at_start_in_bf16, s.num_layers_at_end_in_bf16, s.num_layers
    if first + last < layers or s.fp8_output_layer:
        return None
    ends = f"--first-last-layers-bf16 with {first} first and {last} last layers"
    advice = "lower --num-layers-at-start-in-bf16 or --num-layers-at-end-in-bf16, or leave --fp8 out"
    return f"{ends} leaves none of {layers} for --fp8; {advice}"


PRECISION_RULES: dict[str, Rule] = {
    "precision": refuse_if(lambda s: s.fp16 and s.bf16, "--fp16 and --bf16 exclude each other; choose one"),
    "smallest_scale": refuse_if(
        lambda s: s.initial_loss_scale < s.min_loss_scale and not s.loss_scale,
        "--initial-loss-scale {s.initial_loss_scale:g} is below --min-loss-scale {s.min_loss_scale:g}; "
        "raise the first or lower the second",
    ),
    "fp8_without_bf16": refuse_if(
        lambda s: s.fp8_format is not None and not s.bf16,
        "--fp8 {s.fp8_format} is for matmuls of models in bf16; add --bf16, or leave it out",
    ),
    # What the settings alone determine. `check_fp8_support` checks the GPU in the worker process.
    "fp8_on_a_cpu": refuse_if(
        lambda s: s.fp8_format is not None and s.device == "cpu",
        "--fp8 {s.fp8_format} needs a GPU with fp8 matmuls, and --device cpu has none; leave one of them out",
    ),
    "fp8_tokens": _fp8_tokens,
    "fp8_layers": _fp8_layers,
}

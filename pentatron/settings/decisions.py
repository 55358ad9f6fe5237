"""Decides what a run compiles, fuses, groups, records, offloads, overlaps and computes in fp8.

`decide` is the only reader of the settings that request these. The model builder acts on its result, the
notices print its reasons, and the planner estimates its cost.

Some conditions are known only at run time: whether the compiler and Triton work, whether a CUDA graph fits
into memory, and which custom layers can be compiled. They are checked there, and can only disable what was
decided.
"""

from pentatron.devices import FP8_MULTIPLE
from pentatron.settings.decision_types import (
    CompileDecision,
    Decisions,
    DeviceFacts,
    ExpertsDecision,
    Fp8Decision,
    GateDecision,
    GraphsDecision,
    LossDecision,
    OptimizerOptions,
)
from pentatron.settings.declaration import first_reason
from pentatron.settings.model import MoEConfig
from pentatron.settings.model_sizes import expert_sizes, layer_seconds, mlp_sizes
from pentatron.settings.run_config import RunConfig
from pentatron.settings.settings import Settings
from pentatron.settings.training import DataConfig

# The grouped matmul needs rows aligned to 16 bytes: 8 elements in bf16.
_GROUPED_MULTIPLE = 8
# Compute capability of the first NVIDIA GPUs with fp8 matmuls (Ada).
_FP8_CAPABILITY = (8, 9)
# Values of Megatron's --cuda-graph-impl are accepted; there is one implementation here.
_GRAPHS = {"on": "on", "local": "on", "transformer_engine": "on", "off": "off", "none": "off", "auto": "auto"}
# About how long the host takes to launch the kernels of one layer, forward and backward.
_LAUNCH_SECONDS = 2.5e-3
# Larger in fp8: there are 1.5 times as many kernels, more of them launched from Python, and the GPU is faster
# than in 16 bits, for which `layer_seconds` estimates.
_LAUNCH_SECONDS_FP8 = 13e-3
_ALWAYS_OVERLAPPED = "ZeRO 3 always sums and gathers one layer while others compute"


def decide(config: RunConfig, device: DeviceFacts, has_custom_program: bool = False) -> Decisions:
    """Makes all decisions of a run.

    `has_custom_program`: the model or its forward step is custom code of the user.
    """
    parallel, no_effect = config.parallel, _fp8_no_effect(config)
    reduce, no_effect["overlap_grad_reduce"] = _gradient_overlap(config)
    gather, no_effect["overlap_param_gather"] = _parameter_overlap(config)
    fused, no_effect["fused_update"] = _update(config, device)
    compilation, no_effect["compile_layers_together"] = _compile(config, device)
    gate, no_effect["bias_swiglu_fusion"] = _gate(config, device)
    loss, not_fused = _loss(config, device)
    no_effect |= dict.fromkeys(("cross_entropy_fusion_impl", "cross_entropy_chunk"), not_fused)
    experts, no_effect["moe_grouped_gemm"] = _experts(config, device)
    profiler, no_effect["use_pytorch_profiler"] = _torch_profiler(config, device)
    offloads, records = parallel.optimizer_cpu_offload, config.memory.record_memory_history
    in_memory = "everything is in host memory already, so this has no effect"
    no_effect["optimizer_cpu_offload"] = in_memory if offloads and device.is_cpu else ""
    not_recorded = "only GPU allocations are recorded, and this run is on a CPU"
    no_effect["record_memory_history"] = not_recorded if records and device.is_cpu else ""
    offloads, records = offloads and not device.is_cpu, records and not device.is_cpu
    return Decisions(
        device,
        compilation,
        gate,
        loss,
        experts,
        _graphs(config, device, has_custom_program),
        _fp8(config, device),
        records,
        profiler,
        OptimizerOptions(parallel.zero_stage, parallel.ddp_bucket_size, reduce, gather, offloads, fused),
        slow_fp16=config.precision.fp16 and device.is_cpu,
        no_effect=no_effect,
    )


# Each function returns what is done, and why a setting of it has no effect in this run; empty if it has one.


# --- optimizer ---


def _update(config: RunConfig, device: DeviceFacts) -> tuple[bool, str]:
    """Whether gradient clipping, update and rounding run as one kernel."""
    optim, offloads = config.optim, config.parallel.optimizer_cpu_offload
    reasons = {
        f"--optimizer {optim.optimizer} always uses torch's update": optim.optimizer != "adam",
        "offloaded state (--optimizer-cpu-offload) is always updated by torch on the CPU": offloads,
        "on a CPU the update is always torch's": device.is_cpu,
    }
    no_effect = first_reason(reasons)
    return optim.fused_update and device.is_gpu and not no_effect, no_effect


def _gradient_overlap(config: RunConfig) -> tuple[bool, str]:
    wanted, sharded = config.parallel.overlap_grad_reduce, config.parallel.zero_stage == 3
    if not has_replicas(config):
        return False, "one data-parallel rank has nothing to reduce" if wanted else ""
    return wanted or sharded, _ALWAYS_OVERLAPPED if wanted and sharded else ""


def _parameter_overlap(config: RunConfig) -> tuple[bool, str]:
    wanted, stage = config.parallel.overlap_param_gather, config.parallel.zero_stage
    if stage == 0:
        no_effect = "parameters are not sharded (--zero-stage 0), so there is nothing to gather"
    elif not has_replicas(config):
        no_effect = "one data-parallel rank has nothing to gather"
    else:
        no_effect = _ALWAYS_OVERLAPPED if stage == 3 else ""
    return no_effect == _ALWAYS_OVERLAPPED or (wanted and not no_effect), no_effect if wanted else ""


def has_replicas(config: RunConfig) -> bool:
    """Whether parameters are replicated on ranks that see different tokens.

    Experts may also be replicated across tensor ranks.
    """
    parallel = config.parallel
    replicas = (parallel.data_parallel_size or 1) * parallel.context_parallel_size
    if config.moe.num_experts is None:
        return replicas > 1
    sharing = parallel.expert_model_parallel_size * _ranks_per_expert(config)
    return replicas > 1 or parallel.tensor_model_parallel_size > sharing


def _ranks_per_expert(config: RunConfig) -> int:
    """Returns the number of ranks that one expert is sharded over."""
    parallel = config.parallel
    return parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size


# --- compiled layers ---


def _compile(config: RunConfig, device: DeviceFacts) -> tuple[CompileDecision, str]:
    wanted, deterministic = config.kernels.compile, config.precision.deterministic_mode
    by_default = wanted == "auto" and device.is_gpu
    held_back = (
        "layers are not compiled: --deterministic-mode needs bitwise equal runs, and the compiler may choose other kernels in the next "
        "run; --compile on compiles them without choosing kernels by measured time"
    )
    count = config.kernels.compile_layers_together
    no_effect = _why_compiled_singly(config, device, count) if count > 1 else ""
    decision = CompileDecision(
        on=wanted == "on" or (by_default and not deterministic),
        required=wanted == "on",
        disabled_reason=held_back if by_default and deterministic else "",
        layers_per_graph=1 if no_effect else count,
        documents=_has_documents(config.data),
        deterministic=deterministic,
    )
    return decision, no_effect


def _why_compiled_singly(config: RunConfig, device: DeviceFacts, count: int) -> str:
    """Returns why several layers cannot be one compiled function, or an empty string.

    Nothing outside the graph, such as communication, may run between or inside these layers.
    """
    wanted, parallel = config.kernels.compile, config.parallel
    if wanted == "off":
        return "no layer is compiled (--compile off)"
    if wanted == "auto" and config.precision.deterministic_mode:
        return "no layer is compiled (--deterministic-mode)"
    sparse = frozenset(config.layers_with_experts)
    dense = [part for part in config.stages if not sparse.intersection(part.layers)]
    layers, ranks = config.model.num_layers, parallel.pipeline_model_parallel_size
    longest = max((len(part.layers) for part in dense), default=0)
    gathers, _ = _parameter_overlap(config)
    reasons = {
        "document boundaries differ in every batch": _has_documents(config.data),
        "experts are not compiled": not dense,
        "tensor ranks communicate inside a layer": parallel.tensor_model_parallel_size > 1,
        "context ranks communicate inside a layer": parallel.context_parallel_size > 1,
        "the schedule defers weight gradients": config.defers_weight_gradients,
        "weights are gathered at every layer (ZeRO 3)": parallel.zero_stage == 3 and has_replicas(config),
        "gathered weights are waited for at every layer (--overlap-param-gather)": gathers,
        "custom layers (--spec) are not compiled": bool(config.model.spec),
        f"there are {layers} layers on {ranks} pipeline rank(s)": longest < count,
        "fewer layers are recomputed at a time": max(map(config.longest_run, dense), default=0) < count,
    }
    if reason := first_reason(reasons):
        return f"{reason}, so layers are compiled one by one"
    on_a_cpu = wanted == "auto" and device.is_cpu
    return "on a CPU layers are compiled only with --compile on" if on_a_cpu else ""


def _has_documents(data: DataConfig) -> bool:
    """Whether attention is limited to the document of each token."""
    return data.reset_attention_mask or data.sft_packing


# --- fused kernels ---


def _gate(config: RunConfig, device: DeviceFacts) -> tuple[GateDecision, str]:
    model, defers = config.model, config.defers_weight_gradients
    wanted, fp8_layers = config.kernels.bias_swiglu_fusion and model.gated_linear_unit, _fp8_layers(config)
    # A shared expert is an MLP too.
    shared, sparse = config.moe.moe_shared_expert_intermediate_size, frozenset(config.layers_with_experts)
    widths = {n: shared if n in sparse else model.ffn_hidden_size for n in range(model.num_layers)}
    tensor = config.parallel.tensor_model_parallel_size
    first = {n: mlp_sizes(model, tensor, width).linear_fc1 for n, width in widths.items() if width}
    fits = {n: fc1.inputs % FP8_MULTIPLE == fc1.outputs % FP8_MULTIPLE == 0 for n, fc1 in first.items()}
    in_fp8 = [layer in fp8_layers and is_multiple for layer, is_multiple in fits.items()]
    schedule = config.parallel.pipeline_schedule
    deferred = f"--pipeline-schedule {schedule} defers weight gradients, which this kernel cannot do"
    reasons = {
        "the MLPs are not gated (--swiglu)": not model.gated_linear_unit,
        "every layer has experts, whose gates this kernel does not compute": not first,
        deferred: not any(in_fp8) and defers,
        "this kernel needs a GPU": not any(in_fp8) and device.is_cpu,
    }
    in_second = wanted and not all(in_fp8) and device.is_gpu and not defers
    return GateDecision(in_second, wanted and any(in_fp8)), first_reason(reasons)


def _loss(config: RunConfig, device: DeviceFacts) -> tuple[LossDecision, str]:
    fusion, implementation = config.kernels.fused_cross_entropy, config.kernels.cross_entropy_fusion_impl
    reasons = {
        "the loss is not fused (--no-cross-entropy-loss-fusion), so this has no effect": fusion == "off",
        "on CPUs the loss is fused only with --cross-entropy-loss-fusion": fusion == "auto" and device.is_cpu,
    }
    on = fusion == "on" or (fusion == "auto" and device.is_gpu)
    kernel = device.is_gpu and implementation != "native"
    return LossDecision(on, implementation, config.kernels.cross_entropy_chunk, kernel), first_reason(reasons)


# --- experts ---


def wants_grouped_experts(moe: MoEConfig) -> bool:
    """Whether the grouped matmul is used where its kernel exists. It is by default."""
    return moe.moe_grouped_gemm is not False


def fit_grouped_matmul(*widths: int) -> bool:
    """Whether matrices of these widths are aligned as the grouped matmul kernel needs."""
    return all(width % _GROUPED_MULTIPLE == 0 for width in widths)


def _experts(config: RunConfig, device: DeviceFacts) -> tuple[ExpertsDecision, str]:
    moe = config.moe
    if not moe.num_experts:
        return ExpertsDecision(False, False), "there are no experts (--num-experts), so this has no effect"
    shards, hidden = _ranks_per_expert(config), config.model.hidden_size
    inner = expert_sizes(config.model, moe, expert_tp_size=shards).inner
    fits = fit_grouped_matmul(hidden, inner)
    by_kernel = config.precision.bf16 and not device.is_cpu
    no_effect = ""
    if not by_kernel and moe.moe_grouped_gemm:
        no_effect = "its kernel needs bf16 on a GPU; each expert has separate matmuls here"
    elif not by_kernel:
        no_effect = "its kernel needs bf16 on a GPU, so each expert has separate matmuls anyway"
    elif device.is_gpu and moe.moe_grouped_gemm and not fits:
        multiples = f"multiples of {_GROUPED_MULTIPLE}, not {hidden} and {inner}"
        no_effect = f"its kernel needs widths that are {multiples}; each expert has separate matmuls"
    on = wants_grouped_experts(moe) and config.precision.bf16 and device.is_gpu and fits
    return ExpertsDecision(on, on and config.parallel.expert_model_parallel_size * shards == 1), no_effect


# --- fp8 ---


def _fp8(config: RunConfig, device: DeviceFacts) -> Fp8Decision:
    precision, layers = config.precision, _fp8_layers(config)
    wanted = precision.fp8_format
    return Fp8Decision(
        format=wanted,
        by_rows=precision.fp8_recipe == "rowwise",
        layers=layers,
        head=wanted is not None and precision.fp8_output_layer,
        experts_in_bf16=config.moe.num_experts is not None and len(layers) > 0,
        unsupported_reason="" if wanted is None else _fp8_unsupported_reason(device),
    )


def _fp8_no_effect(config: RunConfig) -> dict[str, str]:
    """Maps the settings of fp8 to why they have no effect."""
    no_effect = "" if config.precision.fp8_format else "there are no fp8 matmuls (--fp8)"
    all_layers = "all layers have fp8 matmuls without --first-last-layers-bf16"
    ends_no_effect = no_effect or ("" if config.precision.first_last_layers_bf16 else all_layers)
    return {
        **dict.fromkeys(("fp8_recipe", "fp8_output_layer", "first_last_layers_bf16"), no_effect),
        **dict.fromkeys(("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"), ends_no_effect),
    }


def _fp8_layers(config: RunConfig) -> range:
    """Returns the indices of the layers with fp8 matmuls."""
    precision, layers = config.precision, config.model.num_layers
    if precision.fp8_format is None:
        return range(0)
    if not precision.first_last_layers_bf16:
        return range(layers)
    return range(precision.num_layers_at_start_in_bf16, layers - precision.num_layers_at_end_in_bf16)


def _fp8_unsupported_reason(device: DeviceFacts) -> str:
    """Returns why the device has no fp8 matmuls, or an empty string.

    They are not emulated, which would be slow.
    """
    if device.is_cpu:
        return "this run is on a CPU"
    if device.kind and not (device.is_gpu and device.is_nvidia):
        return "this is not an NVIDIA GPU"
    if device.capability is None or device.capability >= _FP8_CAPABILITY:
        return ""
    return f"this one ({device.name}) has {device.capability[0]}.{device.capability[1]}"


# --- CUDA graphs ---


def _graphs(config: RunConfig, device: DeviceFacts, has_custom_program: bool) -> GraphsDecision:
    wanted = _GRAPHS[config.kernels.cuda_graphs]
    if wanted == "off" or (wanted == "auto" and not device.is_gpu):
        return GraphsDecision()
    problem = why_not_capturable(config.settings)
    if has_custom_program:
        problem = problem or "a custom model or forward step may have data-dependent control flow"
    if device.kind and not (device.is_gpu and device.is_nvidia):
        problem = "there is no NVIDIA GPU"
    if wanted == "on":
        return GraphsDecision(required=True, problem=problem)
    launching = _LAUNCH_SECONDS_FP8 if config.precision.fp8_format else _LAUNCH_SECONDS
    if layer_seconds(config.model, config.moe, config.train.micro_batch_size, device.peak) > launching:
        return GraphsDecision()
    if not problem:
        return GraphsDecision(if_memory_allows=True)
    slow = "launching kernels takes longer than computing such small layers"
    return GraphsDecision(not_captured_reason=f"CUDA graphs are not used, though {slow}: {problem}")


def requires_graphs(cuda_graphs: str) -> bool:
    """Whether a run with this value of --cuda-graphs must stop if its steps cannot be captured."""
    return _GRAPHS.get(cuda_graphs) == "on"


def why_not_capturable(s: Settings) -> str:
    """Returns why the steps of the run cannot be captured as CUDA graphs, or an empty string.

    A graph replays the same kernel launches in every step, so they must not depend on the tokens.
    """
    ranks = s.tensor_model_parallel_size * s.pipeline_model_parallel_size * s.context_parallel_size
    recomputes_dropout = s.attention_dropout > 0 and s.recompute_granularity is not None
    reasons = {
        "several processes communicate during a step": ranks * (s.data_parallel_size or 1) > 1,
        "the number of tokens of an expert is known only during the step": s.num_experts is not None,
        "document boundaries differ in every batch": _has_documents(s),
        "custom layers (--spec) may have data-dependent control flow": s.spec,
        "recompute with --attention-dropout reads the state of a random generator": recomputes_dropout,
        "--timing-log-level 2 times forward and backward separately": s.timing_log_level > 1,
    }
    return first_reason(reasons)


# --- profiling ---


def _torch_profiler(config: RunConfig, device: DeviceFacts) -> tuple[bool, str]:
    wanted = config.log.use_pytorch_profiler
    if not config.log.profile:
        return False, "nothing is profiled (--profile)"
    no_effect = "on a CPU the profiler is always torch's" if wanted and device.is_cpu else ""
    return wanted or device.is_cpu, no_effect

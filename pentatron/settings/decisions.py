"""Decides what a run compiles, fuses, groups, records, offloads, overlaps and computes in fp8.

`decide` is the only reader of the settings that ask for these. The builder acts on its result, the notices print its
reasons, and the planner costs it.

Some conditions show only when code runs: whether the compiler and Triton work, whether a recording has room, and
which of a user's own layers can be compiled. They are checked there, and can only take away from a decision.
"""

from pentatron.devices import FP8_MULTIPLE
from pentatron.layout.stages import StagePart
from pentatron.settings.decision_types import (
    CompileDecision,
    Decision,
    Decisions,
    DeviceFacts,
    ExpertsDecision,
    Fp8Decision,
    GateDecision,
    GraphsDecision,
    LossDecision,
    OptimizerOptions,
)
from pentatron.settings.model import MoEConfig
from pentatron.settings.parameters import expert_sizes, layer_seconds, mlp_sizes
from pentatron.settings.run import RunConfig
from pentatron.settings.settings import Settings
from pentatron.settings.training import DataConfig

# Decides how the optimizer updates, where its state is, and what hides behind computation.


_ALWAYS_OVERLAPPED = "ZeRO 3 always sums and gathers one layer while others compute"


def decide_update(config: RunConfig, device: DeviceFacts) -> Decision:
    """Whether clipping, update and rounding are one kernel."""
    optim = config.optim
    idle = ""
    if optim.optimizer != "adam":
        idle = f"--optimizer {optim.optimizer} is torch's in any case"
    elif config.parallel.optimizer_cpu_offload:
        idle = "what is in host memory (--optimizer-cpu-offload) is updated there by torch in any case"
    elif device.is_cpu:
        idle = "on a CPU the update is torch's in any case"
    return Decision(optim.fused_update and device.is_gpu and not idle, idle)


def decide_offload(config: RunConfig, device: DeviceFacts) -> Decision:
    """Whether master weights and moments are in host memory, away from the device."""
    wanted = config.parallel.optimizer_cpu_offload
    idle = "everything is in host memory already, so this changes nothing" if wanted and device.is_cpu else ""
    return Decision(wanted and not idle, idle)


def decide_gradient_overlap(config: RunConfig) -> Decision:
    wanted, sharded = config.parallel.overlap_grad_reduce, config.parallel.zero_stage == 3
    if not has_copies(config):
        return Decision(False, "one data-parallel rank has nothing to reduce" if wanted else "")
    return Decision(wanted or sharded, _ALWAYS_OVERLAPPED if wanted and sharded else "")


def decide_parameter_overlap(config: RunConfig) -> Decision:
    wanted, stage = config.parallel.overlap_param_gather, config.parallel.zero_stage
    if stage == 0:
        idle = "parameters are not sharded (--zero-stage 0), so there is nothing to gather"
    elif not has_copies(config):
        idle = "one data-parallel rank has nothing to gather"
    else:
        idle = _ALWAYS_OVERLAPPED if stage == 3 else ""
    return Decision(idle == _ALWAYS_OVERLAPPED or (wanted and not idle), idle if wanted else "")


def has_copies(config: RunConfig) -> bool:
    """Whether several ranks hold the same parameters and see other tokens; of experts, tensor ranks may too."""
    parallel = config.parallel
    replicas = (parallel.data_parallel_size or 1) * parallel.context_parallel_size
    if config.moe.num_experts is None:
        return replicas > 1
    sharing = parallel.expert_model_parallel_size * expert_parts(config)
    return replicas > 1 or parallel.tensor_model_parallel_size > sharing


def expert_parts(config: RunConfig) -> int:
    """Ranks that share one expert."""
    parallel = config.parallel
    return parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size


# The grouped matmul reads rows that begin at multiples of 16 bytes: 8 numbers in bf16.
_GROUPED_MULTIPLE = 8
# Compute capability of the first NVIDIA GPUs with fp8 matmuls (Ada).
_FP8_CAPABILITY = (8, 9)
# Megatron names whose graphs they are; here there is one kind.
_GRAPHS = {"on": "on", "local": "on", "transformer_engine": "on", "off": "off", "none": "off", "auto": "auto"}
# A host launches the kernels of a layer, forward and backward, in about this many seconds.
_LAUNCHING = 2.5e-3
# In fp8 there are half as many again to launch, more of them through Python, and the GPU is done sooner than in
# 16 bits, by which the time of a layer is estimated here.
_LAUNCHING_IN_FP8 = 13e-3


def device_of_settings(config: RunConfig) -> DeviceFacts:
    """What the settings alone say of the device."""
    return DeviceFacts("" if config.launch.device == "auto" else config.launch.device)


def decide(config: RunConfig, device: DeviceFacts, own_program: bool = False) -> Decisions:
    """`own_program`: the model or its forward step is the user's own code."""
    update, offload = decide_update(config, device), decide_offload(config, device)
    gradients, parameters = decide_gradient_overlap(config), decide_parameter_overlap(config)
    options = OptimizerOptions(
        config.parallel.zero_stage,
        config.parallel.ddp_bucket_size,
        gradients.on,
        parameters.on,
        offload.on,
        update.on,
    )
    return Decisions(
        device,
        _compile(config, device),
        _gate(config, device),
        _loss(config, device),
        _experts(config, device),
        _graphs(config, device, own_program),
        _fp8(config, device),
        update,
        offload,
        gradients,
        parameters,
        _allocations_recorded(config, device),
        _torch_profiler(config, device),
        options,
        slow_fp16=config.precision.fp16 and device.is_cpu,
    )


# --- compiled layers ---


def _compile(config: RunConfig, device: DeviceFacts) -> CompileDecision:
    wanted, deterministic = config.kernels.compile, config.precision.deterministic_mode
    by_default = wanted == "auto" and device.is_gpu
    held_back = (
        "layers are not compiled: --deterministic-mode wants the same bits in every run, and a compiler may choose other kernels in "
        "the next; --compile on compiles them, with kernels that are not chosen by the clock"
        if by_default and deterministic
        else ""
    )
    count = config.kernels.compile_layers_together
    apart = _compiled_one_by_one(config, device, count) if count > 1 else ""
    return CompileDecision(
        on=wanted == "on" or (by_default and not deterministic),
        required=wanted == "on",
        held_back=held_back,
        together=1 if apart else count,
        together_idle=apart,
        documents=_has_documents(config.data),
        deterministic=deterministic,
    )


def _compiled_one_by_one(config: RunConfig, device: DeviceFacts, count: int) -> str:
    """Why no layers can be one compiled function: they must be compiled whole, with nothing in between."""
    wanted, parallel = config.kernels.compile, config.parallel
    if wanted == "off":
        return "no layer is compiled (--compile off)"
    if wanted == "auto" and config.precision.deterministic_mode:
        return "no layer is compiled (--deterministic-mode)"
    sparse = frozenset(config.layers_with_experts)
    dense = [part for part in config.stages if not sparse.intersection(part.layers)]
    apart = {
        "documents begin elsewhere in every batch": _has_documents(config.data),
        "experts are not compiled": not dense,
        "tensor ranks talk to each other inside a layer": parallel.tensor_model_parallel_size > 1,
        "context ranks talk to each other inside a layer": parallel.context_parallel_size > 1,
        "weight gradients wait for another part of the schedule": config.defers_weight_gradients,
        "weights are waited for at every layer (ZeRO 3)": parallel.zero_stage == 3 and has_copies(config),
        "weights are waited for at every layer (--overlap-param-gather)": decide_parameter_overlap(config).on,
        "layers of your own (--spec) are not compiled": bool(config.model.spec),
        f"there are {config.model.num_layers} layers on {parallel.pipeline_model_parallel_size} pipeline rank(s)": (
            max((len(part.layers) for part in dense), default=0) < count
        ),
        "fewer are recomputed at a time": max((_longest_run(config, p) for p in dense), default=0) < count,
    }
    for reason, holds in apart.items():
        if holds:
            return f"{reason}, so layers are compiled one by one"
    on_a_cpu = wanted == "auto" and device.is_cpu
    return "on a CPU layers are compiled only with --compile on" if on_a_cpu else ""


def _has_documents(data: DataConfig) -> bool:
    """Whether tokens see those of their own document alone."""
    return data.reset_attention_mask or data.sft_packing


def _longest_run(config: RunConfig, part: StagePart) -> int:
    """Layers of a stage that follow each other between two points where recomputation begins or ends."""
    runs = config.recomputed(part)
    rest = len(part.layers) - sum(map(len, runs))
    return max(rest, *map(len, runs)) if runs else rest


# --- fused kernels ---


def _gate(config: RunConfig, device: DeviceFacts) -> GateDecision:
    wanted = config.kernels.bias_swiglu_fusion and config.model.gated_linear_unit
    widths = _mlp_widths(config)
    in_fp8 = [layer in _fp8_layers(config) and _fits_fp8(config, width) for layer, width in widths.items()]
    idle = ""
    if not config.model.gated_linear_unit:
        idle = "the MLPs have no gates (--swiglu)"
    elif not widths:
        idle = "every layer has experts, whose gates are no part of this kernel"
    elif not any(in_fp8) and config.defers_weight_gradients:
        idle = (
            f"--pipeline-schedule {config.parallel.pipeline_schedule} leaves gradients of weights for later, and there is no "
            "such kernel with that"
        )
    elif not any(in_fp8) and device.is_cpu:
        idle = "there is such a kernel for GPUs alone"
    in_second = wanted and not all(in_fp8) and device.is_gpu and not config.defers_weight_gradients
    return GateDecision(in_second, wanted and any(in_fp8), idle)


def _mlp_widths(config: RunConfig) -> dict[int, int]:
    """By layer the inner width of its MLP, where it has one; a shared expert is an MLP too."""
    shared, sparse = config.moe.moe_shared_expert_intermediate_size, frozenset(config.layers_with_experts)
    widths = {
        n: shared if n in sparse else config.model.ffn_hidden_size for n in range(config.model.num_layers)
    }
    return {number: width for number, width in widths.items() if width is not None}


def _fits_fp8(config: RunConfig, inner: int) -> bool:
    """Whether the first matrix of a gated MLP has sides that a GPU multiplies in fp8."""
    first = mlp_sizes(config.model, config.parallel.tensor_model_parallel_size, inner).linear_fc1
    return first.inputs % FP8_MULTIPLE == 0 and first.outputs % FP8_MULTIPLE == 0


def _loss(config: RunConfig, device: DeviceFacts) -> LossDecision:
    kernels = config.kernels
    fusion = kernels.fused_cross_entropy
    idle = ""
    if fusion == "off":
        idle = "the loss is not fused (--no-cross-entropy-loss-fusion), so this changes nothing"
    elif fusion == "auto" and device.is_cpu:
        idle = "on a CPU the loss is fused only with --cross-entropy-loss-fusion"
    return LossDecision(
        on=fusion == "on" or (fusion == "auto" and device.is_gpu),
        implementation=kernels.cross_entropy_fusion_impl,
        chunk=kernels.cross_entropy_chunk,
        kernel=device.is_gpu and kernels.cross_entropy_fusion_impl != "native",
        idle=idle,
    )


# --- experts ---


def wants_grouped_experts(moe: MoEConfig) -> bool:
    """Whether experts are to be one matmul where the kernel is there; unless the user does not want that."""
    return moe.moe_grouped_gemm is not False


def fit_grouped_matmul(*widths: int) -> bool:
    return all(width % _GROUPED_MULTIPLE == 0 for width in widths)


def _experts(config: RunConfig, device: DeviceFacts) -> ExpertsDecision:
    moe, parallel = config.moe, config.parallel
    if not moe.num_experts:
        return ExpertsDecision(False, False, "there are no experts (--num-experts), so this changes nothing")
    parts = expert_parts(config)
    inner = expert_sizes(config.model, moe, cut=parts).inner
    fits = fit_grouped_matmul(config.model.hidden_size, inner)
    by_kernel = config.precision.bf16 and not device.is_cpu
    idle = ""
    if not by_kernel and moe.moe_grouped_gemm:
        idle = "its kernel needs bf16 on a GPU; experts are multiplied one by one here"
    elif not by_kernel:
        idle = "its kernel needs bf16 on a GPU, so experts are multiplied one by one anyway"
    elif device.is_gpu and moe.moe_grouped_gemm and not fits:
        idle = (
            f"its kernel needs widths that are multiples of {_GROUPED_MULTIPLE}, not {config.model.hidden_size} and {inner}; experts "
            "are multiplied one by one"
        )
    on = wants_grouped_experts(moe) and config.precision.bf16 and device.is_gpu and fits
    return ExpertsDecision(on, on and parallel.expert_model_parallel_size * parts == 1, idle)


# --- fp8 ---


def _fp8(config: RunConfig, device: DeviceFacts) -> Fp8Decision:
    precision = config.precision
    wanted = precision.fp8_format
    none = "there are no fp8 matmuls (--fp8)" if wanted is None else ""
    every = (
        ""
        if precision.first_last_layers_bf16
        else "all layers have fp8 matmuls without --first-last-layers-bf16"
    )
    return Fp8Decision(
        format=wanted,
        by_rows=precision.fp8_recipe == "rowwise",
        layers=_fp8_layers(config),
        head=wanted is not None and precision.fp8_output_layer,
        experts_left=config.moe.num_experts is not None and len(_fp8_layers(config)) > 0,
        lacking="" if wanted is None else _lacks_fp8(device),
        idle=none,
        ends_idle=none or every,
    )


def _fp8_layers(config: RunConfig) -> range:
    """Layers with fp8 matmuls, counted from 0."""
    precision, layers = config.precision, config.model.num_layers
    if precision.fp8_format is None:
        return range(0)
    if not precision.first_last_layers_bf16:
        return range(layers)
    return range(precision.num_layers_at_start_in_bf16, layers - precision.num_layers_at_end_in_bf16)


def _lacks_fp8(device: DeviceFacts) -> str:
    """Why the device has no fp8 matmuls; emulated, they would be slower than any others."""
    if device.is_cpu:
        return "this run is on a CPU"
    if device.kind and not (device.is_gpu and device.is_nvidia):
        return "this is no GPU of NVIDIA's"
    if device.capability is None or device.capability >= _FP8_CAPABILITY:
        return ""
    return f"this one ({device.name}) has {device.capability[0]}.{device.capability[1]}"


# --- CUDA graphs ---


def _graphs(config: RunConfig, device: DeviceFacts, own_program: bool) -> GraphsDecision:
    wanted = _GRAPHS[config.kernels.cuda_graphs]
    if wanted == "off" or (wanted == "auto" and not device.is_gpu):
        return GraphsDecision()
    problem = not_recordable(config.settings)
    if own_program:
        problem = problem or "a model or a forward step of your own may decide while it runs"
    if device.kind and not (device.is_gpu and device.is_nvidia):
        problem = "there is no GPU of NVIDIA's"
    if wanted == "on":
        return GraphsDecision(required=True, problem=problem)
    if not _launches_hold_up(config, device.peak):
        return GraphsDecision()
    if not problem:
        return GraphsDecision(if_room=True)
    return GraphsDecision(
        left_out=f"CUDA graphs are left out, though launching kernels takes longer than such small layers compute: {problem}"
    )


def requires_graphs(cuda_graphs: str) -> bool:
    """Whether a run with this value of --cuda-graphs must not start if it cannot be recorded."""
    return _GRAPHS.get(cuda_graphs) == "on"


def not_recordable(s: Settings) -> str:
    """Why no step of the run can be recorded: its launches must be the same in every step, whatever its tokens are."""
    ranks = s.tensor_model_parallel_size * s.pipeline_model_parallel_size * s.context_parallel_size
    if ranks * (s.data_parallel_size or 1) > 1:
        return "several processes talk to each other during a step"
    if s.num_experts is not None:
        return "how many tokens an expert gets is known in the step alone"
    if _has_documents(s):
        return "documents begin elsewhere in every batch"
    if s.spec:
        return "layers of your own (--spec) may decide while they run"
    if s.attention_dropout > 0 and s.recompute_granularity is not None:
        return "what is recomputed with --attention-dropout asks for the state of a generator"
    if s.timing_log_level > 1:
        return "--timing-log-level 2 takes the time of forward and backward apart"
    return ""


def _launches_hold_up(config: RunConfig, peak: float | None) -> bool:
    """Whether a GPU of this peak computes a layer faster than a host launches its kernels."""
    launching = _LAUNCHING_IN_FP8 if config.precision.fp8_format else _LAUNCHING
    return layer_seconds(config.model, config.moe, config.train.micro_batch_size, peak) <= launching


# --- observation ---


def _allocations_recorded(config: RunConfig, device: DeviceFacts) -> Decision:
    wanted = config.memory.record_memory_history
    idle = "only a GPU's allocations are recorded, and there is none here" if wanted and device.is_cpu else ""
    return Decision(wanted and not idle, idle)


def _torch_profiler(config: RunConfig, device: DeviceFacts) -> Decision:
    wanted = config.log.use_pytorch_profiler
    idle = ""
    if not config.log.profile:
        idle = "nothing is profiled (--profile)"
    elif wanted and device.is_cpu:
        idle = "on a CPU the profiler is torch's in any case"
    return Decision(config.log.profile and (wanted or device.is_cpu), idle)

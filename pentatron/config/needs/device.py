"""Needs of kernels: a GPU, a precision, layers that can be compiled or fused."""

from pentatron.config.fp8 import FP8_MULTIPLE, fp8_layers
from pentatron.config.moe_layers import moe_layers
from pentatron.config.needs.need import Settings
from pentatron.layout.schedules import HALVING


def slow_on_a_cpu(s: Settings) -> list[str]:
    if not s.fp16 or not _on_a_cpu(s):
        return []
    return [
        "--fp16: most CPUs have no instructions for fp16 and take hundreds of times as long for large matrices; without it, "
        "or with --bf16, a run on a CPU is faster"
    ]


def _on_a_cpu(s: Settings) -> bool:
    """With `--device auto` nobody knows yet; who does asks again (`Resolved.on_a_cpu`)."""
    return bool(s.device == "cpu")


def a_fused_loss(s: Settings) -> str:
    fusion = s.fused_cross_entropy
    if fusion == "off":
        return "the loss is not fused (--no-cross-entropy-loss-fusion), so this changes nothing"
    off_here = fusion == "auto" and _on_a_cpu(s)
    return "on a CPU the loss is fused only with --cross-entropy-loss-fusion" if off_here else ""


def a_fused_gate(s: Settings) -> str:
    """In fp8 the gate is a part of an MLP's first matrix; otherwise of the second, where its gradients come at once."""
    if not s.gated_linear_unit:
        return "the MLPs have no gates (--swiglu)"
    mlps = _layers_with_mlps(s)
    if not mlps:
        return "every layer has experts, whose gates are no part of this kernel"
    if any(layer in _multiplied_in_fp8(s) for layer in mlps):
        return ""
    if _halves(s):
        return f"--pipeline-schedule {s.pipeline_schedule} leaves gradients of weights for later, and there is no such kernel with that"
    return "there is such a kernel for GPUs alone" if _on_a_cpu(s) else ""


def _layers_with_mlps(s: Settings) -> list[int]:
    """A shared expert is an MLP too."""
    layers = range(s.num_layers)
    if s.num_experts is None or s.moe_shared_expert_intermediate_size is not None:
        return list(layers)
    sparse = moe_layers(s.moe_layer_freq, len(layers))
    return [layer for layer in layers if not sparse[layer]]


def _multiplied_in_fp8(s: Settings) -> range:
    """Layers whose MLPs are, by the settings and by their sizes."""
    width = s.ffn_hidden_size // s.tensor_model_parallel_size
    if s.hidden_size % FP8_MULTIPLE or width % FP8_MULTIPLE:
        return range(0)
    return fp8_layers(s, s.num_layers)


def one_pass_update(s: Settings) -> str:
    if s.optimizer != "adam":
        return f"--optimizer {s.optimizer} is torch's in any case"
    if s.optimizer_cpu_offload:
        return "what is in host memory (--optimizer-cpu-offload) is updated there by torch in any case"
    return "on a CPU the update is torch's in any case" if _on_a_cpu(s) else ""


def gpu_allocations(s: Settings) -> str:
    idle = s.record_memory_history and _on_a_cpu(s)
    return "only a GPU's allocations are recorded, and there is none here" if idle else ""


def gpu_memory(s: Settings) -> str:
    idle = s.optimizer_cpu_offload and _on_a_cpu(s)
    return "everything is in host memory already, so this changes nothing" if idle else ""


def a_choice_of_profiler(s: Settings) -> str:
    if not s.profile:
        return "nothing is profiled (--profile)"
    idle = s.use_pytorch_profiler and _on_a_cpu(s)
    return "on a CPU the profiler is torch's in any case" if idle else ""


def one_matmul_for_experts(s: Settings) -> str:
    if not s.num_experts:
        return "there are no experts (--num-experts), so this changes nothing"
    if s.bf16 and not _on_a_cpu(s):
        return ""
    if s.moe_grouped_gemm:
        return "its kernel needs bf16 on a GPU; experts are multiplied one by one here"
    return "its kernel needs bf16 on a GPU, so experts are multiplied one by one anyway"


def layers_compiled_together(s: Settings) -> str:
    """Only layers that are compiled whole, and that nothing comes between, can be one function."""
    if s.compile_layers_together == 1:
        return ""
    wanted = s.compile
    if wanted == "off" or (wanted == "auto" and s.deterministic_mode):
        return "no layer is compiled" + (" (--compile off)" if wanted == "off" else " (--deterministic-mode)")
    apart = {
        "documents begin elsewhere in every batch": s.reset_attention_mask or s.sft_packing,
        "experts are not compiled": s.num_experts is not None,
        "tensor ranks talk to each other inside a layer": s.tensor_model_parallel_size > 1,
        "context ranks talk to each other inside a layer": s.context_parallel_size > 1,
        "weight gradients wait for another part of the schedule": _halves(s),
        "weights are waited for at every layer (ZeRO 3)": s.zero_stage == 3,
        "weights are waited for at every layer (--overlap-param-gather)": s.overlap_param_gather
        and s.zero_stage > 0
        and s.data_parallel_size != 1,
        "layers of your own (--spec) are not compiled": bool(s.spec),
        f"there are {s.num_layers} layers on {s.pipeline_model_parallel_size} pipeline rank(s)": (
            s.num_layers < s.compile_layers_together * s.pipeline_model_parallel_size
        ),
        "fewer are recomputed at a time": s.recompute_granularity == "full"
        and s.recompute_method != "block"
        and (s.recompute_num_layers or 1) < s.compile_layers_together,
    }
    for reason, holds in apart.items():
        if holds:
            return f"{reason}, so layers are compiled one by one"
    on_a_cpu = wanted == "auto" and _on_a_cpu(s)
    return "on a CPU layers are compiled only with --compile on" if on_a_cpu else ""


def _halves(s: Settings) -> bool:
    return s.pipeline_model_parallel_size > 1 and s.pipeline_schedule in HALVING

"""Why a setting of what GPUs do may have nothing to act on."""

from collections.abc import Callable
from dataclasses import fields

from pentatron.config.draft import Draft, Facts
from pentatron.config.fp8 import fp8_layers
from pentatron.config.moe_layers import moe_layers
from pentatron.config.parallel import PrecisionConfig
from pentatron.config.precision_rules import FP8_MULTIPLE
from pentatron.layout.schedules import HALVING


def slow_on_a_cpu(draft: Draft) -> list[str]:
    if not draft["fp16"] or not _on_a_cpu(draft):
        return []
    return [
        "--fp16: most CPUs have no instructions for fp16 and take hundreds of times as long for large matrices; without it, "
        "or with --bf16, a run on a CPU is faster"
    ]


def _on_a_cpu(draft: Draft) -> bool:
    """With `--device auto` nobody knows yet; who does asks again (`Resolved.on_a_cpu`)."""
    return bool(draft["device"] == "cpu")


def _not_fused(draft: Draft, facts: Facts) -> str:
    fusion = draft["fused_cross_entropy"]
    if fusion == "off":
        return "the loss is not fused (--no-cross-entropy-loss-fusion), so this changes nothing"
    off_here = fusion == "auto" and _on_a_cpu(draft)
    return "on a CPU the loss is fused only with --cross-entropy-loss-fusion" if off_here else ""


def _no_gate_to_fuse(draft: Draft, facts: Facts) -> str:
    """In fp8 the gate is a part of an MLP's first matrix; otherwise of the second, where its gradients come at once."""
    if not draft["gated_linear_unit"]:
        return "the MLPs have no gates (--swiglu)"
    mlps = _layers_with_mlps(draft)
    if not mlps:
        return "every layer has experts, whose gates are no part of this kernel"
    if any(layer in _multiplied_in_fp8(draft) for layer in mlps):
        return ""
    if _halves(draft):
        return f"--pipeline-schedule {draft['pipeline_schedule']} leaves gradients of weights for later, and there is no such kernel with that"
    return "there is such a kernel for GPUs alone" if _on_a_cpu(draft) else ""


def _layers_with_mlps(draft: Draft) -> list[int]:
    """A shared expert is an MLP too."""
    layers = range(draft["num_layers"])
    if draft["num_experts"] is None or draft["moe_shared_expert_intermediate_size"] is not None:
        return list(layers)
    sparse = moe_layers(draft["moe_layer_freq"], len(layers))
    return [layer for layer in layers if not sparse[layer]]


def _multiplied_in_fp8(draft: Draft) -> range:
    """Layers whose MLPs are, by the settings and by their sizes."""
    width = draft["ffn_hidden_size"] // draft["tensor_model_parallel_size"]
    if draft["hidden_size"] % FP8_MULTIPLE or width % FP8_MULTIPLE:
        return range(0)
    precision = PrecisionConfig(**{field.name: draft[field.name] for field in fields(PrecisionConfig)})
    return fp8_layers(precision, draft["num_layers"])


def _not_in_one_pass(draft: Draft, facts: Facts) -> str:
    if draft["optimizer"] != "adam":
        return f"--optimizer {draft['optimizer']} is torch's in any case"
    if draft["optimizer_cpu_offload"]:
        return "what is in host memory (--optimizer-cpu-offload) is updated there by torch in any case"
    return "on a CPU the update is torch's in any case" if _on_a_cpu(draft) else ""


def _nothing_recorded(draft: Draft, facts: Facts) -> str:
    idle = draft["record_memory_history"] and _on_a_cpu(draft)
    return "only a GPU's allocations are recorded, and there is none here" if idle else ""


def _in_host_memory(draft: Draft, facts: Facts) -> str:
    idle = draft["optimizer_cpu_offload"] and _on_a_cpu(draft)
    return "everything is in host memory already, so this changes nothing" if idle else ""


def _torch_profiles(draft: Draft, facts: Facts) -> str:
    if not draft["profile"]:
        return "nothing is profiled (--profile)"
    idle = draft["use_pytorch_profiler"] and _on_a_cpu(draft)
    return "on a CPU the profiler is torch's in any case" if idle else ""


def _one_by_one(draft: Draft, facts: Facts) -> str:
    if not draft["num_experts"]:
        return "there are no experts (--num-experts), so this changes nothing"
    if draft["bf16"] and not _on_a_cpu(draft):
        return ""
    if draft["moe_grouped_gemm"]:
        return "its kernel needs bf16 on a GPU; experts are multiplied one by one here"
    return "its kernel needs bf16 on a GPU, so experts are multiplied one by one anyway"


def _compiled_one_by_one(draft: Draft, facts: Facts) -> str:
    """Only layers that are compiled whole, and that nothing comes between, can be one function."""
    if draft["compile_layers_together"] == 1:
        return ""
    wanted = draft["compile"]
    if wanted == "off" or (wanted == "auto" and draft["deterministic_mode"]):
        return "no layer is compiled" + (" (--compile off)" if wanted == "off" else " (--deterministic-mode)")
    apart = {
        "documents begin elsewhere in every batch": draft["reset_attention_mask"] or draft["sft_packing"],
        "experts are not compiled": draft["num_experts"] is not None,
        "tensor ranks talk to each other inside a layer": draft["tensor_model_parallel_size"] > 1,
        "context ranks talk to each other inside a layer": draft["context_parallel_size"] > 1,
        "weight gradients wait for another part of the schedule": _halves(draft),
        "weights are waited for at every layer (ZeRO 3)": draft["zero_stage"] == 3,
        "weights are waited for at every layer (--overlap-param-gather)": draft["overlap_param_gather"]
        and draft["zero_stage"] > 0
        and draft["data_parallel_size"] != 1,
        "layers of your own (--spec) are not compiled": bool(draft["spec"]),
        f"there are {draft['num_layers']} layers on {draft['pipeline_model_parallel_size']} pipeline rank(s)": (
            draft["num_layers"] < draft["compile_layers_together"] * draft["pipeline_model_parallel_size"]
        ),
        "fewer are recomputed at a time": draft["recompute_granularity"] == "full"
        and draft["recompute_method"] != "block"
        and (draft["recompute_num_layers"] or 1) < draft["compile_layers_together"],
    }
    for reason, holds in apart.items():
        if holds:
            return f"{reason}, so layers are compiled one by one"
    on_a_cpu = wanted == "auto" and _on_a_cpu(draft)
    return "on a CPU layers are compiled only with --compile on" if on_a_cpu else ""


def _halves(draft: Draft) -> bool:
    return draft["pipeline_model_parallel_size"] > 1 and draft["pipeline_schedule"] in HALVING


IDLE_OF_DEVICES: dict[str, Callable[[Draft, Facts], str]] = {
    "bias_swiglu_fusion": _no_gate_to_fuse,
    **dict.fromkeys(("cross_entropy_fusion_impl", "cross_entropy_chunk"), _not_fused),
    "fused_update": _not_in_one_pass,
    "record_memory_history": _nothing_recorded,
    "optimizer_cpu_offload": _in_host_memory,
    "use_pytorch_profiler": _torch_profiles,
    "moe_grouped_gemm": _one_by_one,
    "compile_layers_together": _compiled_one_by_one,
}

"""Settings that only another device could act on."""

from pentatron.config.resolve import Resolved
from pentatron.parallel.grouped import fit_one_kernel
from pentatron.parallel.world import World


def without_effect_here(resolved: Resolved, world: World) -> list[str]:
    """Settings that only another device, or a later version, could act on."""
    found = []
    if resolved.config.memory.record_memory_history and world.device.type == "cpu":
        found.append("--record-memory-history: only a GPU's allocations are recorded, and there is none here")
    if resolved.config.parallel.optimizer_cpu_offload and world.device.type == "cpu":
        found.append("--optimizer-cpu-offload: everything is in host memory already, so this changes nothing")
    if resolved.config.precision.fp16 and world.device.type == "cpu":
        found.append(
            "--fp16: most CPUs have no instructions for fp16 and take hundreds of times as long for large matrices; without it, "
            "or with --bf16, a run on a CPU is faster"
        )
    found += _grouped_matmul(resolved, world)
    return found


def _grouped_matmul(resolved: Resolved, world: World) -> list[str]:
    config = resolved.config
    if not resolved.given("moe_grouped_gemm") or not config.moe.num_experts:
        return []
    if world.device.type != "cuda" or not config.precision.bf16:
        if config.moe.moe_grouped_gemm:
            return [
                "--moe-grouped-gemm: its kernel needs bf16 on a GPU; experts are multiplied one by one here"
            ]
        return [
            "--no-moe-grouped-gemm: its kernel needs bf16 on a GPU, so experts are multiplied one by one anyway"
        ]
    assert config.moe.moe_ffn_hidden_size is not None
    inner = config.moe.moe_ffn_hidden_size // (config.parallel.expert_tensor_parallel_size or 1)
    widths = (config.model.hidden_size, inner)
    if config.moe.moe_grouped_gemm and not fit_one_kernel(widths):
        return [
            f"--moe-grouped-gemm: its kernel needs widths that are multiples of 8, not {widths[0]} and {widths[1]}; experts are "
            "multiplied one by one"
        ]
    return []

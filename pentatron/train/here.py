"""Settings that only another device could act on."""

from pentatron.config.resolve import Resolved
from pentatron.parallel.grouped import fit_one_kernel
from pentatron.parallel.world import World


def without_effect_here(resolved: Resolved, world: World) -> list[str]:
    """What nobody could say before the device was known."""
    return list(resolved.on_a_cpu) if world.device.type == "cpu" else _narrow_experts(resolved)


def _narrow_experts(resolved: Resolved) -> list[str]:
    config = resolved.config
    if not config.moe.num_experts or not config.precision.bf16:
        return []
    inner = config.moe.moe_ffn_hidden_size // (config.parallel.expert_tensor_parallel_size or 1)
    widths = (config.model.hidden_size, inner)
    asked = resolved.given("moe_grouped_gemm") and config.moe.moe_grouped_gemm
    if not asked or fit_one_kernel(widths):
        return []
    return [
        f"--moe-grouped-gemm: its kernel needs widths that are multiples of 8, not {widths[0]} and {widths[1]}; experts are "
        "multiplied one by one"
    ]

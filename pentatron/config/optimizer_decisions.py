"""Decides how the optimizer updates, where its state is, and what hides behind computation."""

from pentatron.config.decided import Decision, DeviceFacts
from pentatron.config.run import RunConfig

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

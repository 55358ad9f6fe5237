"""Rules about parameters in shards (ZeRO 3): what cannot be together with them, and groups of replicas that come out even."""

from pentatron.config.settings import Settings
from pentatron.config.stages import grid_of
from pentatron.layout.divisors import divisors, either
from pentatron.layout.schedules import HALVING


def _shards_in_halves(s: Settings) -> str | None:
    kind = s.pipeline_schedule
    if s.zero_stage != 3 or kind not in HALVING or s.pipeline_model_parallel_size == 1:
        return None
    return (
        f"--pipeline-schedule {kind} computes weight gradients later than the rest, when --zero-stage 3 has summed the "
        f"gradients of a layer and let its weights go; use 1f1b, gpipe or interleaved, or --zero-stage 2"
    )


def _instances(s: Settings) -> str | None:
    if s.zero_stage != 3:
        return None
    count, grid = s.num_distributed_optimizer_instances, grid_of(s)
    replicas = grid.data * grid.context
    if replicas % count:
        return (
            f"--num-distributed-optimizer-instances {count} does not divide {grid.data} (data) × {grid.context} (context) = "
            f"{replicas} ranks that hold the same weights; use {either(divisors(replicas))}"
        )
    # Whether experts fit the ranks at all is another rule.
    of_experts, rest = divmod(grid.stage_size, grid.expert * grid.expert_tensor)
    if s.num_experts is None or rest or of_experts % count == 0:
        return None
    both = [n for n in divisors(replicas) if of_experts % n == 0]
    return (
        f"--num-distributed-optimizer-instances {count} does not divide the {of_experts} ranks that hold the same experts; "
        f"use {either(both)}"
    )


def _shards_on_host(s: Settings) -> str | None:
    if s.zero_stage != 3 or not s.optimizer_cpu_offload:
        return None
    return (
        "--optimizer-cpu-offload moves what --zero-stage 0 to 2 keep beside the weights; the shards of --zero-stage 3 are the "
        "weights themselves; use --zero-stage 2, or leave --optimizer-cpu-offload out"
    )


ZERO_RULES = (_shards_in_halves, _instances, _shards_on_host)

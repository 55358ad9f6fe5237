"""Needs of the layout: ranks to share with, stages to divide over, experts, recomputed layers."""

from pentatron.config.needs.need import Settings, unless
from pentatron.layout.schedules import takes_groups

TENSOR_AXIS = unless(
    lambda s: not s.sequence_parallel or s.tensor_model_parallel_size > 1,
    "there is no tensor axis to split over (--tensor-model-parallel-size 1), so this changes nothing",
)
PIPELINE = unless(
    lambda s: s.pipeline_model_parallel_size > 1, "there is one pipeline stage, so no schedule is needed"
)
STAGES = unless(
    lambda s: s.pipeline_model_parallel_size > 1 or (s.virtual_pipeline_model_parallel_size or 1) > 1,
    "there is one pipeline stage, which holds all layers",
)
GROUPED_MICRO_BATCHES = (
    PIPELINE,
    unless(
        lambda s: takes_groups(s.pipeline_schedule, s.virtual_pipeline_model_parallel_size or 1),
        lambda s: f"{s.pipeline_schedule} does not take micro-batches in groups, only interleaved does",
    ),
)
SPLIT_SEQUENCES = unless(
    lambda s: s.context_parallel_size > 1,
    "sequences are not split (--context-parallel-size 1), so nothing is exchanged",
)


def _one_replica(s: Settings) -> bool:
    return bool(s.data_parallel_size * s.context_parallel_size == 1)


_REDUCTION = unless(lambda s: not _one_replica(s), "one data-parallel rank has nothing to reduce")


def buckets(s: Settings) -> str:
    """Gradients that are reduced in buckets."""
    in_shards = s.zero_stage == 3 and not _one_replica(s)
    return "ZeRO 3 sums gradients layer by layer, not in buckets" if in_shards else _REDUCTION(s)


def ranks_to_shard_over(s: Settings) -> str:
    """Several ranks that hold the same parameters."""
    # Experts may have copies on tensor ranks, which then shard those.
    of_experts = s.num_experts is not None and s.tensor_model_parallel_size > 1
    alone = s.zero_stage > 0 and _one_replica(s) and not of_experts
    return "one data-parallel rank has nobody to share with, so it keeps everything" if alone else ""


def hybrid_shards(s: Settings) -> str:
    """ZeRO 3 over groups of ranks that each hold the whole model."""
    count, stage = s.num_distributed_optimizer_instances, s.zero_stage
    if count == 1:
        return ""
    if stage == 0:
        return "nothing is divided between data-parallel ranks (--zero-stage 0), so there are no groups to divide it in"
    if stage < 3:
        return f"ZeRO {stage} divides between all data-parallel ranks; groups that each hold everything are for ZeRO 3"
    if s.data_parallel_size * s.context_parallel_size == count:
        return "every data-parallel rank is a group by itself, so each keeps everything"
    return ""


RECOMPUTE = unless(
    lambda s: s.recompute_granularity is not None,
    "nothing is recomputed without --recompute-granularity",
)


def recomputed_modules(s: Settings) -> str:
    """Selective recompute, with experts for the modules of experts."""
    if s.recompute_granularity == "full":
        return "full recompute covers whole layers, so no modules are chosen"
    modules = s.recompute_modules
    if not modules or s.recompute_granularity is None:
        return RECOMPUTE(s) if modules else ""
    absent = [name for name in ("moe", "moe_act", "shared_experts") if name in modules]
    if not absent or s.num_experts is not None:
        return ""
    return f"there are no experts (--num-experts), so {', '.join(absent)} cannot run again"

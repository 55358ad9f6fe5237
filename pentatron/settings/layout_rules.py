"""Rules of the layout: check that processes, model, pipeline and batch sizes fit together.

Each returns None or an error message with the numbers and a fix. `rules.py` applies them with all others.
"""

import math
from collections.abc import Callable

from pentatron.errors import UserError
from pentatron.layout import schedules
from pentatron.layout.batch import batch_size_problem
from pentatron.layout.ranks import world_size_problem
from pentatron.layout.schedules import StagesPerRank
from pentatron.layout.stages import Costs, stage_parts
from pentatron.settings.declaration import flag_of
from pentatron.settings.model_sizes import attention_sizes, costs_of, division_of, grid_of
from pentatron.settings.settings import Settings, is_unset
from pentatron.text import divisors, join_choices, plural

Rule = Callable[[Settings], str | None]


def refuse_if(holds: Callable[[Settings], object], error: str) -> Rule:
    """Builds a rule from a predicate. `error` is a template that names the settings `s`."""
    return lambda s: error.format(s=s) if holds(s) else None


def indivisible(s: Settings, name: str, by: str, advice: object = None) -> str | None:
    """Returns the error about a setting that is not divisible by another, or None.

    `advice`: what to use instead (default: the divisors).
    """
    number, divisor = getattr(s, name), getattr(s, by)
    if number % divisor == 0:
        return None
    advice = advice or join_choices(divisors(number))
    return f"{flag_of(name)} {number} is not divisible by {flag_of(by)} {divisor}; use {advice}"


def error_of(check: Callable[..., object], *arguments: object) -> str | None:
    """Returns the message of the error that `check` raises, or None."""
    try:
        check(*arguments)
    except (UserError, ValueError) as error:
        return str(error)
    return None


def _data_parallel(s: Settings) -> str | None:
    dp, model, processes = s.data_parallel_size, s.ranks_per_replica, s.facts.world_size
    if processes % model or dp * model == processes:
        return None
    product = f"--data-parallel-size {dp} × {model} (tp × pp × cp) = {dp * model}"
    return f"{product}, but there are {processes} processes; use {processes // model} or leave it out"


def _groups_per_rank(s: Settings) -> str | None:
    groups, tp = s.num_query_groups, s.tensor_model_parallel_size
    # Without grouping, the rule about heads reports the problem.
    if groups % tp == 0 or tp % groups == 0 or groups == s.num_attention_heads:
        return None
    neither = f"neither a multiple nor a divisor of --tensor-model-parallel-size {tp}"
    advice = f"use a tensor parallel size of {join_choices(divisors(groups))}"
    return f"--num-query-groups {groups} is {neither}; {advice}"


def _mlp_per_rank(s: Settings) -> str | None:
    """Suggests a width at most 5 % larger whose shard per rank is a multiple of a power of 2."""
    width, tp = s.ffn_hidden_size, s.tensor_model_parallel_size
    sizes = [math.ceil(width / (tp * unit)) * tp * unit for unit in (128, 64, 32, 16, 8, 4, 2)]
    wider = next((size for size in sizes if size <= 1.05 * width), sizes[-1])
    return indivisible(s, "ffn_hidden_size", "tensor_model_parallel_size", f"--ffn-hidden-size {wider}")


def _padded_vocabulary(s: Settings) -> str | None:
    size, padded, tp = s.vocab_size, s.padded_vocab_size, s.tensor_model_parallel_size
    if size is None:
        return None
    advice = f"{math.ceil(max(size, padded) / tp) * tp} or leave it out"
    if padded < size:
        return f"--padded-vocab-size {padded} is smaller than --vocab-size {size}; use {advice}"
    return indivisible(s, "padded_vocab_size", "tensor_model_parallel_size", advice)


def _sequence_per_rank(s: Settings) -> str | None:
    length, cp, tp = s.seq_length, s.context_parallel_size, s.tensor_model_parallel_size
    factors, multiple = ([f"2 × {cp} (context)"], 2 * cp) if cp > 1 else ([], 1)
    if s.sequence_parallel and tp > 1:
        factors.append(f"{tp} (tensor, for --sequence-parallel)")
        multiple = math.lcm(multiple, cp * tp)
    if length % multiple == 0:
        return None
    up = math.ceil(length / multiple) * multiple
    down = f"{up - multiple} or " if up > multiple else ""
    return f"--seq-length {length} is not divisible by {multiple}, as {' and '.join(factors)} need; use {down}{up}"


def _heads_per_context_rank(s: Settings) -> str | None:
    """With a2a every context rank gets some of the heads of its tensor rank, in exchange for tokens."""
    cp, tp = s.context_parallel_size, s.tensor_model_parallel_size
    if cp == 1 or s.cp_comm_type != "a2a" or s.num_attention_heads % tp:
        return None
    sizes = attention_sizes(s, tp)
    heads, groups = sizes.heads, sizes.groups
    fits = [n for n in divisors(heads) if groups % n == 0 or n % groups == 0]
    if cp in fits:
        return None
    counts = f"{heads} heads" + (f" in {groups} groups" if groups != heads else "")
    counts += " of each tensor rank" if tp > 1 else ""
    advice = f"use a context parallel size of {join_choices(fits)}, or --cp-comm-type p2p"
    return f"--cp-comm-type a2a cannot distribute {counts} to {cp} (context) ranks; {advice}"


def _layers_per_stage(s: Settings) -> str | None:
    layers, ranks, virtual = s.num_layers, s.pipeline_model_parallel_size, s.virtual_stages
    # An explicit layout may have a stage with the embedding alone.
    if layers >= ranks * virtual or s.pipeline_model_parallel_layout is not None:
        return None
    if virtual > 1:
        stages = f"{ranks} (pipeline) × {virtual} (virtual) = {ranks * virtual} stages"
        fewer = "fewer stages"
    else:
        stages = f"the {ranks} stages of --pipeline-model-parallel-size {ranks}"
        fewer = f"at most {layers} {plural(layers, 'stage')}"
    return f"--num-layers {layers} cannot fill {stages}; use {ranks * virtual} layers or more, or {fewer}"


def _layers_per_virtual_stage(s: Settings) -> str | None:
    each = s.num_layers_per_virtual_pipeline_stage
    layers, ranks, virtual = s.num_layers, s.pipeline_model_parallel_size, s.virtual_stages
    if each is None or ranks * virtual * each == layers:
        return None
    stage = f"{each} (--num-layers-per-virtual-pipeline-stage)"
    if layers % (ranks * each):
        down = layers - layers % (ranks * each)
        advice = f"use {f'{down} or ' if down else ''}{down + ranks * each} layers, or another number for each stage"
        return f"--num-layers {layers} is not divisible by {ranks} (pipeline) × {stage} = {ranks * each}; {advice}"
    product = f"{ranks} (pipeline) × {virtual} (virtual) × {stage} = {ranks * virtual * each}"
    return f"{product}, but --num-layers is {layers}; leave one of the two flags for virtual stages out"


# Ways to divide the layers. Settings of one way may be combined.
_DIVISIONS = (
    ("pipeline_model_parallel_layout",),
    ("num_layers_per_virtual_pipeline_stage",),
    ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)


def _division(s: Settings) -> str | None:
    """Checks that the layers can be divided as requested, by one of the ways."""
    division = division_of(s)
    ways = [[flag_of(name) for name in way if getattr(s, name)] for way in _DIVISIONS]
    given = [flags[0] for flags in ways if flags]
    if len(given) > 1 and division.ranks > 1:
        return f"{' and '.join(given)} each set how the layers are divided; give one of them"
    if division.written is None and s.num_layers < division.stages:
        return None
    # Whether there is a division does not depend on the costs, which only shift layers between stages.
    return error_of(stage_parts, s.num_layers, division, Costs())


def _schedule(s: Settings) -> str | None:
    """Checks that the schedule exists for this number of virtual stages."""
    kind, virtual = s.pipeline_schedule, s.virtual_stages
    if s.pipeline_model_parallel_size == 1:
        return None
    flag = "--virtual-pipeline-model-parallel-size"
    errors = {
        StagesPerRank.SEVERAL: f"needs several stages on each rank; give {flag} 2 or more, or use 1f1b",
        StagesPerRank.TWO: f"runs two stages on each rank, not {virtual}; leave {flag} out, or use zero-bubble",
        StagesPerRank.ONE: f"runs one stage on each rank, not the {virtual} of {flag} {virtual}; "
        "use interleaved, or leave one of the two out",
    }
    needed = schedules.required_stages(kind, virtual)
    return f"--pipeline-schedule {kind} {errors[needed]}" if needed is not None else None


def _micro_batch_count(s: Settings) -> int | None:
    """Returns the micro-batches per step, or None if the batch sizes are unknown or do not divide."""
    if is_unset(s.global_batch_size) or is_unset(s.micro_batch_size):
        return None
    count, rest = divmod(s.global_batch_size, s.micro_batch_size * s.data_parallel_size)
    return None if rest else count


def _enough_micro_batches(s: Settings) -> str | None:
    kind, ranks, count = s.pipeline_schedule, s.pipeline_model_parallel_size, _micro_batch_count(s)
    problem = ranks > 1 and count is not None and schedules.micro_batches_problem(kind, ranks, count)
    return f"--pipeline-schedule {problem}" if problem else None


def _micro_batch_groups(s: Settings) -> str | None:
    group, ranks = s.microbatch_group_size_per_virtual_pipeline_stage, s.pipeline_model_parallel_size
    virtual = s.virtual_stages
    if virtual == 1 or ranks == 1 or not schedules.uses_groups(s.pipeline_schedule, virtual):
        return None
    count = _micro_batch_count(s)
    problem = count is not None and schedules.group_problem(ranks, count, group)
    return f"--microbatch-group-size-per-virtual-pipeline-stage {group}: {problem}" if problem else None


def _batch(s: Settings) -> str | None:
    if is_unset(s.global_batch_size) or is_unset(s.micro_batch_size):
        return None
    return batch_size_problem(s.global_batch_size, s.micro_batch_size, s.data_parallel_size)


def _recompute_method(s: Settings) -> str | None:
    kind, method, count = s.recompute_granularity, s.recompute_method, s.recompute_num_layers
    if kind != "selective" or (method is None and is_unset(count)):
        return None
    flag = f"--recompute-num-layers {count}" if method is None else f"--recompute-method {method}"
    modules = "--recompute-granularity selective recomputes modules"
    return f"{flag} is for whole layers, but {modules}; leave it out or use full"


def _recomputed_layers(s: Settings) -> str | None:
    count, ranks = s.recompute_num_layers, s.pipeline_model_parallel_size
    if s.recompute_granularity != "full" or count is None or _division(s) or _layers_per_stage(s):
        return None
    most = max(len(part.layers) for part in stage_parts(s.num_layers, division_of(s), costs_of(s)))
    if count <= most:
        return None
    where = "the model has" if ranks == 1 else "a stage has at most"
    return f"--recompute-num-layers {count} is more than the {most} layers that {where}; use 1 to {most}"


LAYOUT_RULES: dict[str, Rule] = {
    "world": lambda s: world_size_problem(
        s.facts.world_size,
        *(s.tensor_model_parallel_size, s.pipeline_model_parallel_size, s.context_parallel_size),
    ),
    "expected_world": refuse_if(
        lambda s: s.world_size not in (None, s.facts.world_size),
        "--world-size {s.world_size} does not match the {s.facts.world_size} started process(es); "
        "start {s.world_size} (torchrun --nproc_per_node=... or --nproc-per-node) or leave --world-size out",
    ),
    "data_parallel": _data_parallel,
    "processes_here": refuse_if(
        lambda s: s.facts.launcher and s.nproc_per_node != s.facts.local_processes,
        "--nproc-per-node {s.nproc_per_node} does not match the {s.facts.local_processes} process(es) that "
        "{s.facts.launcher} started on this machine; leave --nproc-per-node out",
    ),
    "heads_per_rank": lambda s: indivisible(s, "num_attention_heads", "tensor_model_parallel_size"),
    "groups_per_rank": _groups_per_rank,
    "mlp_per_rank": _mlp_per_rank,
    "padded_vocabulary": _padded_vocabulary,
    "sequence_per_rank": _sequence_per_rank,
    "heads_per_context_rank": _heads_per_context_rank,
    "context_dropout": refuse_if(
        lambda s: s.context_parallel_size > 1 and s.attention_dropout,
        "--attention-dropout {s.attention_dropout} does not work with sequences split over "
        "{s.context_parallel_size} ranks (--context-parallel-size {s.context_parallel_size}); "
        "use --attention-dropout 0, or --context-parallel-size 1",
    ),
    # Attention over blocks of keys needs their log-sum-exp, which only the flash and math kernels return.
    "context_kernel": refuse_if(
        lambda s: (
            s.context_parallel_size > 1
            and s.cp_comm_type != "a2a"
            and s.attention_backend in ("cudnn", "efficient")
        ),
        "--attention-backend {s.attention_backend} cannot compute attention in blocks, as --cp-comm-type "
        "{s.cp_comm_type} needs it; use --attention-backend auto, flash or math, or --cp-comm-type a2a",
    ),
    "layers_per_stage": _layers_per_stage,
    "virtual_stages": refuse_if(
        lambda s: s.virtual_stages > 1 and s.pipeline_model_parallel_size == 1,
        "virtual stages ({s.virtual_stages} on each rank) need a pipeline, but --pipeline-model-parallel-size is "
        "{s.pipeline_model_parallel_size}; use 2 or more pipeline ranks, or leave the virtual stages out",
    ),
    "layers_per_virtual_stage": _layers_per_virtual_stage,
    "division": _division,
    "schedule": _schedule,
    "enough_micro_batches": _enough_micro_batches,
    "micro_batch_groups": _micro_batch_groups,
    "recompute_method": _recompute_method,
    "recomputed_block": refuse_if(
        lambda s: (
            s.recompute_granularity == "full"
            and s.recompute_method == "block"
            and is_unset(s.recompute_num_layers)
        ),
        "--recompute-method block needs the number of first layers of a stage to recompute; "
        "give --recompute-num-layers",
    ),
    "recomputed_layers": _recomputed_layers,
    "batch": _batch,
}


# --- ZeRO 3: what it cannot be combined with, and hybrid sharding groups that divide ---


def _hybrid_sharding(s: Settings) -> str | None:
    if s.zero_stage != 3:
        return None
    count, grid = s.num_distributed_optimizer_instances, grid_of(s)
    replicas, written = grid.data * grid.context, f"--num-distributed-optimizer-instances {count}"
    if replicas % count:
        ranks = f"{grid.data} (data) × {grid.context} (context) = {replicas} ranks that hold the same weights"
        return f"{written} does not divide {ranks}; use {join_choices(divisors(replicas))}"
    # Another rule checks whether the experts fit the ranks.
    replicas_of_experts, rest = divmod(grid.stage_size, grid.expert * grid.expert_tensor)
    if s.num_experts is None or rest or replicas_of_experts % count == 0:
        return None
    both = [n for n in divisors(replicas) if replicas_of_experts % n == 0]
    ranks = f"the {replicas_of_experts} ranks that hold the same experts"
    return f"{written} does not divide {ranks}; use {join_choices(both)}"


ZERO_RULES: dict[str, Rule] = {
    "zero3_split_backward": refuse_if(
        lambda s: (
            s.zero_stage == 3
            and s.pipeline_schedule in schedules.SPLITS_BACKWARD
            and s.pipeline_model_parallel_size > 1
        ),
        "--pipeline-schedule {s.pipeline_schedule} defers weight gradients until after --zero-stage 3 has reduced "
        "the gradients of a layer and freed its weights; use 1f1b, gpipe or interleaved, or --zero-stage 2",
    ),
    "hybrid_sharding": _hybrid_sharding,
    "zero3_offload": refuse_if(
        lambda s: s.zero_stage == 3 and s.optimizer_cpu_offload,
        "--optimizer-cpu-offload offloads what --zero-stage 0 to 2 keep beside the weights; the shards of "
        "--zero-stage 3 are the weights themselves; use --zero-stage 2, or leave --optimizer-cpu-offload out",
    ),
}

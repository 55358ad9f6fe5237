"""Estimated time of a step: compute at a share of the peak, the pipeline bubble, and exposed communication.

`pentatron plan` prints the assumptions. Matmuls reach `EFFICIENCY` of the peak, and less if a rank has few
tokens in a micro-batch or a narrow shard of a layer. Communication of tensor and expert parallelism is
exposed, that of the pipeline is hidden. The ring of context parallelism overlaps with attention, and with the
overlap flags data-parallel communication overlaps with backward, as far as these last.

Collectives are counted as rings: for a tensor of n bytes on k ranks, an all-gather, reduce-scatter or
all-to-all sends (k − 1) / k · n from every rank, and an all-reduce twice that. `tests/parity/test_theory.py`
counts the same collectives in real steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from pentatron.devices import Device
from pentatron.layout.check import check
from pentatron.layout.ranks import Axis
from pentatron.layout.stages import StagePart
from pentatron.plan.sizes import FP32, PlanSizes
from pentatron.plan.static_memory import buckets, shards_parameters
from pentatron.settings.model_sizes import attention_sizes, costs_of, matrices_per_mlp, step_flops

EFFICIENCY = 0.5
# With this many rows or columns, matmuls reach half of that efficiency.
_FEW_TOKENS, _NARROW = 256, 128
_FORWARD_AND_BACKWARD, _BACKWARD = 3, 2
# Micro-batches for each stage of a rank after which the schedule repeats.
_PERIODIC = 4


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in one step, or the seconds they take, by axis."""

    tensor: float = 0.0
    context: float = 0.0
    pipeline: float = 0.0
    data: float = 0.0
    expert: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, f.name) for f in fields(self))


def rank_traffic(sizes: PlanSizes, rank: int) -> Traffic:
    """Returns the traffic of a pipeline rank in one step."""
    parts, steps = sizes.parts(rank), sizes.accumulation
    return Traffic(
        tensor=steps * _tensor(sizes, parts),
        context=steps * sum(_context(sizes, part) for part in parts.values()),
        pipeline=_pipeline(sizes, rank, parts),
        data=_data(sizes, rank, parts),
        expert=steps * sum(_expert(sizes, part) for part in parts.values()),
    )


def _ring(ranks: int) -> float:
    return (ranks - 1) / ranks


def _tensor(sizes: PlanSizes, parts: Mapping[int, StagePart]) -> float:
    """Returns the bytes of tensor parallelism in a micro-batch: hidden states enter and leave every
    sharded block in forward and backward; the loss all-reduces three fp32 values per token."""
    if sizes.grid.tensor == 1:
        return 0.0
    ring, crossings = _ring(sizes.grid.tensor), 0.0
    for part in parts.values():
        crossings += 2 * (part.embedding + part.head)
        # In units of half an all-reduce: attention and a dense or shared MLP have two each in forward, and in
        # backward.
        dense = sum(n not in sizes.sparse_layers or bool(sizes.shared_inner) for n in part.layers)
        crossings += 4 * (len(part.layers) + dense) + _recomputed_crossings(sizes, part)
    loss = any(part.head for part in parts.values()) * 3 * FP32 * sizes.tokens * 2 * ring
    return crossings * sizes.element_bytes * sizes.tokens * sizes.hidden * ring + loss


def _recomputed_crossings(sizes: PlanSizes, part: StagePart) -> float:
    """Returns the crossings that recompute repeats: without sequence parallelism only leaving a block
    communicates, with it entering one as well. The output of the last layer of a recomputed run is not
    needed."""
    sp = sizes.sequence_parallel
    if "mlp" in sizes.recomputed_modules:
        return len(part.layers) if sp else 0
    runs = sizes.config.recomputed(part)
    covered = sum(map(len, runs))
    leaving = 2 * covered - (len(runs) if not sizes.config.model.hidden_dropout else 0)
    return 2 * covered + leaving if sp else 2 * leaving


def _context(sizes: PlanSizes, part: StagePart) -> float:
    """Returns the bytes of context parallelism in a micro-batch: keys and values, and their gradients in
    fp32."""
    ranks, layers = sizes.grid.context, len(part.layers)
    if ranks == 1:
        return 0.0
    recomputed = sum(map(len, sizes.config.recomputed(part)))
    forwards = 2 * layers + (layers if "core_attn" in sizes.recomputed_modules else recomputed)
    keys_values = 2 * sizes.tokens * sizes.keys
    match sizes.config.parallel.cp_comm_type:
        case "p2p":
            return keys_values * ((ranks - 1) * sizes.element_bytes * forwards + ranks * FP32 * layers)
        case "a2a":
            keys = max(sizes.keys, sizes.head * ranks // sizes.heads)
            return 2 * sizes.element_bytes * sizes.tokens * (sizes.queries + keys) * _ring(ranks) * forwards
        case _:
            return ranks * keys_values * _ring(ranks) * (sizes.element_bytes * forwards + FP32 * layers)


def _pipeline(sizes: PlanSizes, rank: int, parts: Mapping[int, StagePart]) -> float:
    """Returns the bytes of activations to the next rank and of gradients to the previous one, and of a tied
    embedding's gradient."""
    rank_of, steps = sizes.placement.rank_of, sizes.accumulation
    if sizes.grid.pipeline == 1:
        return 0.0
    neighbours = [stage for number in parts for stage in (number - 1, number + 1)]
    boundaries = sum(0 <= stage < len(rank_of) and rank_of[stage] != rank for stage in neighbours)
    ends = [part.embedding or part.head for part in parts.values()]
    is_split = sizes.tied and rank_of[0] != rank_of[-1] and any(ends)
    table = FP32 * sizes.local_vocab_size * sizes.hidden if is_split else 0
    shards = sizes.ranks("replicas") if sizes.config.parallel.zero_stage else 1
    return float(boundaries * steps * sizes.hidden_states + table // shards)


def _data(sizes: PlanSizes, rank: int, parts: Mapping[int, StagePart]) -> float:
    """Returns the bytes of data parallelism: fp32 gradients and updated weights. ZeRO 2 reduce-scatters in
    every backward, and ZeRO 3 also all-gathers in every pass."""
    if shards_parameters(sizes):
        return _zero3(sizes, parts)
    stage, total = sizes.config.parallel.zero_stage, 0.0
    for stages, axis, size in buckets(sizes, rank):
        ring = _ring(sizes.ranks(axis))
        if stage == 0:
            total += 2 * ring * FP32 * size
        else:
            passes = sizes.accumulation if stage == 2 and len(stages) == 1 else 1
            total += ring * size * (FP32 * passes + sizes.element_bytes)
    return total


def _zero3(sizes: PlanSizes, parts: Mapping[int, StagePart]) -> float:
    steps, instances, total = sizes.accumulation, sizes.grid.instances, 0.0
    axes: tuple[Axis, ...] = ("replicas", "expert_data")
    for part in parts.values():
        layers = [p for number in part.layers for p in sizes.parameters.layer(number)]
        for axis in axes:
            in_layers = sum(p.elements for p in layers if p.replica_axis == axis)
            elements = sum(p.elements for p in sizes.parameters.stage(part) if p.replica_axis == axis)
            ranks = max(1, sizes.ranks(axis) // instances)
            gathered = 2 * steps * in_layers + (elements - in_layers)
            total += _ring(ranks) * (sizes.element_bytes * gathered + FP32 * steps * elements)
            total += 2 * _ring(instances) * FP32 * elements / ranks
    return total


def _expert(sizes: PlanSizes, part: StagePart) -> float:
    """Returns the bytes of expert parallelism in a micro-batch with balanced experts: dispatch, combine and
    their gradients."""
    layers = len(sizes.sparse_layers.intersection(part.layers))
    ranks, moe = sizes.grid.expert * sizes.grid.expert_tensor, sizes.config.moe
    if not layers or ranks == 1:
        return 0.0
    runs = [part.layers] if "moe" in sizes.recomputed_modules else sizes.config.recomputed(part)
    recomputed = sum(len(sizes.sparse_layers.intersection(run)) for run in runs)
    alltoall = moe.moe_token_dispatcher_type == "alltoall"
    rows = sizes.dispatched_rows if alltoall else ranks * sizes.local_tokens
    return (4 * layers + 2 * recomputed) * sizes.element_bytes * rows * sizes.hidden * _ring(ranks)


@dataclass(frozen=True)
class Estimate:
    """Estimated seconds of one step. `computing` is that of the slowest pipeline rank; `sending` is the
    exposed communication by axis."""

    computing: float
    bubble: float
    sending: Traffic
    flops: float
    traffic: Traffic

    @property
    def seconds(self) -> float:
        return self.computing + self.waiting + self.sending.total

    @property
    def waiting(self) -> float:
        return self.computing * self.bubble / (1 - self.bubble)


def bubble_of(sizes: PlanSizes) -> float:
    """Returns the share of time that pipeline ranks wait for others, with equal stages."""
    config = sizes.config
    ranks, steps, virtual = sizes.grid.pipeline, sizes.accumulation, config.virtual_stages
    if ranks == 1:
        return 0.0
    schedule = config.parallel.pipeline_schedule
    is_even = steps % ranks == 0 or schedule in ("1f1b", "gpipe")
    if schedule in ("1f1b", "gpipe", "interleaved") and is_even and (steps >= ranks or virtual == 1):
        return (ranks - 1) / (virtual * steps + ranks - 1)
    micro_batches = min(steps, _PERIODIC * ranks * virtual + steps % ranks)
    timeline = check(config.schedule(micro_batches))
    busy = _FORWARD_AND_BACKWARD * virtual
    idle = timeline.time - busy * micro_batches
    return idle / (idle + busy * steps)


def estimate(sizes: PlanSizes, device: Device, per_machine: int, efficiency: float = EFFICIENCY) -> Estimate:
    """Estimates the time of a step."""
    config, grid = sizes.config, sizes.grid
    flops = step_flops(config.model, config.train.global_batch_size, config.model.seq_length, config.moe)
    # Matmuls of one rank's micro-batch are smaller than those that `efficiency` is about.
    matmuls = sizes.tokens / (sizes.tokens + _FEW_TOKENS) * sizes.queries / (sizes.queries + _NARROW)
    rate = device.peak(sizes.element_bytes) * efficiency * matmuls
    computing = flops * _recompute_factor(sizes) * _imbalance(sizes) / (grid.world_size * rate)
    by_rank = [rank_traffic(sizes, rank) for rank in sizes.representative_ranks]
    traffic = max(by_rank, key=lambda each: each.total)
    exposed = _exposed(sizes, traffic, computing, device, per_machine)
    return Estimate(computing, bubble_of(sizes), exposed, flops, traffic)


def _recompute_factor(sizes: PlanSizes) -> float:
    """Returns the compute of a step relative to one without recompute."""
    config, model, modules = sizes.config, sizes.config.model, sizes.recomputed_modules
    costs = costs_of(config.settings)
    total = model.num_layers * costs.layer + costs.head
    if config.memory.recompute_granularity == "full":
        layers = sum(len(run) for part in sizes.stages for run in config.recomputed(part))
        return 1 + layers * costs.layer / total / _FORWARD_AND_BACKWARD
    macs = 0.0
    if "core_attn" in modules:
        macs += model.seq_length * attention_sizes(model).linear_proj.inputs
    matrices, sparse = matrices_per_mlp(model), len(sizes.sparse_layers) / model.num_layers
    if "mlp" in modules:
        macs += (1 - sparse) * matrices * model.hidden_size * model.ffn_hidden_size
    if "moe" in modules and config.moe.moe_ffn_hidden_size:
        experts = config.moe.moe_router_topk * config.moe.moe_ffn_hidden_size
        macs += sparse * matrices * model.hidden_size * experts
    return 1 + model.num_layers * macs / total / _FORWARD_AND_BACKWARD


def _imbalance(sizes: PlanSizes) -> float:
    """Returns the compute of the slowest pipeline rank relative to the mean."""
    costs, ranks = costs_of(sizes.config.settings), range(sizes.placement.ranks)
    rank_costs = [sum(map(costs.of, sizes.parts(rank).values())) for rank in ranks]
    return max(rank_costs) * len(rank_costs) / sum(rank_costs)


def _exposed(
    sizes: PlanSizes, traffic: Traffic, computing: float, device: Device, per_machine: int
) -> Traffic:
    """Returns the seconds of communication that compute does not hide."""
    grid, parallel = sizes.grid, sizes.config.parallel

    def rate(extent: int) -> float:
        # `extent`: neighbouring ranks that the group lies within.
        return device.link if extent <= per_machine else device.network

    backward = computing * _BACKWARD / _FORWARD_AND_BACKWARD
    data = traffic.data / rate(grid.stage_size)
    passes = sizes.accumulation if parallel.zero_stage >= 2 else 1
    hideable = backward * passes / sizes.accumulation
    context = traffic.context / rate(grid.tensor * grid.context)
    if parallel.cp_comm_type == "p2p":
        # The ring overlaps with the attention scores.
        model, costs = sizes.config.model, costs_of(sizes.config.settings)
        scores = model.seq_length * sizes.heads * grid.tensor * sizes.head
        context = max(0.0, context - computing * (scores / (costs.layer + costs.head / model.num_layers)))
    return Traffic(
        tensor=traffic.tensor / rate(grid.tensor),
        context=context,
        data=max(0.0, data - hideable) if sizes.decisions.optimizer.overlap_reduce else data,
        expert=traffic.expert / rate(grid.expert * grid.expert_tensor),
    )

"""How long a step takes, estimated: computation at a share of the device's peak, a bubble, and what is sent and not hidden.

Assumptions, which `pentatron plan` prints: matmuls reach `EFFICIENCY` of the peak, and less
where a rank's micro-batch is short or its share of a layer narrow. Tensor and expert parallelism wait for what
they send. Messages of the pipeline are hidden. What is sent around the ring of context parallelism is hidden behind attention,
and with the overlap flags what data parallelism sends is hidden behind backward, as far as these last.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from pentatron.devices import Device
from pentatron.layout.check import check
from pentatron.layout.ranks import Axis
from pentatron.layout.stages import StagePart
from pentatron.plan.shape import Shape
from pentatron.plan.static_memory import buckets, shards_parameters
from pentatron.settings.parameters import attention_sizes, costs_of, matrices_of, step_flops

# What a rank sends in one training step, in bytes, by the axis it sends along.
#
# Collectives count as a ring would run them: of a tensor of n bytes over k ranks, gathering, scattering and
# exchanging send (k − 1) / k · n from every rank, and an all-reduce, which is a scatter and a gather, twice
# that. The numbers of collectives are those of `tests/parity/test_theory.py`, which counts them in real
# steps.


_FP32 = 4


@dataclass(frozen=True)
class Traffic:
    """Bytes sent by one rank in one step."""

    tensor: float = 0.0
    context: float = 0.0
    pipeline: float = 0.0
    data: float = 0.0
    expert: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, f.name) for f in fields(self))


def traffic_of(shape: Shape) -> Traffic:
    """Of the pipeline rank that sends most."""
    every = [rank_traffic(shape, rank) for rank in shape.telling_ranks]
    return max(every, key=lambda found: found.total)


def rank_traffic(shape: Shape, rank: int) -> Traffic:
    parts, steps = shape.parts(rank), shape.accumulation
    return Traffic(
        tensor=steps * _tensor(shape, parts),
        context=steps * sum(_context(shape, part) for part in parts.values()),
        pipeline=_pipeline(shape, rank, parts),
        data=_data(shape, rank, parts),
        expert=steps * sum(_expert(shape, part) for part in parts.values()),
    )


def _ring(ranks: int) -> float:
    return (ranks - 1) / ranks


def _tensor(shape: Shape, parts: Mapping[int, StagePart]) -> float:
    """Of a micro-batch: the stream enters and leaves every part that is split, forward and backward; two sums for the loss."""
    ranks = shape.grid.tensor
    if ranks == 1:
        return 0.0
    stream = shape.width * shape.tokens * shape.hidden * _ring(ranks)
    crossings = 0.0
    for part in parts.values():
        crossings += 2 * (part.embedding + part.head)
        crossings += sum(2 * _halves_of_crossings(shape, number) for number in part.layers)
        crossings += _again(shape, part)
    loss = any(part.head for part in parts.values()) * 3 * _FP32 * shape.tokens * 2 * _ring(ranks)
    return crossings * stream + loss


def _halves_of_crossings(shape: Shape, layer: int) -> int:
    """How often the stream enters or leaves in a forward, as half an all-reduce each; backward does the same once more."""
    dense = layer not in shape.sparse_layers or shape.shared_inner
    return 4 if dense else 2


def _again(shape: Shape, part: StagePart) -> float:
    """What recompute repeats: without sequence parallelism leaving alone costs anything, with it entering as well. What
    leaves the last layer of a run is not needed again."""
    memory, sp = shape.config.memory, shape.sequence_parallel
    if memory.recompute_granularity == "selective":
        return len(part.layers) if sp and "mlp" in memory.recompute_modules else 0
    runs = shape.config.recomputed(part)
    covered = sum(map(len, runs))
    leaving = 2 * covered - (len(runs) if not shape.config.model.hidden_dropout else 0)
    return 2 * covered + leaving if sp else 2 * leaving


def _context(shape: Shape, part: StagePart) -> float:
    """Of a micro-batch: keys and values, and their gradients in fp32."""
    ranks, layers = shape.grid.context, len(part.layers)
    if ranks == 1:
        return 0.0
    memory = shape.config.memory
    covered = sum(map(len, shape.config.recomputed(part)))
    if memory.recompute_granularity == "selective" and "core_attn" in memory.recompute_modules:
        covered = layers
    keys_values = 2 * shape.tokens * shape.keys
    match shape.config.parallel.cp_comm_type:
        case "p2p":
            forward = (ranks - 1) * keys_values * shape.width
            return forward * (2 * layers + covered) + ranks * keys_values * _FP32 * layers
        case "a2a":
            keys = max(shape.keys, shape.head * ranks // shape.heads)
            both = shape.width * shape.tokens * (2 * shape.queries + 2 * keys) * _ring(ranks)
            return both * (2 * layers + covered)
        case _:
            whole = ranks * keys_values * _ring(ranks)
            return whole * shape.width * (2 * layers + covered) + whole * _FP32 * layers


def _pipeline(shape: Shape, rank: int, parts: Mapping[int, StagePart]) -> float:
    """Activations to the next rank and gradients to the one before, for every boundary; a tied embedding's gradient."""
    where, steps = shape.placement.rank_of, shape.accumulation
    if shape.grid.pipeline == 1:
        return 0.0
    message = shape.width * shape.in_stream * shape.hidden
    boundaries = sum(
        (number + 1 < len(where) and where[number + 1] != rank) + (number > 0 and where[number - 1] != rank)
        for number in parts
    )
    ends = [part.embedding or part.head for part in parts.values()]
    apart = shape.tied and where[0] != where[-1] and any(ends)
    shared = _FP32 * shape.words * shape.hidden
    if apart and shape.config.parallel.zero_stage:
        shared //= shape.ranks("replicas")
    return float(boundaries * steps * message + (shared if apart else 0))


def _data(shape: Shape, rank: int, parts: Mapping[int, StagePart]) -> float:
    """Gradients in fp32, and weights that were updated in part; ZeRO 2 scatters, and ZeRO 3 gathers too, in every pass."""
    if shards_parameters(shape):
        return _sharded(shape, parts)
    stage, steps = shape.config.parallel.zero_stage, shape.accumulation
    total = 0.0
    for stages, found in buckets(shape, rank).items():
        for axis, size in found:
            ring = _ring(shape.ranks(axis))
            if stage == 0:
                total += 2 * ring * _FP32 * size
            else:
                passes = steps if stage == 2 and len(stages) == 1 else 1
                total += ring * size * (_FP32 * passes + shape.width)
    return total


def _sharded(shape: Shape, parts: Mapping[int, StagePart]) -> float:
    steps, instances = shape.accumulation, shape.grid.instances
    axes: tuple[Axis, ...] = ("replicas", "expert_data")
    total = 0.0
    for part in parts.values():
        layers = [p for number in part.layers for p in shape.parameters.layer(number)]
        every = shape.parameters.stage(part)
        for axis in axes:
            in_layers = sum(p.elements for p in layers if p.copies == axis)
            whole = sum(p.elements for p in every if p.copies == axis)
            ranks = max(1, shape.ranks(axis) // instances)
            gathered = 2 * steps * in_layers + (whole - in_layers)
            total += _ring(ranks) * (shape.width * gathered + _FP32 * steps * whole)
            total += 2 * _ring(instances) * _FP32 * whole / ranks
    return total


def _expert(shape: Shape, part: StagePart) -> float:
    """Of a micro-batch: tokens to their experts and back, and their gradients, if all experts are equally busy."""
    layers = len(shape.sparse_layers.intersection(part.layers))
    ranks, moe = shape.grid.expert * shape.grid.expert_tensor, shape.config.moe
    if not layers or ranks == 1:
        return 0.0
    again = sum(1 for run in shape.config.recomputed(part) for n in run if n in shape.sparse_layers)
    memory = shape.config.memory
    if memory.recompute_granularity == "selective" and "moe" in memory.recompute_modules:
        again = layers
    ways = 4 * layers + 2 * again
    if moe.moe_token_dispatcher_type == "alltoall":
        return ways * shape.width * shape.rows * shape.hidden * _ring(ranks)
    return ways * shape.width * ranks * shape.in_stream * shape.hidden * _ring(ranks)


EFFICIENCY = 0.5
# Matmuls with so many rows or columns reach half of that.
_FEW_TOKENS, _NARROW = 256, 128
_FORWARD_AND_BACKWARD, _BACKWARD = 3, 2
# Micro-batches for each stage of a rank after which a longer step only repeats itself.
_ENOUGH = 4


@dataclass(frozen=True)
class Estimate:
    """Seconds of one step: `computing` with the most expensive stage as the pace, and each kind of waiting."""

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


def bubble_of(shape: Shape) -> float:
    """The share of a pipeline rank's time that is spent waiting for others, with equal stages."""
    config = shape.config
    ranks, steps, virtual = shape.grid.pipeline, shape.accumulation, config.virtual_stages
    if ranks == 1:
        return 0.0
    kind = config.parallel.pipeline_schedule
    even = steps % ranks == 0 or kind in ("1f1b", "gpipe")
    if kind in ("1f1b", "gpipe", "interleaved") and even and (steps >= ranks or virtual == 1):
        return (ranks - 1) / (virtual * steps + ranks - 1)
    shown = min(steps, _ENOUGH * ranks * virtual + steps % ranks)
    checked = check(config.schedule(shown))
    busy = _FORWARD_AND_BACKWARD * virtual
    waiting = checked.time - busy * shown
    return waiting / (waiting + busy * steps)


def estimate(shape: Shape, device: Device, per_machine: int, efficiency: float = EFFICIENCY) -> Estimate:
    config, grid = shape.config, shape.grid
    flops = step_flops(config.model, config.train.global_batch_size, config.model.seq_length, config.moe)
    rate = device.peak(shape.width) * efficiency * _reached(shape)
    computing = flops * _recomputed(shape) * _unevenness(shape) / (grid.world_size * rate)
    traffic = traffic_of(shape)
    return Estimate(
        computing, bubble_of(shape), _sending(shape, traffic, computing, device, per_machine), flops, traffic
    )


def _reached(shape: Shape) -> float:
    """Of the rate of large matmuls, what those of one rank's micro-batch reach."""
    return shape.tokens / (shape.tokens + _FEW_TOKENS) * shape.queries / (shape.queries + _NARROW)


def _recomputed(shape: Shape) -> float:
    """How much more is computed: whole layers run a third of their work again, modules their part of it."""
    config = shape.config
    memory, model = config.memory, config.model
    if memory.recompute_granularity is None:
        return 1.0
    costs = costs_of(config.settings)
    whole = model.num_layers * costs.layer + costs.head
    if memory.recompute_granularity == "full":
        covered = sum(len(run) for part in shape.stages for run in config.recomputed(part))
        return 1 + covered * costs.layer / whole / _FORWARD_AND_BACKWARD
    again = 0.0
    if "core_attn" in memory.recompute_modules:
        again += model.seq_length * attention_sizes(model).linear_proj.inputs
    matrices = matrices_of(model)
    if "mlp" in memory.recompute_modules:
        dense = 1 - len(shape.sparse_layers) / model.num_layers
        again += dense * matrices * model.hidden_size * model.ffn_hidden_size
    if "moe" in memory.recompute_modules and config.moe.moe_ffn_hidden_size:
        chosen = config.moe.moe_router_topk * config.moe.moe_ffn_hidden_size
        again += len(shape.sparse_layers) / model.num_layers * matrices * model.hidden_size * chosen
    return 1 + model.num_layers * again / whole / _FORWARD_AND_BACKWARD


def _unevenness(shape: Shape) -> float:
    """The most expensive pipeline rank sets the pace: its work over the mean."""
    costs, placement, parts = costs_of(shape.config.settings), shape.placement, shape.stages
    of_rank = [sum(costs.of(parts[s]) for s in placement.stages_of(r)) for r in range(placement.ranks)]
    return max(of_rank) * len(of_rank) / sum(of_rank)


def _sending(shape: Shape, traffic: Traffic, computing: float, device: Device, per_machine: int) -> Traffic:
    """Seconds that are not hidden behind computation."""
    grid, parallel = shape.grid, shape.config.parallel

    def rate(extent: int) -> float:
        """Of a group whose members lie within so many neighbouring ranks."""
        return device.link if extent <= per_machine else device.network

    backward = computing * _BACKWARD / _FORWARD_AND_BACKWARD
    stage = grid.stage_size
    data = traffic.data / rate(stage)
    passes = shape.accumulation if parallel.zero_stage >= 2 else 1
    hideable = backward * passes / shape.accumulation
    context = traffic.context / rate(grid.tensor * grid.context)
    if parallel.cp_comm_type == "p2p":
        context = max(0.0, context - computing * _share_of_scores(shape))
    return Traffic(
        tensor=traffic.tensor / rate(grid.tensor),
        context=context,
        data=max(0.0, data - hideable) if shape.decisions.grad_overlap.on else data,
        expert=traffic.expert / rate(grid.expert * grid.expert_tensor),
    )


def _share_of_scores(shape: Shape) -> float:
    model, costs = shape.config.model, costs_of(shape.config.settings)
    scores = model.seq_length * shape.heads * shape.grid.tensor * shape.head
    return scores / (costs.layer + costs.head / model.num_layers)

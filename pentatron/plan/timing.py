"""How long a step takes, estimated: computation at a share of the device's peak, a bubble, and what is sent and not hidden.

Assumptions, which `pentatron plan` prints: matmuls reach `EFFICIENCY` of the peak, and less
where a rank's micro-batch is short or its share of a layer narrow. Tensor and expert parallelism wait for what
they send. Messages of the pipeline are hidden. What is sent around the ring of context parallelism is hidden behind attention,
and with the overlap flags what data parallelism sends is hidden behind backward, as far as these last.
"""

from dataclasses import dataclass

from pentatron.config.flops import step_flops
from pentatron.config.parameters import attention_sizes, matrices_of
from pentatron.config.stages import costs_of
from pentatron.devices import Device
from pentatron.layout.check import check
from pentatron.plan.shape import Shape
from pentatron.plan.traffic import Traffic, traffic_of

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

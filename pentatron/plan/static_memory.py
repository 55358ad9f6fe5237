"""What a rank holds: weights, master weights and Adam's moments from the first step to the last, gradients from backward to the update.

ZeRO 0 to 2 keep parameters in flat buckets, packed here by the function that packs the real ones; ZeRO 3 keeps a rectangle
of each parameter.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pentatron.layout.packing import Item, aligned, packed
from pentatron.layout.ranks import Axis
from pentatron.layout.stages import StagePart
from pentatron.plan.shape import Shape
from pentatron.settings.parameters import Parameter
from pentatron.settings.run import RunConfig

_FP32 = 4


def moments(shape: Shape) -> int:
    """Numbers that the optimizer remembers of each parameter."""
    optim = shape.config.optim
    return 2 if optim.optimizer == "adam" else int(optim.sgd_momentum > 0)


@dataclass(frozen=True)
class Held:
    """Bytes on one rank. `host` of the optimizer's are in the machine's memory instead of the device's; so is the copy from which
    checkpoints are saved in the background (`saving`)."""

    weights: int = 0
    gradients: int = 0
    master: int = 0
    moments: int = 0
    host: int = 0
    saving: int = 0

    @property
    def in_host(self) -> int:
        return self.host + self.saving

    @property
    def optimizer(self) -> int:
        """On the device."""
        return self.master + self.moments - self.host

    @property
    def on_device(self) -> int:
        return self.weights + self.gradients + self.optimizer


def held(shape: Shape, pipeline_rank: int) -> Held:
    parts = shape.parts(pipeline_rank)
    if shards_parameters(shape):
        return _in_shards(shape, parts)
    return _in_buckets(shape, pipeline_rank)


def shards_parameters(shape: Shape) -> bool:
    """ZeRO 3, and somebody to divide parameters with."""
    axes: tuple[Axis, ...] = ("replicas", "expert_data") if shape.sparse_layers else ("replicas",)
    return shape.config.parallel.zero_stage == 3 and any(shape.ranks(axis) > 1 for axis in axes)


def parameters_of(shape: Shape, parts: Mapping[int, StagePart]) -> dict[tuple[int, ...], list[Parameter]]:
    """By the stages that use them: one stage, or the two ends of a folded pipeline for a tied embedding."""
    found: dict[tuple[int, ...], list[Parameter]] = {
        (number,): shape.parameters.stage(part) for number, part in parts.items()
    }
    ends = [number for number, part in parts.items() if part.embedding or part.head]
    if len(ends) == 2 and shape.tied:
        table = next(p for p in found[(ends[0],)] if p.at_both_ends)
        for end in ends:
            found[(end,)] = [p for p in found[(end,)] if not p.at_both_ends]
        found[tuple(ends)] = [dataclasses.replace(table, at_both_ends=False)]
    return found


def buckets(shape: Shape, pipeline_rank: int) -> dict[tuple[int, ...], list[tuple[Axis, int]]]:
    """By the stages that use them, for every bucket of a rank: the axis of its copies, and its elements."""
    if pipeline_rank not in shape.buckets:
        found = parameters_of(shape, shape.parts(pipeline_rank))
        shape.buckets[pipeline_rank] = {stages: _bucket_sizes(shape, each) for stages, each in found.items()}
    return shape.buckets[pipeline_rank]


def _bucket_sizes(shape: Shape, parameters: Sequence[Parameter]) -> list[tuple[Axis, int]]:
    items = [Item(p.elements, p.copies, p.at_both_ends) for p in parameters]
    found = packed(items, shape.config.parallel.ddp_bucket_size)
    return [(bucket.copies, bucket.size(items, shape.ranks(bucket.copies))) for bucket in found]


def _in_buckets(shape: Shape, pipeline_rank: int) -> Held:
    parallel, offload = shape.config.parallel, shape.decisions.offload.on
    by_stages = buckets(shape, pipeline_rank)
    every = [bucket for found in by_stages.values() for bucket in found]
    whole = sum(size for _, size in every)
    own = sum(size // shape.ranks(axis) for axis, size in every)
    kept = own if parallel.zero_stage else whole
    separate = offload or shape.width != _FP32
    master, state = _FP32 * kept if separate else 0, moments(shape) * _FP32 * kept
    return Held(
        weights=shape.width * whole,
        gradients=_gradients(shape, pipeline_rank, by_stages),
        master=master,
        moments=state,
        host=master + state if offload else 0,
        saving=_saving(shape, kept),
    )


def _saving(shape: Shape, elements: int) -> int:
    """Of weights in fp32 and what the optimizer remembers of them. Of ranks that hold the same, one saves all of it at most."""
    chosen = shape.config.checkpoint
    in_background = chosen.async_save and chosen.save_checkpoints
    return (1 + moments(shape)) * _FP32 * elements if in_background else 0


def _gradients(
    shape: Shape, pipeline_rank: int, by_stages: Mapping[tuple[int, ...], Sequence[tuple[Axis, int]]]
) -> int:
    """When all of a step have come, which is the most: fp32 buckets of what has copies, and the other parameters one by one, as
    backward makes them where it makes one a step, else their sums in fp32."""
    copied = {
        stages: [(axis, size) for axis, size in found if shape.ranks(axis) > 1]
        for stages, found in by_stages.items()
    }
    if shape.config.parallel.zero_stage == 2:
        total = _FP32 * _scattered(shape, copied)
    else:
        total = _FP32 * sum(size for found in copied.values() for _, size in found)
    once = shape.config.accumulation == 1
    for stages, parameters in parameters_of(shape, shape.parts(pipeline_rank)).items():
        for parameter in parameters:
            if shape.ranks(parameter.copies) == 1:
                # What two stages share, here or on two ranks, is summed.
                summed = not once or len(stages) > 1 or (parameter.at_both_ends and shape.grid.pipeline > 1)
                total += (_FP32 if summed else shape.width) * parameter.elements
    return total


def _scattered(shape: Shape, by_stages: Mapping[tuple[int, ...], Sequence[tuple[Axis, int]]]) -> int:
    """ZeRO 2: shares of gradients, and buffers of the largest bucket's size in which one is collected and reduced. What
    two stages share is kept in whole."""
    shared = sum(size for stages, found in by_stages.items() if len(stages) > 1 for _, size in found)
    single = [bucket for stages, found in by_stages.items() if len(stages) == 1 for bucket in found]
    kept = sum(size // shape.ranks(axis) for axis, size in single)
    largest = max((size for _, size in single), default=0)
    # While one bucket is reduced the next one fills; with one bucket there is no next one.
    kinds = len({axis for axis, _ in single})
    # Experts and dense layers of a stage fill buckets at the same time.
    buffers = kinds + (shape.decisions.grad_overlap.on and len(single) > 1)
    return shared + kept + buffers * largest


def _in_shards(shape: Shape, parts: Mapping[int, StagePart]) -> Held:
    """Weights are the fp32 master themselves; what is gathered of them is in the model's precision, and passes."""
    weights = gradients = 0
    for found in parameters_of(shape, parts).values():
        shares = [_share(p, shape.ranks(p.copies) // shape.grid.instances) for p in found]
        weights += sum(shares)
        gradients += sum(map(aligned, shares))
    return Held(
        weights=_FP32 * weights,
        gradients=_FP32 * gradients,
        master=0,
        moments=moments(shape) * _FP32 * weights,
        saving=_saving(shape, weights),
    )


def _share(parameter: Parameter, ranks: int) -> int:
    """The largest share of a parameter: rows, unless there are fewer than ranks."""
    sizes = parameter.shape
    ranks = max(1, ranks)
    if sizes[0] < ranks:
        other = next((size for size in sizes[1:] if size % ranks == 0), None)
        if other is not None:
            return parameter.elements // ranks
    return math.ceil(sizes[0] / ranks) * parameter.elements // sizes[0]


def total_parameters(shape: Shape) -> tuple[int, int]:
    """Of the whole model, without padding of the vocabulary; and those that one token passes through."""
    model, moe = shape.config.model, shape.config.moe
    one = whole(shape)
    part = StagePart(tuple(range(model.num_layers)), embedding=True, head=True)
    total = sum(p.elements for p in one.parameters.stage(part))
    tables = 1 if one.tied else 2
    total -= tables * (one.words - model.vocab_size) * model.hidden_size
    idle = 0
    if moe.num_experts:
        each = sum(p.elements for p in one.parameters.experts.parameters) // moe.num_experts
        idle = len(one.sparse_layers) * each * (moe.num_experts - moe.moe_router_topk)
    return total, total - idle


def whole(shape: Shape) -> Shape:
    """The same model on one process."""
    return Shape(_on_one_process(shape.config), on_gpu=shape.on_gpu)


def _on_one_process(config: RunConfig) -> RunConfig:
    sizes: dict[str, Any] = {
        f.name: 1 for f in dataclasses.fields(config.parallel) if f.name.endswith("_parallel_size")
    }
    parallel = dataclasses.replace(config.parallel, **sizes, num_distributed_optimizer_instances=1)
    return dataclasses.replace(config, parallel=parallel)

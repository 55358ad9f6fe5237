"""Static memory of a rank: parameters, fp32 master weights, optimizer state and gradients.

ZeRO 0 to 2 keep parameters in flat buckets, which the same function packs as in training; ZeRO 3 keeps a
shard of each parameter.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pentatron.layout.packing import Item, align_up, pack
from pentatron.layout.ranks import Axis
from pentatron.layout.stages import StagePart
from pentatron.plan.sizes import FP32, PlanSizes, with_values
from pentatron.settings.model_sizes import Parameter


def state_values(sizes: PlanSizes) -> int:
    """Returns the number of values in the optimizer state per parameter."""
    optim = sizes.config.optim
    return 2 if optim.optimizer == "adam" else int(optim.sgd_momentum > 0)


@dataclass(frozen=True)
class StaticMemory:
    """Static memory of one rank in bytes.

    `host` is the part of the optimizer state that is offloaded to host memory; `async_save_copy` is the copy
    in host memory from which checkpoints are written in the background.
    """

    weights: int = 0
    gradients: int = 0
    master: int = 0
    moments: int = 0
    host: int = 0
    async_save_copy: int = 0

    @property
    def in_host(self) -> int:
        return self.host + self.async_save_copy

    @property
    def optimizer(self) -> int:
        """Bytes of optimizer state and master weights on the device."""
        return self.master + self.moments - self.host

    @property
    def on_device(self) -> int:
        return self.weights + self.gradients + self.optimizer


def shards_parameters(sizes: PlanSizes) -> bool:
    """Whether ZeRO 3 is on and there is more than one rank to shard parameters over."""
    axes: tuple[Axis, ...] = ("replicas", "expert_data") if sizes.sparse_layers else ("replicas",)
    return sizes.config.parallel.zero_stage == 3 and any(sizes.ranks(axis) > 1 for axis in axes)


def parameters_of(sizes: PlanSizes, parts: Mapping[int, StagePart]) -> dict[tuple[int, ...], list[Parameter]]:
    """Groups the parameters of a rank by the stages that use them: one stage, or the first and the last stage
    of a folded pipeline for a tied embedding."""
    by_stages: dict[tuple[int, ...], list[Parameter]] = {
        (number,): sizes.parameters.stage(part) for number, part in parts.items()
    }
    ends = [number for number, part in parts.items() if part.embedding or part.head]
    if len(ends) == 2 and sizes.tied:
        table = next(p for p in by_stages[(ends[0],)] if p.is_tied_across_stages)
        for end in ends:
            by_stages[(end,)] = [p for p in by_stages[(end,)] if not p.is_tied_across_stages]
        by_stages[tuple(ends)] = [dataclasses.replace(table, is_tied_across_stages=False)]
    return by_stages


def buckets(sizes: PlanSizes, pipeline_rank: int) -> list[tuple[tuple[int, ...], Axis, int]]:
    """Returns every bucket of a rank: the stages that use it, its replica axis and its number of elements."""
    if pipeline_rank not in sizes.buckets:
        sizes.buckets[pipeline_rank] = found = []
        for stages, parameters in parameters_of(sizes, sizes.parts(pipeline_rank)).items():
            items = [Item(p.elements, p.replica_axis, p.is_tied_across_stages) for p in parameters]
            packed = pack(items, sizes.config.parallel.ddp_bucket_size)
            found += [(stages, b.replica_axis, b.size(items, sizes.ranks(b.replica_axis))) for b in packed]
    return sizes.buckets[pipeline_rank]


def static_memory_of(sizes: PlanSizes, pipeline_rank: int) -> StaticMemory:
    """Returns the static memory of a pipeline rank."""
    if shards_parameters(sizes):
        return _sharded_memory(sizes, sizes.parts(pipeline_rank))
    counts = [(size, size // sizes.ranks(axis)) for _, axis, size in buckets(sizes, pipeline_rank)]
    elements, shard_elements = (sum(column) for column in zip(*counts))
    state_elements = shard_elements if sizes.config.parallel.zero_stage else elements
    offload = sizes.decisions.optimizer.in_host_memory
    master = FP32 * state_elements if offload or sizes.element_bytes != FP32 else 0
    state = state_values(sizes) * FP32 * state_elements
    return StaticMemory(
        weights=sizes.element_bytes * elements,
        gradients=_gradients(sizes, pipeline_rank),
        master=master,
        moments=state,
        host=master + state if offload else 0,
        async_save_copy=_saving_copy(sizes, state_elements),
    )


def _saving_copy(sizes: PlanSizes, elements: int) -> int:
    """Returns the bytes of the copy for background saving: fp32 weights and optimizer state. One of the
    replicas saves all of it at most."""
    checkpoint = sizes.config.checkpoint
    in_background = checkpoint.async_save and checkpoint.save_checkpoints
    return (1 + state_values(sizes)) * FP32 * elements if in_background else 0


def _gradients(sizes: PlanSizes, pipeline_rank: int) -> int:
    """Returns the bytes of gradients at the end of a step, which is their peak: fp32 buckets of replicated
    parameters; other parameters have theirs in the model's precision if a step has one backward, otherwise as
    fp32 sums."""
    replicated = [bucket for bucket in buckets(sizes, pipeline_rank) if sizes.ranks(bucket[1]) > 1]
    sharded = sizes.config.parallel.zero_stage == 2
    total = FP32 * (_sharded_gradients(sizes, replicated) if sharded else sum(b[2] for b in replicated))
    for stages, parameters in parameters_of(sizes, sizes.parts(pipeline_rank)).items():
        for parameter in parameters:
            if sizes.ranks(parameter.replica_axis) == 1:
                # Gradients of a parameter that two stages share are summed, on one rank or on two.
                shared = len(stages) > 1 or (parameter.is_tied_across_stages and sizes.grid.pipeline > 1)
                bytes_each = FP32 if sizes.accumulation > 1 or shared else sizes.element_bytes
                total += bytes_each * parameter.elements
    return total


def _sharded_gradients(sizes: PlanSizes, replicated: Sequence[tuple[tuple[int, ...], Axis, int]]) -> int:
    """Returns the elements of gradients with ZeRO 2: shards, and buffers of the largest bucket's size for
    reduction. Gradients that two stages share are not sharded."""
    shared = sum(size for stages, _, size in replicated if len(stages) > 1)
    single = [(axis, size) for stages, axis, size in replicated if len(stages) == 1]
    shards = sum(size // sizes.ranks(axis) for axis, size in single)
    largest = max((size for _, size in single), default=0)
    # Buckets of experts and of dense layers fill at the same time, and with overlap another one fills while
    # one is reduced.
    overlaps = sizes.decisions.optimizer.overlap_reduce and len(single) > 1
    buffers = len({axis for axis, _ in single}) + overlaps
    return shared + shards + buffers * largest


def _sharded_memory(sizes: PlanSizes, parts: Mapping[int, StagePart]) -> StaticMemory:
    """Returns the static memory with ZeRO 3, where the shards are the fp32 master weights."""
    weights = gradients = 0
    for parameters in parameters_of(sizes, parts).values():
        shards = [_shard_elements(p, sizes.ranks(p.replica_axis) // sizes.grid.instances) for p in parameters]
        weights += sum(shards)
        gradients += sum(map(align_up, shards))
    moments, copied = state_values(sizes) * FP32 * weights, _saving_copy(sizes, weights)
    return StaticMemory(FP32 * weights, FP32 * gradients, moments=moments, async_save_copy=copied)


def _shard_elements(parameter: Parameter, ranks: int) -> int:
    """Returns the size of the largest shard of a parameter: split by rows, unless there are fewer rows than
    ranks."""
    rows, *columns = parameter.shape
    ranks = max(1, ranks)
    if rows < ranks and any(size % ranks == 0 for size in columns):
        return parameter.elements // ranks
    return math.ceil(rows / ranks) * parameter.elements // rows


def total_parameters(sizes: PlanSizes) -> tuple[int, int]:
    """Returns the parameters of the whole model, without vocabulary padding, and those active per token."""
    model, moe = sizes.config.model, sizes.config.moe
    single = on_one_process(sizes)
    part = StagePart(tuple(range(model.num_layers)), embedding=True, head=True)
    total = sum(p.elements for p in single.parameters.stage(part))
    total -= (1 if single.tied else 2) * (single.local_vocab_size - model.vocab_size) * model.hidden_size
    idle = 0
    if moe.num_experts:
        expert = sum(p.elements for p in single.parameters.experts.parameters) // moe.num_experts
        idle = len(single.sparse_layers) * expert * (moe.num_experts - moe.moe_router_topk)
    return total, total - idle


def on_one_process(sizes: PlanSizes) -> PlanSizes:
    """Returns the same model on one process."""
    config = sizes.config
    names = [f.name for f in dataclasses.fields(config.parallel) if f.name.endswith("_parallel_size")]
    names.append("num_distributed_optimizer_instances")
    return PlanSizes(with_values(config, **dict.fromkeys(names, 1)), sizes.on_gpu)

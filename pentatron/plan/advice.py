"""Answers to the guides' decision tree and rows of their tables, for a model and the devices at hand."""

from dataclasses import dataclass
from typing import Any

from pentatron.plan.activations import layer_activations
from pentatron.plan.memory import RankMemory, peak_rank_memory
from pentatron.plan.search import Layout, Search, usable_memory
from pentatron.plan.sizes import FP32, PlanSizes, with_values
from pentatron.plan.static_memory import on_one_process, state_values, total_parameters
from pentatron.settings.settings import Settings
from pentatron.text import binary_size, divisors

BILLION = 1e9
_DEEP = 30


def by_expert_size(layout: Layout) -> list[tuple[int, int, int]]:
    """Returns, for every possible expert-parallel size, the bytes per device and those of its experts'
    weights; all other settings are unchanged."""
    sizes = layout.sizes
    ranks = sizes.grid.stage_size // sizes.grid.expert_tensor
    expert_sizes = [size for size in divisors(sizes.config.moe.num_experts or 0) if ranks % size == 0]
    configs = [with_values(sizes.config, expert_model_parallel_size=size) for size in expert_sizes]
    planned = [PlanSizes(config, sizes.on_gpu) for config in configs]
    return [(size, peak_rank_memory(s).total, _experts_weights(s)) for size, s in zip(expert_sizes, planned)]


def _experts_weights(sizes: PlanSizes) -> int:
    """Returns the bytes of experts' weights on the pipeline rank that has most."""
    expert = sum(p.elements for p in sizes.parameters.experts.parameters)
    parts = [sizes.parts(rank).values() for rank in range(sizes.grid.pipeline)]
    layers = max(sum(len(sizes.sparse_layers & set(part.layers)) for part in stages) for stages in parts)
    return sizes.element_bytes * expert * layers


@dataclass(frozen=True)
class SuggestedLayout:
    """A row of a guide's table: a layout for models from `low` to `high` billion parameters."""

    low: float
    high: float
    devices: int
    tensor: int
    pipeline: int
    data: int
    remark: str = ""

    def covers(self, parameters: float) -> bool:
        return self.low <= parameters / BILLION < self.high

    def in_words(self) -> str:
        sizes = f"{self.devices} GPUs as TP {self.tensor} × PP {self.pipeline} × DP {self.data}"
        return f"{sizes}, {self.remark}" if self.remark else sizes


# The guides' two tables: with the number of GPUs, and by the size of the model alone.
TABLE_3D = (
    SuggestedLayout(0, 1, 4, 1, 1, 4),
    SuggestedLayout(1, 3, 4, 2, 1, 2),
    SuggestedLayout(3, 7, 8, 2, 2, 2),
    SuggestedLayout(7, 13, 16, 4, 2, 2),
    SuggestedLayout(13, 30, 32, 4, 4, 2),
    SuggestedLayout(30, 70, 64, 8, 4, 2),
)
SUGGESTED_BY_SIZE = {
    "small": SuggestedLayout(0, 1, 4, 1, 1, 4),
    "medium": SuggestedLayout(1, 10, 8, 2, 2, 2),
    "large": SuggestedLayout(10, 100, 64, 8, 4, 2),
    "huge": SuggestedLayout(100, float("inf"), 128, 8, 8, 2, "with ZeRO 3 and the optimizer in host memory"),
}


# Ranges of published models in billion parameters.
BY_FAMILY = (
    (5, 15, "TP 1-2, PP 1, DP over the other GPUs, 8 GPUs or more"),
    (25, 40, "TP 4-8, PP 1-2, 32 GPUs or more"),
    (65, 80, "TP 8, PP 2-4, 64 GPUs or more"),
    (300, 500, "TP 8, PP 8-16, 512 GPUs or more"),
)

# Costs and savings of each axis and of each ZeRO stage.
TRADE_OFFS = {
    "data": "simple; every GPU holds the whole model; little traffic, no memory saved",
    "ZeRO 1": "shards the optimizer state over the data-parallel ranks; no extra traffic",
    "ZeRO 2": "shards gradients too: medium traffic, medium saving",
    "ZeRO 3": "shards weights too: high traffic, very high saving",
    "tensor": "for huge layers: traffic in every layer, so inside a machine; high saving",
    "pipeline": "divides the layers: little traffic, but ranks wait in the bubble; high saving",
    "context": "shards every sequence, for long sequences; saves activations only",
    "expert": "divides the experts: tokens are exchanged; high saving if most weights are experts'",
}


@dataclass(frozen=True)
class Answer:
    """A question of the decision tree and its answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class Advice:
    """The decision tree, the axes of the best layout, and the matching rows of the guides' tables."""

    tree: tuple[Answer, ...]
    combination: str
    tables: tuple[str, ...]


def advise(search: Search, base: Layout, layouts: list[Layout]) -> Advice:
    """Answers the decision tree. `base` is any layout of the model; `layouts` is the result of the search."""
    sizes = base.sizes
    parameters, _ = total_parameters(sizes)
    single, room = _on_one_gpu(search, sizes), usable_memory(search.device)
    undivided = [layout for layout in layouts if layout.sizes.grid.tensor * layout.sizes.grid.pipeline == 1]
    fitting = [layout for layout in undivided if layout.fits]
    layer_bytes, depth = _layer_bytes(single), sizes.config.model.num_layers
    fits, must = ("yes", "is not required") if layer_bytes < room else ("no", "is required")
    layer = f"{fits}, it takes {binary_size(layer_bytes)}: tensor parallelism {must}"
    deep = f"yes, {depth} layers: consider pipeline parallelism" if depth > _DEEP else f"no, {depth} layers"
    tree = (
        Answer("Does it fit one GPU?", _fits_one(peak_rank_memory(single), room, fitting, search.world)),
        Answer("Does a single layer fit one GPU?", layer),
        Answer(f"Is it deep (more than {_DEEP} layers)?", deep),
    )
    tables = [f"3D table: {row.in_words()}" for row in TABLE_3D if row.covers(parameters)]
    sets = [(name, row) for name, row in SUGGESTED_BY_SIZE.items() if row.covers(parameters)]
    tables += [f"suggested sets, {name}: {row.in_words()}" for name, row in sets]
    size = parameters / BILLION
    tables += [f"table by model: {text}" for low, high, text in BY_FAMILY if low <= size < high]
    return Advice(tree, _combination(layouts), tuple(tables))


def _on_one_gpu(search: Search, sizes: PlanSizes) -> PlanSizes:
    """Returns the model on one GPU, with only those memory savings that the user requested."""
    single, requested = on_one_process(sizes), Settings.defaults(**search.kept)
    values: dict[str, Any] = {} if "recompute_granularity" in search.kept else {"recompute_granularity": None}
    values |= {"optimizer_cpu_offload": requested.optimizer_cpu_offload}
    values |= {"micro_batch_size": requested.micro_batch_size or 1}
    return PlanSizes(with_values(single.config, **values), single.on_gpu)


def _fits_one(unaided: RankMemory, room: float, fitting: list[Layout], world: int) -> str:
    """Answers the first question; `fitting` are the layouts without tensor and pipeline parallelism that
    fit."""
    static = unaided.static.on_device
    passing = f"activations and buffers of a micro-batch {binary_size(unaided.total - static)}"
    needed = f"weights, gradients and optimizer take {binary_size(static)}, {passing}"
    if unaided.total <= room:
        return f"yes, {needed}: data parallelism is enough"
    if fitting:
        ways = [f"data parallelism with ZeRO over {world} GPUs"] if world > 1 else []
        if all(layout.config.memory.recompute_granularity for layout in fitting):
            ways.append("recompute")
        if all(layout.sizes.decisions.optimizer.in_host_memory for layout in fitting):
            ways.append("the optimizer in host memory")
        enough = f"{' and '.join(ways) or 'the requested settings'} {'are' if len(ways) > 1 else 'is'} enough"
        return f"no, {needed}; but {enough}"
    if static <= room:
        return f"no, {needed}: smaller micro-batches (--micro-batch-size), recompute or a division of the model will help"
    return f"no, {needed}: the model must be divided"


def _layer_bytes(single: PlanSizes) -> int:
    """Returns the bytes of the largest layer, undivided, with the activations of a micro-batch."""
    sparse = bool(single.sparse_layers)
    parameters = sum(p.elements for p in single.parameters.layer(min(single.sparse_layers) if sparse else 0))
    # Weights, gradients, master weights unless the weights are fp32, and optimizer state.
    per_parameter = single.element_bytes + FP32 * (1 + (single.element_bytes != FP32) + state_values(single))
    return per_parameter * parameters + layer_activations(single, sparse, frozenset())


def _combination(layouts: list[Layout]) -> str:
    grid = next((layout.sizes.grid for layout in layouts if layout.fits), None)
    if grid is None:
        return ""
    sizes = {"DP": grid.data, "TP": grid.tensor, "PP": grid.pipeline, "CP": grid.context, "EP": grid.expert}
    return " + ".join(name for name, size in sizes.items() if size > 1) or "one GPU"

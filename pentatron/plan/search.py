"""Search over the layouts of a model on a number of devices: which fit, and how fast each is estimated to
be."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pentatron.devices import GIB, Device
from pentatron.errors import ConfigError
from pentatron.plan.memory import Memory, RankMemory, memory_of_shape, peak_rank_memory, with_graphs
from pentatron.plan.shape import Shape
from pentatron.plan.static_memory import static_memory_of
from pentatron.plan.timing import EFFICIENCY, Estimate, estimate
from pentatron.settings.decision_types import DeviceFacts
from pentatron.settings.decisions import decide
from pentatron.settings.resolve import resolve
from pentatron.settings.run_config import RunConfig, table
from pentatron.settings.settings import Draft, Facts, Settings
from pentatron.text import divisors

_CHOSEN = "chosen by pentatron plan"
# Settings that divide devices and layers. The search varies them, also if they are given.
DIVISION_SETTINGS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "data_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "pipeline_model_parallel_layout",
)
# Settings of how a division is run. The search chooses those that are not given, and keeps the others.
EXECUTION_SETTINGS = (
    "sequence_parallel",
    "zero_stage",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "recompute_granularity",
    "micro_batch_size",
    "optimizer_cpu_offload",
    "pipeline_schedule",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "num_distributed_optimizer_instances",
)
LAYOUT_SETTINGS = (*DIVISION_SETTINGS, *EXECUTION_SETTINGS)
_LONGEST_PIPELINE = 64
# Below this sequence length context parallelism costs more than it saves.
_LONG_SEQUENCE = 16384
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
# Matmuls are not faster with more tokens than this in a micro-batch.
_ENOUGH_TOKENS = 8192
# ZeRO stage, recompute granularity and optimizer offload, roughly in the order of their cost in time.
_REMEDIES: tuple[tuple[int, str | None, bool], ...] = (
    (1, None, False),
    (1, "selective", False),
    (2, None, False),
    (1, "full", False),
    (3, None, False),
    (3, "full", False),
    (2, "full", True),
)
# Reserved for torch, the driver and NCCL, and for fragmentation.
_OVERHEAD, _USABLE = GIB, 0.95


def usable_memory(device: Device) -> float:
    """Returns how much of a device's memory a layout may fill."""
    return device.memory * _USABLE - (_OVERHEAD if device.memory > 4 * _OVERHEAD else 0)


@dataclass(frozen=True)
class Layout:
    """A configuration with its memory and estimated time.

    `settings` are those the search chose, as far as they differ from the defaults. `host_memory` is that of a
    machine in bytes, if known.
    """

    shape: Shape
    settings: Mapping[str, Any]
    device: Device
    per_machine: int
    efficiency: float
    host_memory: float | None = None

    @property
    def config(self) -> RunConfig:
        return self.shape.config

    @cached_property
    def memory(self) -> Memory:
        return memory_of_shape(self.shape)

    @cached_property
    def largest(self) -> RankMemory:
        return peak_rank_memory(self.shape)

    @cached_property
    def estimate(self) -> Estimate:
        return estimate(self.shape, self.device, self.per_machine, self.efficiency)

    @cached_property
    def fits(self) -> bool:
        return self.largest.total <= usable_memory(self.device) and not self.lacks_host_memory

    @cached_property
    def with_graphs(self) -> RankMemory | None:
        """The memory of the rank with CUDA graphs, if `--cuda-graphs auto` would capture its micro-batches
        and there is room for them."""
        peak = self.device.peak(self.shape.width) / 1e12
        if (
            not self.device.is_gpu
            or not decide(self.config, DeviceFacts("cuda", peak=peak)).graphs.if_memory_allows
        ):
            return None
        memory = peak_rank_memory(self.shape.with_config(with_graphs(self.config)))
        return memory if memory.total <= usable_memory(self.device) else None

    @property
    def machine_host_bytes(self) -> int:
        """Host memory in bytes that the processes of one machine need."""
        if not (self.shape.decisions.offload.on or self.config.checkpoint.async_save):
            return 0
        largest = max(static_memory_of(self.shape, rank).in_host for rank in self.shape.representative_ranks)
        return largest * min(self.per_machine, self.shape.grid.world_size)

    @property
    def lacks_host_memory(self) -> bool:
        return self.host_memory is not None and self.machine_host_bytes > self.host_memory

    @property
    def sizes(self) -> tuple[int, ...]:
        grid = self.shape.grid
        return grid.tensor, grid.pipeline, grid.context, grid.expert


@dataclass(frozen=True)
class Search:
    """Searches layouts of the model in `draft` on `world` devices in machines of `per_machine`.

    `free_batch`: no batch size is given, so that micro-batches have one sample. `host_memory` is that of a
    machine in bytes, if given.
    """

    draft: Draft
    device: Device
    world: int
    per_machine: int
    efficiency: float = EFFICIENCY
    free_batch: bool = False
    host_memory: float | None = None

    @cached_property
    def kept(self) -> dict[str, Any]:
        """The given settings of how a division is run, which all layouts keep."""
        return {name: getattr(self.draft, name) for name in EXECUTION_SETTINGS if self.draft.given(name)}

    @property
    def facts(self) -> Facts:
        return Facts(self.world, min(self.world, self.per_machine))

    def as_given(self) -> Layout:
        """Returns the layout that the user wrote, completed as for training."""
        draft = self.draft.copy()
        if self.free_batch and not draft.given("micro_batch_size"):
            draft.assign(f"file {_CHOSEN}", micro_batch_size=1)
        config = resolve(draft, self.facts, built_only=False).config
        given = {name: getattr(draft, name) for name in LAYOUT_SETTINGS if draft.given(name)}
        return self._layout(Shape(config, on_gpu=self.device.is_gpu), given)

    def layouts(self) -> list[Layout]:
        """Returns the best layout of every division: those that fit, fastest first, then the others, smallest
        first."""
        best: dict[tuple[int, ...], Layout] = {}
        for sizes in self._divisions():
            for layout in self._variants(sizes):
                best_so_far = best.get(layout.sizes)
                if best_so_far is None or _sort_key(layout) < _sort_key(best_so_far):
                    best[layout.sizes] = layout
        return sorted((layout for layout in best.values() if self._is_sound(layout)), key=_sort_key)

    def _layout(self, shape: Shape, settings: Mapping[str, Any]) -> Layout:
        return Layout(shape, settings, self.device, self.per_machine, self.efficiency, self.host_memory)

    def _divisions(self) -> Iterator["_Sizes"]:
        """Yields the sizes of the axes that divide the devices; the rules may still refuse them."""
        draft = self.draft
        experts = draft.num_experts or 1
        is_long = draft.seq_length >= _LONG_SEQUENCE
        # Expert parallelism across machines would send every token through the network.
        most_experts = max(self.per_machine, 8)
        heads = draft.num_attention_heads
        for tensor in divisors(self.world):
            # If the number of heads is derived from the width, the rules check it.
            if tensor > self.per_machine or (heads is not None and heads % tensor):
                continue
            for pipeline in divisors(self.world // tensor):
                if pipeline > min(_LONGEST_PIPELINE, draft.num_layers):
                    continue
                rest = self.world // tensor // pipeline
                for context in [n for n in divisors(rest) if n == 1 or (is_long and n <= self.per_machine)]:
                    for expert in [
                        n for n in divisors(experts) if n <= most_experts and rest * tensor % n == 0
                    ]:
                        yield _Sizes(tensor, pipeline, context, expert)

    def _variants(self, sizes: "_Sizes") -> Iterator[Layout]:
        """Yields layouts of a division with different micro-batches and virtual stages, each with the first
        remedy that fits."""
        layers = self.draft.num_layers // sizes.pipeline
        virtuals = [v for v in (1, 2, 4) if v == 1 or (sizes.pipeline > 1 and layers >= v)]
        for virtual in virtuals:
            resolved = self._resolved_division(dataclasses.replace(sizes, virtual=virtual))
            if resolved is None:
                continue
            shape, chosen = Shape(resolved[0], on_gpu=self.device.is_gpu), resolved[1]
            for micro in self._micro_batches(shape.config):
                layout = self._first_that_fits(shape, chosen, micro)
                yield layout
                if not layout.fits:
                    # Larger micro-batches do not fit either.
                    break

    def _resolved_division(self, sizes: "_Sizes") -> tuple[RunConfig, dict[str, Any]] | None:
        settings = sizes.settings()
        if sizes.tensor > 1:
            settings |= {"sequence_parallel": True}
            settings |= {"expert_tensor_parallel_size": 1} if self.draft.num_experts else {}
        if self.world // sizes.tensor // sizes.pipeline > 1:
            settings |= self._data_parallel(1)
        settings = {**settings, "micro_batch_size": 1, **self.kept}
        try:
            return self._resolve(settings), settings
        except (ConfigError, ValueError):
            return None

    def _resolve(self, settings: Mapping[str, Any]) -> RunConfig:
        draft = self.draft.copy()
        defaults = {name: table()[name].default for name in LAYOUT_SETTINGS if name not in self.kept}
        draft.assign("default", **defaults)
        draft.assign(f"file {_CHOSEN}", **settings)
        return resolve(draft, self.facts, built_only=False).config

    def _micro_batches(self, config: RunConfig) -> list[int]:
        if self.draft.given("micro_batch_size"):
            return [config.train.micro_batch_size]
        samples = config.train.global_batch_size // config.grid.data
        ranks = config.grid.pipeline
        length = config.model.seq_length // config.grid.context
        return [
            n
            for n in _MICRO_BATCHES
            if samples % n == 0
            and (ranks == 1 or samples // n >= ranks)
            and (n == 1 or n * length <= _ENOUGH_TOKENS)
        ] or [1]

    def _first_that_fits(self, base: Shape, chosen: Mapping[str, Any], micro: int) -> Layout:
        """Returns the layout with the fastest remedy that makes it fit, or the smallest layout if none
        does."""
        layouts: list[Layout] = []
        for remedy in self._remedies(chosen):
            settings = {**chosen, **remedy, "micro_batch_size": micro}
            layout = self._layout(base.with_config(_changed(base.config, settings)), settings)
            layouts.append(layout)
            # Later remedies are slower, except that ZeRO 2 or 3 may be faster than recompute.
            if layout.fits and Settings.defaults(**remedy).recompute_granularity is None:
                break
        return min(layouts, key=_sort_key)

    def _remedies(self, chosen: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the settings of the remedies that are consistent with the given settings."""
        axes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
        has_replicas = self.world > math.prod(chosen.get(name, 1) for name in axes)
        remedies: list[dict[str, Any]] = []
        for stage, recompute, offload in _REMEDIES:
            if stage > 1 and not has_replicas and not offload:
                continue
            settings = self._data_parallel(stage) if has_replicas else {}
            settings |= {"recompute_granularity": recompute} if recompute is not None else {}
            settings |= {"optimizer_cpu_offload": True} if offload else {}
            settings |= self.kept
            values = Settings.defaults(**settings)
            if settings not in remedies and not (values.zero_stage == 3 and values.optimizer_cpu_offload):
                remedies.append(settings)
        return remedies or [dict(self.kept)]

    def _data_parallel(self, stage: int) -> dict[str, Any]:
        """Returns the given ZeRO stage, or `stage`, with overlap: ZeRO 3 always overlaps, and ZeRO 0 gathers
        nothing."""
        stage = self.draft.zero_stage if "zero_stage" in self.kept else stage
        return {
            "zero_stage": stage,
            "overlap_grad_reduce": stage < 3,
            "overlap_param_gather": stage in (1, 2),
        }

    def _is_sound(self, layout: Layout) -> bool:
        """Whether the rules accept the layout with all its settings."""
        try:
            self._resolve(layout.settings)
        except ConfigError:
            return False
        return True


def _sort_key(layout: Layout) -> tuple[float, ...]:
    """Sort key of a layout; smaller is better."""
    if not layout.fits:
        return 1.0, layout.largest.total
    return (
        0.0,
        float(layout.shape.decisions.offload.on),
        round(layout.estimate.seconds, 4),
        layout.shape.grid.model_size,
    )


@dataclass(frozen=True)
class _Sizes:
    """Sizes of the axes that divide the model."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    virtual: int = 1

    def settings(self) -> dict[str, Any]:
        """Returns the settings that differ from one process."""
        sizes = {
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "context_parallel_size": self.context,
            "expert_model_parallel_size": self.expert,
            "virtual_pipeline_model_parallel_size": self.virtual,
        }
        return {name: size for name, size in sizes.items() if size != 1}


def _changed(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """Returns the configuration with other remedies, equal to what resolving it again would return."""
    values, granularity = dict(settings), Settings.defaults(**settings).recompute_granularity
    if granularity != config.memory.recompute_granularity:
        defaults: dict[str | None, dict[str, Any]] = {
            "selective": {"recompute_modules": ("core_attn",)},
            "full": {"recompute_method": "uniform", "recompute_num_layers": 1},
        }
        values = {**defaults.get(granularity, {}), **values}
    parts = {}
    for section in ("parallel", "memory", "train"):
        part = getattr(config, section)
        names = {f.name for f in dataclasses.fields(part)}
        parts[section] = dataclasses.replace(part, **{n: v for n, v in values.items() if n in names})
    return dataclasses.replace(config, **parts)

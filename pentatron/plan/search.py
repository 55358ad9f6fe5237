"""Search over the layouts of a model on a number of devices: which fit, and how fast each is estimated to
be."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pentatron.devices import GIB, Device
from pentatron.errors import ConfigError
from pentatron.plan.memory import Memory, RankMemory, memory_of_sizes, peak_rank_memory
from pentatron.plan.sizes import PlanSizes, with_values
from pentatron.plan.static_memory import static_memory_of
from pentatron.plan.timing import EFFICIENCY, Estimate, estimate
from pentatron.settings.decision_types import DeviceFacts
from pentatron.settings.decisions import decide
from pentatron.settings.resolve import resolve
from pentatron.settings.run_config import RunConfig, all_settings
from pentatron.settings.settings import Draft, ProcessFacts, Settings
from pentatron.text import divisors

_CHOSEN = "chosen by pentatron plan"
# Settings that divide devices and layers. The search varies them, also if they are given.
DIVISION_SETTINGS = """
    tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    context_parallel_size expert_model_parallel_size expert_tensor_parallel_size data_parallel_size
    num_layers_per_virtual_pipeline_stage pipeline_model_parallel_layout
    """.split()
# Settings of how a division is run. The search chooses those that are not given, and keeps the others.
EXECUTION_SETTINGS = """
    sequence_parallel zero_stage overlap_grad_reduce overlap_param_gather recompute_granularity micro_batch_size
    optimizer_cpu_offload pipeline_schedule recompute_method recompute_num_layers recompute_modules
    num_distributed_optimizer_instances
    """.split()
LAYOUT_SETTINGS = (*DIVISION_SETTINGS, *EXECUTION_SETTINGS)
# The sizes that the search chooses, in the order in which they are written.
_SIZES = """
    tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
    virtual_pipeline_model_parallel_size
    """.split()
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

    `settings` are those the search chose, as far as they differ from the defaults.
    """

    sizes: PlanSizes
    settings: Mapping[str, Any]
    search: "Search"

    @property
    def config(self) -> RunConfig:
        return self.sizes.config

    @cached_property
    def memory(self) -> Memory:
        return memory_of_sizes(self.sizes)

    @cached_property
    def largest(self) -> RankMemory:
        return peak_rank_memory(self.sizes)

    @cached_property
    def estimate(self) -> Estimate:
        return estimate(self.sizes, self.search.device, self.search.per_machine, self.search.efficiency)

    @cached_property
    def fits(self) -> bool:
        return self.largest.total <= usable_memory(self.search.device) and not self.lacks_host_memory

    @cached_property
    def with_graphs(self) -> RankMemory | None:
        """The memory of the rank with CUDA graphs, if `--cuda-graphs auto` would capture its micro-batches
        and there is room for them."""
        device = self.search.device
        facts = DeviceFacts("cuda", peak=device.peak(self.sizes.element_bytes) / 1e12)
        if not device.is_gpu or not decide(self.config, facts).graphs.if_memory_allows:
            return None
        memory = peak_rank_memory(self.sizes.with_config(with_values(self.config, cuda_graphs="on")))
        return memory if memory.total <= usable_memory(device) else None

    @property
    def machine_host_bytes(self) -> int:
        """Host memory in bytes that the processes of one machine need."""
        if not (self.sizes.decisions.optimizer.in_host_memory or self.config.checkpoint.async_save):
            return 0
        largest = max(static_memory_of(self.sizes, rank).in_host for rank in self.sizes.representative_ranks)
        return largest * min(self.search.per_machine, self.sizes.grid.world_size)

    @property
    def lacks_host_memory(self) -> bool:
        host = self.search.host_memory
        return host is not None and self.machine_host_bytes > host


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
    def facts(self) -> ProcessFacts:
        return ProcessFacts(self.world, min(self.world, self.per_machine))

    def given_layout(self) -> Layout:
        """Returns the layout that the user wrote, completed as for training."""
        draft = self.draft.copy()
        if self.free_batch and not draft.given("micro_batch_size"):
            draft.assign(f"file {_CHOSEN}", micro_batch_size=1)
        config = resolve(draft, self.facts, refuse_unimplemented=False).config
        given = {name: getattr(draft, name) for name in LAYOUT_SETTINGS if draft.given(name)}
        return Layout(PlanSizes(config, self.device.is_gpu), given, self)

    def layouts(self) -> list[Layout]:
        """Returns the best layout of every division: those that fit, fastest first, then the others, smallest
        first."""
        found = [layout for division in self._divisions() if (layout := self._best(*division)) is not None]
        return sorted((layout for layout in found if self._resolved(layout.settings)), key=_sort_key)

    def _divisions(self) -> Iterator[tuple[int, int, int, int]]:
        """Yields the tensor, pipeline, context and expert sizes that divide the devices; the rules may still
        refuse them."""
        draft = self.draft
        longest_pipeline = min(_LONGEST_PIPELINE, draft.num_layers)
        most_context = self.per_machine if draft.seq_length >= _LONG_SEQUENCE else 1
        # Expert parallelism across machines would send every token through the network.
        most_experts = max(self.per_machine, 8)
        heads = draft.num_attention_heads
        for tensor in divisors(self.world):
            # If the number of heads is derived from the width, the rules check it.
            if tensor > self.per_machine or (heads is not None and heads % tensor):
                continue
            for pipeline in divisors(self.world // tensor):
                rest = self.world // tensor // pipeline
                contexts = [n for n in divisors(rest) if n <= most_context]
                experts = [n for n in divisors(draft.num_experts or 1) if n <= most_experts]
                if pipeline <= longest_pipeline:
                    for context, expert in itertools.product(contexts, experts):
                        if rest * tensor % expert == 0:
                            yield tensor, pipeline, context, expert

    def _best(self, tensor: int, pipeline: int, context: int, expert: int) -> Layout | None:
        """Returns the best layout of a division among those with different micro-batches and virtual stages,
        each with the first remedy that fits; None if the rules refuse all."""
        layers = self.draft.num_layers // pipeline
        layouts: list[Layout] = []
        for virtual in [v for v in (1, 2, 4) if v == 1 or (pipeline > 1 and layers >= v)]:
            axes = zip(_SIZES, (tensor, pipeline, context, expert, virtual))
            chosen: dict[str, Any] = {name: size for name, size in axes if size != 1}
            if tensor > 1:
                chosen["sequence_parallel"] = True
                chosen |= {"expert_tensor_parallel_size": 1} if self.draft.num_experts else {}
            if self.world // tensor // pipeline > 1:
                chosen |= self._data_parallel(1)
            chosen = {**chosen, "micro_batch_size": 1, **self.kept}
            if (config := self._resolved(chosen)) is None:
                continue
            sizes = PlanSizes(config, self.device.is_gpu)
            for micro in self._micro_batches(config):
                layouts.append(self._first_that_fits(sizes, chosen, micro))
                if not layouts[-1].fits:
                    # Larger micro-batches do not fit either.
                    break
        return min(layouts, key=_sort_key, default=None)

    def _resolved(self, settings: Mapping[str, Any]) -> RunConfig | None:
        """Returns the configuration with these settings of a layout; None if the rules refuse it."""
        draft = self.draft.copy()
        defaults = {name: all_settings()[name].default for name in LAYOUT_SETTINGS if name not in self.kept}
        draft.assign("default", **defaults)
        draft.assign(f"file {_CHOSEN}", **settings)
        try:
            return resolve(draft, self.facts, refuse_unimplemented=False).config
        except (ConfigError, ValueError):
            return None

    def _micro_batches(self, config: RunConfig) -> list[int]:
        if self.draft.given("micro_batch_size"):
            return [config.train.micro_batch_size]
        samples = config.train.global_batch_size // config.grid.data
        ranks, length = config.grid.pipeline, config.model.seq_length // config.grid.context
        sizes = [n for n in _MICRO_BATCHES if n == 1 or n * length <= _ENOUGH_TOKENS]
        return [n for n in sizes if samples % n == 0 and (ranks == 1 or samples // n >= ranks)] or [1]

    def _first_that_fits(self, base: PlanSizes, chosen: Mapping[str, Any], micro: int) -> Layout:
        """Returns the layout with the fastest remedy that makes it fit, or the smallest layout if none
        does."""
        layouts: list[Layout] = []
        for remedy in self._remedies(chosen):
            settings = {**chosen, **remedy, "micro_batch_size": micro}
            layouts.append(Layout(base.with_config(_changed(base.config, settings)), settings, self))
            # Later remedies are slower, except that ZeRO 2 or 3 may be faster than recompute.
            if layouts[-1].fits and Settings.defaults(**remedy).recompute_granularity is None:
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
        overlap = {"overlap_grad_reduce": stage < 3, "overlap_param_gather": stage in (1, 2)}
        return {"zero_stage": stage, **overlap}


def _sort_key(layout: Layout) -> tuple[float, ...]:
    """Sort key of a layout; smaller is better."""
    if not layout.fits:
        return 1.0, layout.largest.total
    offloads = float(layout.sizes.decisions.optimizer.in_host_memory)
    return 0.0, offloads, round(layout.estimate.seconds, 4), layout.sizes.grid.model_size


def _changed(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """Returns the configuration with other remedies, equal to what resolving it again would return."""
    values, granularity = dict(settings), Settings.defaults(**settings).recompute_granularity
    if granularity != config.memory.recompute_granularity:
        defaults: dict[str, Any] = {"recompute_modules": ("core_attn",)} if granularity == "selective" else {}
        if granularity == "full":
            defaults = {"recompute_method": "uniform", "recompute_num_layers": 1}
        values = {**defaults, **values}
    return with_values(config, **values)

"""Which layouts a model can have on a number of devices, which of them fit, and how fast each would be."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pentatron.devices import GIB, Device
from pentatron.errors import ConfigError
from pentatron.plan.memory import Memory, RankMemory, largest_of, memory_of_shape, recorded
from pentatron.plan.shape import Shape
from pentatron.plan.static_memory import held
from pentatron.plan.timing import EFFICIENCY, Estimate, estimate
from pentatron.settings.decision_types import DeviceFacts
from pentatron.settings.decisions import decide
from pentatron.settings.resolve import resolve
from pentatron.settings.run import RunConfig, table
from pentatron.settings.settings import Draft, Facts, Settings
from pentatron.text import divisors

_CHOSEN = "chosen by pentatron plan"
# How devices and layers are divided: a plan tries other sizes than those given.
SIZES = (
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
# How a division is run: a plan chooses what is not given, and keeps what is.
MANNERS = (
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
LAYOUT = (*SIZES, *MANNERS)
_LONGEST_PIPELINE = 64
# Below this length splitting sequences costs more than it saves.
_LONG = 16384
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
# Micro-batches with more make matmuls no faster.
_ENOUGH_TOKENS = 8192
# ZeRO stage, recompute, and whether the optimizer's state is in host memory.
_REMEDIES: tuple[tuple[int, str | None, bool], ...] = (
    (1, None, False),
    (1, "selective", False),
    (2, None, False),
    (1, "full", False),
    (3, None, False),
    (3, "full", False),
    (2, "full", True),
)
# For what torch, the driver and NCCL take, and for gaps between tensors.
_OVERHEAD, _USABLE = GIB, 0.95


def usable(device: Device) -> float:
    """What of a device's memory a plan may fill."""
    return device.memory * _USABLE - (_OVERHEAD if device.memory > 4 * _OVERHEAD else 0)


@dataclass(frozen=True)
class Layout:
    """`settings` are those a plan chose, as they differ from the defaults. `host_memory`: bytes of a machine, where they are
    known."""

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
        return largest_of(self.shape)

    @cached_property
    def estimate(self) -> Estimate:
        return estimate(self.shape, self.device, self.per_machine, self.efficiency)

    @cached_property
    def fits(self) -> bool:
        return self.largest.total <= usable(self.device) and not self.lacks_host_memory

    @cached_property
    def if_recorded(self) -> RankMemory | None:
        """The memory of the one rank whose micro-batches would be recorded unasked, if there is room for that."""
        peak = self.device.peak(self.shape.width) / 1e12
        if not self.device.is_gpu or not decide(self.config, DeviceFacts("cuda", peak=peak)).graphs.if_room:
            return None
        found = largest_of(self.shape.alike(recorded(self.config)))
        return found if found.total <= usable(self.device) else None

    @property
    def host_of_a_machine(self) -> int:
        """Bytes of a machine's own memory, for what its devices keep there."""
        if not (self.shape.decisions.offload.on or self.config.checkpoint.async_save):
            return 0
        each = max(held(self.shape, rank).in_host for rank in self.shape.telling_ranks)
        return each * min(self.per_machine, self.shape.grid.world_size)

    @property
    def lacks_host_memory(self) -> bool:
        return self.host_memory is not None and self.host_of_a_machine > self.host_memory

    @property
    def sizes(self) -> tuple[int, ...]:
        grid = self.shape.grid
        return grid.tensor, grid.pipeline, grid.context, grid.expert


@dataclass(frozen=True)
class Search:
    """`draft` is what the user wrote, `world` devices of one kind in machines of `per_machine`. `free_batch`: nobody said how
    large a batch is, so that its pieces are as small as can be. `host_memory`: bytes of a machine, if somebody said."""

    draft: Draft
    device: Device
    world: int
    per_machine: int
    efficiency: float = EFFICIENCY
    free_batch: bool = False
    host_memory: float | None = None

    @cached_property
    def kept(self) -> dict[str, Any]:
        """What the user said of how a layout is run: so it is in all that are tried."""
        return {name: getattr(self.draft, name) for name in MANNERS if self.draft.given(name)}

    @property
    def facts(self) -> Facts:
        return Facts(self.world, min(self.world, self.per_machine))

    def as_given(self) -> Layout:
        """The layout that the user wrote, completed as training would."""
        draft = self.draft.copy()
        if self.free_batch and not draft.given("micro_batch_size"):
            draft.assign(f"file {_CHOSEN}", micro_batch_size=1)
        config = resolve(draft, self.facts, built_only=False).config
        given = {name: getattr(draft, name) for name in LAYOUT if draft.given(name)}
        return self._layout(Shape(config, on_gpu=self.device.is_gpu), given)

    def layouts(self) -> list[Layout]:
        """The best of every division of the devices: those that fit, the fastest first, then the others, the smallest first."""
        best: dict[tuple[int, ...], Layout] = {}
        for sizes in self._divisions():
            for layout in self._variants(sizes):
                before = best.get(layout.sizes)
                if before is None or _rank(layout) < _rank(before):
                    best[layout.sizes] = layout
        return sorted((found for found in best.values() if self._is_sound(found)), key=_rank)

    def _layout(self, shape: Shape, settings: Mapping[str, Any]) -> Layout:
        return Layout(shape, settings, self.device, self.per_machine, self.efficiency, self.host_memory)

    def _divisions(self) -> Iterator["_Sizes"]:
        """Sizes of the axes that divide the devices; a rule may still refuse one."""
        draft = self.draft
        experts = draft.num_experts or 1
        long = draft.seq_length >= _LONG
        # Experts divided over several machines send every token through the network.
        most_holders = max(self.per_machine, 8)
        heads = draft.num_attention_heads
        for tensor in divisors(self.world):
            # Heads that follow from the width are the rules' business.
            if tensor > self.per_machine or (heads is not None and heads % tensor):
                continue
            for pipeline in divisors(self.world // tensor):
                if pipeline > min(_LONGEST_PIPELINE, draft.num_layers):
                    continue
                rest = self.world // tensor // pipeline
                for context in [n for n in divisors(rest) if n == 1 or (long and n <= self.per_machine)]:
                    for expert in [
                        n for n in divisors(experts) if n <= most_holders and rest * tensor % n == 0
                    ]:
                        yield _Sizes(tensor, pipeline, context, expert)

    def _variants(self, sizes: "_Sizes") -> Iterator[Layout]:
        """Micro-batches, virtual stages and remedies for a division of the devices: no more of a remedy than is needed."""
        most = self.draft.num_layers // sizes.pipeline
        virtuals = [v for v in (1, 2, 4) if v == 1 or (sizes.pipeline > 1 and most >= v)]
        for virtual in virtuals:
            base = self._resolved(dataclasses.replace(sizes, virtual=virtual))
            if base is None:
                continue
            shape, chosen = Shape(base[0], on_gpu=self.device.is_gpu), base[1]
            for micro in self._micro_batches(shape.config):
                found = self._first_that_fits(shape, chosen, micro)
                yield found
                if not found.fits:
                    # Nor will a larger one.
                    break

    def _resolved(self, sizes: "_Sizes") -> tuple[RunConfig, dict[str, Any]] | None:
        chosen = sizes.settings()
        if sizes.tensor > 1:
            chosen |= {"sequence_parallel": True}
            chosen |= {"expert_tensor_parallel_size": 1} if self.draft.num_experts else {}
        if self.world // sizes.tensor // sizes.pipeline > 1:
            chosen |= _overlapped(self._zero_stage(1))
        chosen = {**chosen, "micro_batch_size": 1, **self.kept}
        draft = self._without_layout()
        for name, value in chosen.items():
            draft.assign(f"file {_CHOSEN}", **{name: value})
        try:
            return resolve(draft, self.facts, built_only=False).config, chosen
        except (ConfigError, ValueError):
            return None

    def _without_layout(self) -> Draft:
        draft = self.draft.copy()
        for name in LAYOUT:
            if name not in self.kept:
                draft.assign("default", **{name: table()[name].default})
        return draft

    def _micro_batches(self, config: RunConfig) -> list[int]:
        if self.draft.given("micro_batch_size"):
            return [config.train.micro_batch_size]
        each = config.train.global_batch_size // config.grid.data
        ranks = config.grid.pipeline
        length = config.model.seq_length // config.grid.context
        return [
            n
            for n in _MICRO_BATCHES
            if each % n == 0
            and (ranks == 1 or each // n >= ranks)
            and (n == 1 or n * length <= _ENOUGH_TOKENS)
        ] or [1]

    def _first_that_fits(self, base: Shape, chosen: Mapping[str, Any], micro: int) -> Layout:
        """With the remedy that costs least time of those that make it fit; else the smallest."""
        found: list[Layout] = []
        for remedy in self._remedies(chosen):
            settings = {**chosen, **remedy, "micro_batch_size": micro}
            layout = self._layout(base.alike(_changed(base.config, settings)), settings)
            found.append(layout)
            # What follows is slower, but for the choice between recompute and dividing more.
            if layout.fits and Settings.defaults(**remedy).recompute_granularity is None:
                break
        return min(found, key=_rank)

    def _remedies(self, chosen: Mapping[str, Any]) -> list[dict[str, Any]]:
        """As far as the user left them open."""
        model = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
        divided = self.world > math.prod(chosen.get(name, 1) for name in model)
        found: list[dict[str, Any]] = []
        for stage, recompute, offload in _REMEDIES:
            if stage > 1 and not divided and not offload:
                continue
            settings = _overlapped(self._zero_stage(stage)) if divided else {}
            settings |= {"recompute_granularity": recompute} if recompute is not None else {}
            settings |= {"optimizer_cpu_offload": True} if offload else {}
            settings |= self.kept
            made = Settings.defaults(**settings)
            if settings not in found and not (made.zero_stage == 3 and made.optimizer_cpu_offload):
                found.append(settings)
        return found or [dict(self.kept)]

    def _zero_stage(self, otherwise: int) -> int:
        """The stage that the user asked for."""
        return self.draft.zero_stage if "zero_stage" in self.kept else otherwise

    def _is_sound(self, layout: Layout) -> bool:
        """Asks the rules once more, with everything that was chosen."""
        draft = self._without_layout()
        for name, value in layout.settings.items():
            draft.assign(f"file {_CHOSEN}", **{name: value})
        try:
            resolve(draft, self.facts, built_only=False)
        except ConfigError:
            return False
        return True


def _rank(layout: Layout) -> tuple[float, ...]:
    """Smaller is better."""
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
    """How the model is divided."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    virtual: int = 1

    def settings(self) -> dict[str, Any]:
        """The settings that differ from one process."""
        sizes = {
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "context_parallel_size": self.context,
            "expert_model_parallel_size": self.expert,
            "virtual_pipeline_model_parallel_size": self.virtual,
        }
        return {name: size for name, size in sizes.items() if size != 1}


def _overlapped(stage: int) -> dict[str, Any]:
    """A ZeRO stage with what it can hide: ZeRO 3 always does, and ZeRO 0 gathers nothing."""
    return {
        "zero_stage": stage,
        "overlap_grad_reduce": stage < 3,
        "overlap_param_gather": stage in (1, 2),
    }


def _changed(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The configuration with other remedies, as resolving it anew would make it."""
    values, kind = dict(settings), Settings.defaults(**settings).recompute_granularity
    if kind != config.memory.recompute_granularity:
        of_kind: dict[str | None, dict[str, Any]] = {
            "selective": {"recompute_modules": ("core_attn",)},
            "full": {"recompute_method": "uniform", "recompute_num_layers": 1},
        }
        values = {**of_kind.get(kind, {}), **values}
    parts = {}
    for section in ("parallel", "memory", "train"):
        part = getattr(config, section)
        names = {f.name for f in dataclasses.fields(part)}
        parts[section] = dataclasses.replace(part, **{n: v for n, v in values.items() if n in names})
    return dataclasses.replace(config, **parts)

"""Which layouts a model can have on a number of devices, which of them fit, and how fast each would be."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pentatron.config.draft import Draft, Facts
from pentatron.config.errors import ConfigError
from pentatron.config.flags import Assigned
from pentatron.config.resolve import resolve
from pentatron.config.run import RunConfig, table
from pentatron.layout.divisors import divisors
from pentatron.plan.devices import GIB, Device
from pentatron.plan.memory import Memory, RankMemory, largest_of, memory_of_shape
from pentatron.plan.shape import Shape
from pentatron.plan.timing import EFFICIENCY, Estimate, estimate

_CHOSEN = "chosen by pentatron plan"
# What a plan chooses; everything else is the user's.
CHOICES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "zero_stage",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "recompute_granularity",
    "micro_batch_size",
    "optimizer_cpu_offload",
)
# Further settings of a layout: they say how it is run, and stay as they are given.
_OF_A_LAYOUT = (
    "data_parallel_size",
    "pipeline_schedule",
    "num_layers_per_virtual_pipeline_stage",
    "pipeline_model_parallel_layout",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "num_distributed_optimizer_instances",
)
LAYOUT = (*CHOICES, *_OF_A_LAYOUT)
_LONGEST_PIPELINE = 64
# Below this length splitting sequences costs more than it saves.
_LONG = 16384
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
# Micro-batches with more make matmuls no faster.
_ENOUGH_TOKENS = 8192
_REMEDIES: tuple[tuple[int, str | None], ...] = (
    (1, None),
    (1, "selective"),
    (2, None),
    (1, "full"),
    (3, None),
    (3, "full"),
)
# For what torch, the driver and NCCL take, and for gaps between tensors.
_OVERHEAD, _USABLE = GIB, 0.95


def usable(device: Device) -> float:
    """What of a device's memory a plan may fill."""
    return device.memory * _USABLE - (_OVERHEAD if device.memory > 4 * _OVERHEAD else 0)


@dataclass(frozen=True)
class Layout:
    """`settings` are those a plan chose, as they differ from the defaults."""

    shape: Shape
    settings: Mapping[str, Any]
    device: Device
    per_machine: int
    efficiency: float

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
        return self.largest.total <= usable(self.device)

    @property
    def sizes(self) -> tuple[int, ...]:
        grid = self.shape.grid
        return grid.tensor, grid.pipeline, grid.context, grid.expert


@dataclass(frozen=True)
class Search:
    """`draft` is what the user wrote, `world` devices of one kind in machines of `per_machine`. `free_batch`: nobody said how
    large a batch is, so that its pieces are as small as can be."""

    draft: Draft
    device: Device
    world: int
    per_machine: int
    efficiency: float = EFFICIENCY
    free_batch: bool = False

    @property
    def facts(self) -> Facts:
        return Facts(self.world, min(self.world, self.per_machine))

    def as_given(self) -> Layout:
        """The layout that the user wrote, completed as training would."""
        draft = _copy(self.draft)
        if self.free_batch and not draft.given("micro_batch_size"):
            draft.values["micro_batch_size"] = Assigned(1, f"file {_CHOSEN}")
        config = resolve(draft, self.facts, built_only=False).config
        given = {name: draft[name] for name in LAYOUT if draft.given(name)}
        return self._layout(Shape(config), given)

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
        return Layout(shape, settings, self.device, self.per_machine, self.efficiency)

    def _divisions(self) -> Iterator[dict[str, int]]:
        """Sizes of the axes that divide the devices; a rule may still refuse one."""
        draft = self.draft
        experts = draft["num_experts"] or 1
        long = draft["seq_length"] >= _LONG
        # Experts divided over several machines send every token through the network.
        most_holders = max(self.per_machine, 8)
        for tensor in divisors(self.world):
            if tensor > self.per_machine or (draft["num_attention_heads"] or 1) % tensor:
                continue
            for pipeline in divisors(self.world // tensor):
                if pipeline > min(_LONGEST_PIPELINE, draft["num_layers"]):
                    continue
                rest = self.world // tensor // pipeline
                for context in [n for n in divisors(rest) if n == 1 or (long and n <= self.per_machine)]:
                    for expert in [
                        n for n in divisors(experts) if n <= most_holders and rest * tensor % n == 0
                    ]:
                        yield {
                            "tensor_model_parallel_size": tensor,
                            "pipeline_model_parallel_size": pipeline,
                            "context_parallel_size": context,
                            "expert_model_parallel_size": expert,
                        }

    def _variants(self, sizes: Mapping[str, int]) -> Iterator[Layout]:
        """Micro-batches, virtual stages and remedies for a division of the devices: no more of a remedy than is needed."""
        pipeline = sizes["pipeline_model_parallel_size"]
        most = self.draft["num_layers"] // pipeline
        virtuals = [v for v in (1, 2, 4) if v == 1 or (pipeline > 1 and most >= v)]
        for virtual in virtuals:
            base = self._resolved(
                {**sizes, **({"virtual_pipeline_model_parallel_size": virtual} if virtual > 1 else {})}
            )
            if base is None:
                continue
            shape, chosen = Shape(base[0]), base[1]
            for micro in self._micro_batches(shape.config):
                found = self._first_that_fits(shape, chosen, micro)
                yield found
                if not found.fits:
                    # Nor will a larger one.
                    break

    def _resolved(self, sizes: Mapping[str, Any]) -> tuple[RunConfig, dict[str, Any]] | None:
        chosen = {name: value for name, value in sizes.items() if value not in (1, None)}
        tensor = sizes["tensor_model_parallel_size"]
        copies = self.world // tensor // sizes["pipeline_model_parallel_size"]
        if tensor > 1:
            chosen["sequence_parallel"] = True
            if self.draft["num_experts"]:
                chosen["expert_tensor_parallel_size"] = 1
        if copies > 1:
            chosen |= {"zero_stage": 1, "overlap_grad_reduce": True, "overlap_param_gather": True}
        if not self.draft.given("micro_batch_size"):
            chosen["micro_batch_size"] = 1
        draft = self._without_layout()
        for name, value in chosen.items():
            draft.values[name] = Assigned(value, f"file {_CHOSEN}")
        try:
            return resolve(draft, self.facts, built_only=False).config, chosen
        except (ConfigError, ValueError):
            return None

    def _without_layout(self) -> Draft:
        draft = _copy(self.draft)
        for name in LAYOUT:
            if name != "micro_batch_size" or not self.draft.given(name):
                draft.values[name] = Assigned(table()[name].default, "default")
        return draft

    def _micro_batches(self, config: RunConfig) -> list[int]:
        assert config.train.global_batch_size and config.train.micro_batch_size
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
            settings = {**chosen, **remedy}
            if "micro_batch_size" in chosen:
                settings["micro_batch_size"] = micro
            layout = self._layout(base.alike(_changed(base.config, settings)), settings)
            found.append(layout)
            # What follows is slower, but for the choice between recompute and dividing more.
            if layout.fits and remedy.get("recompute_granularity") is None:
                break
        return min(found, key=_rank)

    def _remedies(self, chosen: Mapping[str, Any]) -> list[dict[str, Any]]:
        divided = "zero_stage" in chosen
        found: list[dict[str, Any]] = []
        for stage, recompute in _REMEDIES:
            if stage > 1 and not divided:
                continue
            settings: dict[str, Any] = {"zero_stage": stage} if divided else {}
            if stage == 3:
                settings |= {"overlap_grad_reduce": False, "overlap_param_gather": False}
            if recompute is not None:
                settings["recompute_granularity"] = recompute
            found.append(settings)
        last = {"zero_stage": 2} if divided else {}
        found.append({**last, "recompute_granularity": "full", "optimizer_cpu_offload": True})
        return found

    def _is_sound(self, layout: Layout) -> bool:
        """Asks the rules once more, with everything that was chosen."""
        draft = self._without_layout()
        for name, value in layout.settings.items():
            draft.values[name] = Assigned(value, f"file {_CHOSEN}")
        try:
            resolve(draft, self.facts, built_only=False)
        except ConfigError:
            return False
        return True


def _rank(layout: Layout) -> tuple[float, ...]:
    """Smaller is better."""
    if not layout.fits:
        return 1.0, layout.largest.total
    offloads = layout.config.parallel.optimizer_cpu_offload
    return 0.0, float(offloads), round(layout.estimate.seconds, 4), layout.shape.grid.model_size


def _copy(draft: Draft) -> Draft:
    return Draft(dict(draft.values), list(draft.notices), dict(draft.wrong))


def _changed(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The configuration with other remedies, as resolving it anew would make it."""
    values = dict(settings)
    if values.get("recompute_granularity") == "selective":
        values["recompute_modules"] = ("core_attn",)
    if values.get("recompute_granularity") == "full":
        values |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    parts = {}
    for section in ("parallel", "memory", "train"):
        part = getattr(config, section)
        names = {f.name for f in dataclasses.fields(part)}
        parts[section] = dataclasses.replace(part, **{n: v for n, v in values.items() if n in names})
    return dataclasses.replace(config, **parts)

"""The frozen configuration of a run by section (`RunConfig`), and the table of all settings."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, TypeVar

from pentatron.layout import schedules
from pentatron.layout.actions import Placement, Schedule
from pentatron.layout.batch import BatchSizeSchedule, accumulation_steps
from pentatron.layout.ranks import Grid
from pentatron.layout.schedules import schedule_problem
from pentatron.layout.stages import StagePart, recompute_groups, stage_parts
from pentatron.settings.declaration import Setting, settings_of
from pentatron.settings.model import KernelConfig, MoEConfig, TransformerConfig, moe_layers
from pentatron.settings.model_sizes import costs_of, division_of, grid_of
from pentatron.settings.output import CheckpointConfig, LogConfig, RunSettings
from pentatron.settings.parallel import LaunchConfig, MemoryConfig, ParallelConfig, PrecisionConfig
from pentatron.settings.run_length import ScheduleLengths, batch_plan_of, schedule_lengths_of
from pentatron.settings.settings import Settings
from pentatron.settings.training import DataConfig, LoopConfig, OptimConfig, TrainConfig
from pentatron.text import divisors, join_choices, redact_value

Section = TypeVar("Section")


@dataclass(frozen=True)
class RunConfig:
    """The resolved configuration of a run. Its sections are frozen dataclasses."""

    run: RunSettings
    model: TransformerConfig
    moe: MoEConfig
    data: DataConfig
    train: TrainConfig
    optim: OptimConfig
    parallel: ParallelConfig
    precision: PrecisionConfig
    memory: MemoryConfig
    kernels: KernelConfig
    checkpoint: CheckpointConfig
    loop: LoopConfig
    log: LogConfig
    launch: LaunchConfig

    @classmethod
    def of(cls, settings: Settings) -> "RunConfig":
        """Freezes resolved settings."""
        return cls(**{name: section_of(section, settings) for name, section in sections().items()})

    @functools.cached_property
    def settings(self) -> Settings:
        """The same settings without sections."""
        return Settings(self.flat())

    @functools.cached_property
    def grid(self) -> Grid:
        return grid_of(self.settings)

    @property
    def virtual_stages(self) -> int:
        """Stages on each pipeline rank."""
        return self.parallel.virtual_pipeline_model_parallel_size or 1

    @functools.cached_property
    def placement(self) -> Placement:
        """Which pipeline rank holds which stage."""
        ranks = self.parallel.pipeline_model_parallel_size
        return schedules.placement_for(self._schedule_kind, ranks, self.virtual_stages)

    @property
    def _schedule_kind(self) -> str:
        """The pipeline schedule. One rank has nothing to overlap and always runs 1F1B."""
        return "1f1b" if self.parallel.pipeline_model_parallel_size == 1 else self.parallel.pipeline_schedule

    @property
    def defers_weight_gradients(self) -> bool:
        """Whether backward is split, with weight gradients computed later."""
        return self._schedule_kind in schedules.SPLITS_BACKWARD

    @property
    def stages(self) -> tuple[StagePart, ...]:
        """The layers, embedding and output layer of each stage, in the order of the model."""
        return stage_parts(self.model.num_layers, division_of(self.settings), costs_of(self.settings))

    def recomputed(self, part: StagePart) -> list[tuple[int, ...]]:
        """Returns the chunks of layers of a stage under full recompute. Each chunk stores its input."""
        if self.memory.recompute_granularity != "full":
            return []
        count = self.memory.recompute_num_layers
        block = self.memory.recompute_method == "block"
        runs, _ = recompute_groups(part.layers, 1 if block else count, count if block else None)
        return [tuple(run) for run in runs]

    def longest_run(self, part: StagePart) -> int:
        """Returns the maximum number of consecutive layers without a recompute boundary between them."""
        runs = [len(run) for run in self.recomputed(part)]
        return max(len(part.layers) - sum(runs), *runs, 0)

    @property
    def layers_with_experts(self) -> tuple[int, ...]:
        """Indices of the layers with experts."""
        if self.moe.num_experts is None:
            return ()
        pattern = moe_layers(self.moe.moe_layer_freq, self.model.num_layers)
        return tuple(number for number, has_experts in enumerate(pattern) if has_experts)

    def schedule(self, micro_batches: int) -> Schedule:
        """Returns the actions of each pipeline rank in a step of this many micro-batches."""
        return schedules.training_schedule(*self.schedule_arguments(micro_batches))

    def schedule_arguments(self, micro_batches: int) -> tuple[str, int, int, int, int | None]:
        """Returns the arguments of `training_schedule` for a step of this many micro-batches."""
        kind, virtual = self._schedule_kind, self.virtual_stages
        group = self.parallel.microbatch_group_size_per_virtual_pipeline_stage
        # A step of a smaller batch may have fewer micro-batches than a group.
        group = min(group, micro_batches) if group and schedules.uses_groups(kind, virtual) else None
        return kind, self.parallel.pipeline_model_parallel_size, virtual, micro_batches, group

    def forward_schedule(self, micro_batches: int) -> Schedule:
        """Returns the actions of each pipeline rank in an evaluation step of this many micro-batches."""
        return schedules.forward_schedule(self.placement, micro_batches)

    @property
    def accumulation(self) -> int:
        """Micro-batches of each data-parallel rank in a step of the global batch size."""
        return self.accumulation_of(self.train.global_batch_size)

    def accumulation_of(self, batch_size: int) -> int:
        """Returns the micro-batches of each data-parallel rank in a step of this many samples."""
        return accumulation_steps(batch_size, self.train.micro_batch_size, self.grid.data)

    @functools.cached_property
    def batch_plan(self) -> BatchSizeSchedule:
        """The batch size of each step."""
        return batch_plan_of(self.settings)

    @property
    def schedule_lengths(self) -> ScheduleLengths:
        """The lengths of the learning rate schedule, in samples."""
        return schedule_lengths_of(self.settings, self.batch_plan)

    @property
    def eval_batch(self) -> tuple[int, int]:
        """Global and micro batch size of an evaluation step."""
        t = self.train
        return t.eval_global_batch_size or t.global_batch_size, t.eval_micro_batch_size or t.micro_batch_size

    @property
    def eval_accumulation(self) -> int:
        """Micro-batches of each data-parallel rank in an evaluation step."""
        return accumulation_steps(*self.eval_batch, self.grid.data)

    def flat(self) -> dict[str, Any]:
        """Returns all settings by name, in the order of the table."""
        return {s.name: getattr(getattr(self, s.section), s.name) for s in all_settings().values()}

    def shared(self) -> dict[str, Any]:
        """Maps flags to the settings that must be equal in all processes: all but the launch section."""
        return {
            item.flag: list(value) if isinstance(value, tuple) else value
            for (name, value), item in zip(self.flat().items(), all_settings().values())
            if item.section != "launch"
        }

    def nested(self) -> dict[str, dict[str, Any]]:
        """Returns all settings by section as JSON types, without secrets, to be saved with the run."""
        saved: dict[str, dict[str, Any]] = {section: {} for section in sections()}
        for (name, value), item in zip(self.flat().items(), all_settings().values()):
            saved[item.section][name] = redact_value(list(value) if isinstance(value, tuple) else value)
        return saved


def sections() -> dict[str, type]:
    """Maps the name of each section to its dataclass."""
    return {f.name: f.type for f in dataclasses.fields(RunConfig)}  # type: ignore[misc]


def section_of(section: type[Section], settings: Any) -> Section:
    """Builds the dataclass of a section from attributes of the same names."""
    return section(**{f.name: getattr(settings, f.name) for f in dataclasses.fields(section)})  # type: ignore


@functools.cache
def all_settings() -> dict[str, Setting]:
    """Returns all settings by name."""
    items = [item for section, cls in sections().items() for item in settings_of(section, cls)]
    by_name = {item.name: item for item in items}
    assert len(by_name) == len(items), "a setting is declared twice"
    return by_name


def size_problem(config: RunConfig, size: int) -> str | None:
    """Returns why a step of this many samples cannot run in this layout, or None."""
    micro, replicas, ranks = config.train.micro_batch_size, config.grid.data, config.grid.pipeline
    if size % (micro * replicas):
        chunk = f"micro batch size ({micro}) times data parallel size ({replicas}) = {micro * replicas}"
        return f"{size} is not divisible by {chunk}"
    if ranks == 1:
        return None
    count = config.accumulation_of(size)
    return schedule_problem(config.parallel.pipeline_schedule, ranks, config.virtual_stages, count)


def remaining_batch_sizes_problem(config: RunConfig, consumed_samples: int, steps_taken: int) -> str | None:
    """Returns an error for the first remaining batch size that cannot run in this layout, or None."""
    plan, left = config.batch_plan, config.train.train_iters - steps_taken
    for phase in plan.sizes(left, consumed_samples) if left > 0 else ():
        if problem := size_problem(config, phase.size):
            batch = f"the batch of {phase.size} samples at step {steps_taken + phase.first_step + 1}"
            return f"{batch} does not fit: {problem}; {_batch_size_advice(config)}"
    return None


def _batch_size_advice(config: RunConfig) -> str:
    common, replicas = config.batch_plan.common_divisor, config.grid.data
    chunk = (config.train.micro_batch_size or 1) * replicas
    if common % chunk == 0:
        return "begin with larger batches, or use another --pipeline-schedule"
    multiples = f"use batch sizes that are multiples of {chunk}"
    if common % replicas == 0:
        return f"{multiples}, or --micro-batch-size {join_choices(divisors(common // replicas))}"
    return f"{multiples}, or a number of data-parallel ranks that divides {common}"

"""The whole run as one frozen object, and the table of every setting in it."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from pentatron.layout import schedules
from pentatron.layout.actions import Placement, Schedule
from pentatron.layout.batch import BatchPlan, accumulation_steps, batch_problem
from pentatron.layout.ranks import Grid
from pentatron.layout.schedules import schedule_problem
from pentatron.layout.stages import StagePart, recomputed_runs, stage_parts
from pentatron.settings.declaration import Setting, settings_of
from pentatron.settings.model import KernelConfig, MoEConfig, TransformerConfig, moe_layers
from pentatron.settings.output import CheckpointConfig, LogConfig, RunSettings
from pentatron.settings.parallel import LaunchConfig, MemoryConfig, ParallelConfig, PrecisionConfig
from pentatron.settings.parameters import costs_of, division_of, grid_of
from pentatron.settings.schedule import Spans, plan_of, spans_of
from pentatron.settings.settings import Settings
from pentatron.settings.training import DataConfig, LoopConfig, OptimConfig, TrainConfig
from pentatron.text import divisors, either, redacted_value


@dataclass(frozen=True)
class RunConfig:
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
        """Freezes settings whose open values are derived."""
        values = settings.flat()
        parts = {
            section: of_section(**{f.name: values[f.name] for f in dataclasses.fields(of_section)})
            for section, of_section in sections().items()
        }
        return cls(**parts)

    @functools.cached_property
    def settings(self) -> Settings:
        """The same settings by name alone."""
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
        return schedules.placement_for(
            self._schedule_kind, self.parallel.pipeline_model_parallel_size, self.virtual_stages
        )

    @property
    def _schedule_kind(self) -> str:
        """One rank has nobody to overlap with: its order is that of 1F1B, whatever was asked for."""
        one = self.parallel.pipeline_model_parallel_size == 1
        return "1f1b" if one else self.parallel.pipeline_schedule

    @property
    def defers_weight_gradients(self) -> bool:
        """Whether some backwards come in two halves."""
        return self._schedule_kind in schedules.HALVING

    @property
    def stages(self) -> tuple[StagePart, ...]:
        """What every stage holds of the model, in the order of the model."""
        return stage_parts(self.model.num_layers, division_of(self.settings), costs_of(self.settings))

    def recomputed(self, part: StagePart) -> list[tuple[int, ...]]:
        """The layers of a stage that run again in backward as a whole, in the runs that keep one input each."""
        if self.memory.recompute_granularity != "full":
            return []
        count = self.memory.recompute_num_layers
        block = self.memory.recompute_method == "block"
        runs, _ = recomputed_runs(part.layers, 1 if block else count, count if block else None)
        return [tuple(run) for run in runs]

    @property
    def layers_with_experts(self) -> tuple[int, ...]:
        if self.moe.num_experts is None:
            return ()
        found = moe_layers(self.moe.moe_layer_freq, self.model.num_layers)
        return tuple(number for number, has_experts in enumerate(found) if has_experts)

    def schedule(self, micro_batches: int) -> Schedule:
        """What every pipeline rank does in a step of that many micro-batches."""
        p = self.parallel
        ranks, virtual = p.pipeline_model_parallel_size, self.virtual_stages
        kind = self._schedule_kind
        group = p.microbatch_group_size_per_virtual_pipeline_stage
        if not schedules.takes_groups(kind, virtual) or group is None:
            return schedules.training_schedule(kind, ranks, virtual, micro_batches)
        # A group was chosen for a full step; a shorter one has no more than it has.
        return schedules.training_schedule(kind, ranks, virtual, micro_batches, min(group, micro_batches))

    def forward_schedule(self, micro_batches: int) -> Schedule:
        """The same for an evaluation of that many micro-batches."""
        return schedules.forward_schedule(self.placement, micro_batches)

    @property
    def accumulation(self) -> int:
        """Micro-batches each data-parallel rank runs in a step of full size."""
        return self.accumulation_of(self.train.global_batch_size)

    def accumulation_of(self, batch_size: int) -> int:
        """The same for a step of that many samples."""
        return accumulation_steps(batch_size, self.train.micro_batch_size, self.grid.data)

    @functools.cached_property
    def batch_plan(self) -> BatchPlan:
        """How many samples each step has."""
        return plan_of(self.settings)

    @property
    def spans(self) -> Spans:
        """How long the schedules of the run are, in samples."""
        return spans_of(self.settings, self.batch_plan)

    @property
    def eval_batch(self) -> tuple[int, int]:
        """Samples of one evaluation step, and how many of them a rank computes at once."""
        t = self.train
        return t.eval_global_batch_size or t.global_batch_size, t.eval_micro_batch_size or t.micro_batch_size

    @property
    def eval_accumulation(self) -> int:
        """Micro-batches each data-parallel rank runs in one evaluation step."""
        return accumulation_steps(*self.eval_batch, self.grid.data)

    def flat(self) -> dict[str, Any]:
        """Every setting by name, in the order of the table."""
        return {s.name: getattr(getattr(self, s.section), s.name) for s in table().values()}

    def shared(self) -> dict[str, Any]:
        """By flag, the settings that must be the same for every process of a run: all but those of the machine."""
        return {
            item.flag: list(value) if isinstance(value, tuple) else value
            for (name, value), item in zip(self.flat().items(), table().values())
            if item.section != "launch"
        }

    def nested(self) -> dict[str, dict[str, Any]]:
        """Every setting by section, as plain lists and scalars: what is kept of a run, without secrets."""
        return {
            section: {
                name: redacted_value(list(value) if isinstance(value, tuple) else value)
                for name, value in fields.items()
            }
            for section, fields in dataclasses.asdict(self).items()
        }


def sections() -> dict[str, type]:
    return {f.name: f.type for f in dataclasses.fields(RunConfig)}  # type: ignore[misc]


@functools.cache
def table() -> dict[str, Setting]:
    """Every setting there is, by name."""
    found: dict[str, Setting] = {}
    for section, cls in sections().items():
        for item in settings_of(section, cls):
            assert item.name not in found, f"setting {item.name} is declared twice"
            found[item.name] = item
    return found


# Whether a layout can take every batch size that a run has on its way.


def size_problem(config: RunConfig, size: int) -> str | None:
    """Why a step of that many samples cannot run in this layout, or None."""
    micro, replicas, ranks = config.train.micro_batch_size, config.grid.data, config.grid.pipeline
    if batch_problem(size, micro, replicas) is not None:
        return (
            f"{size} is not divisible by micro batch size ({micro}) times data parallel size ({replicas}) = "
            f"{micro * replicas}"
        )
    if ranks == 1:
        return None
    count = config.accumulation_of(size)
    return schedule_problem(config.parallel.pipeline_schedule, ranks, config.virtual_stages, count)


def sizes_problem(config: RunConfig, consumed_samples: int = 0, steps_taken: int = 0) -> str | None:
    """The first batch size from here to the end of the run that cannot run, with the way out; or None."""
    plan, left = config.batch_plan, config.train.train_iters - steps_taken
    for stretch in plan.sizes(left, consumed_samples) if left > 0 else ():
        problem = size_problem(config, stretch.size)
        if problem is not None:
            return (
                f"the batch of {stretch.size} samples at step {steps_taken + stretch.first_step + 1} does not fit: {problem}; "
                f"{_way_out(config)}"
            )
    return None


def _way_out(config: RunConfig) -> str:
    common, replicas = config.batch_plan.common_divisor, config.grid.data
    chunk = (config.train.micro_batch_size or 1) * replicas
    if common % chunk == 0:
        return "begin with larger batches, or use another --pipeline-schedule"
    multiples = f"use batch sizes that are multiples of {chunk}"
    if common % replicas == 0:
        return f"{multiples}, or --micro-batch-size {either(divisors(common // replicas))}"
    return f"{multiples}, or a number of data-parallel ranks that divides {common}"

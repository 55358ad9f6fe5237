"""The whole run as one frozen object, and the table of every setting in it."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from pentatron.config.model import KernelConfig, MoEConfig, TransformerConfig
from pentatron.config.output import CheckpointConfig, LogConfig, RunSettings
from pentatron.config.parallel import LaunchConfig, MemoryConfig, ParallelConfig, PrecisionConfig
from pentatron.config.setting import Setting, settings_of
from pentatron.config.training import DataConfig, OptimConfig, TrainConfig
from pentatron.layout.batch import accumulation_steps
from pentatron.layout.ranks import Grid


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
    log: LogConfig
    launch: LaunchConfig

    @property
    def grid(self) -> Grid:
        p = self.parallel
        assert p.data_parallel_size is not None, "resolved configurations know their data-parallel size"
        return Grid(
            tensor=p.tensor_model_parallel_size,
            context=p.context_parallel_size,
            data=p.data_parallel_size,
            pipeline=p.pipeline_model_parallel_size,
        )

    @property
    def accumulation(self) -> int:
        """Micro-batches each data-parallel rank runs in one step."""
        t = self.train
        assert t.global_batch_size is not None and t.micro_batch_size is not None
        return accumulation_steps(t.global_batch_size, t.micro_batch_size, self.grid.data)

    def flat(self) -> dict[str, Any]:
        """Every setting by name, in the order of the table."""
        return {s.name: getattr(getattr(self, s.section), s.name) for s in table().values()}

    def nested(self) -> dict[str, dict[str, Any]]:
        """Every setting by section, as plain lists and scalars: what the run folder keeps."""
        return {
            section: {
                name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()
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


def build(values: dict[str, Any]) -> RunConfig:
    """The frozen configuration from one value per setting."""
    parts = {
        section: cls(**{f.name: values[f.name] for f in dataclasses.fields(cls)})
        for section, cls in sections().items()
    }
    return RunConfig(**parts)

"""Every setting of a run as one typed attribute, with the origin of its value.

`Settings` inherits the declarations of all sections, so a type checker knows each attribute. Rules, derivations and
needs read it; `RunConfig` is the frozen form by section.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Self

from pentatron.config.loop import LoopConfig
from pentatron.config.model import KernelConfig, MoEConfig, TransformerConfig
from pentatron.config.output import CheckpointConfig, LogConfig, RunSettings
from pentatron.config.parallel import LaunchConfig, MemoryConfig, ParallelConfig, PrecisionConfig
from pentatron.config.training import DataConfig, OptimConfig, TrainConfig

# The reason of a derived value that a run has kept since its first start.
KEPT = "kept from"


@dataclass(frozen=True)
class Assigned:
    """A value and its origin, such as `flag --lr`, `file X.yaml`, `preset demo`, `derived: REASON` or `default`."""

    value: Any
    source: str


def is_written(source: str) -> bool:
    """Whether the user wrote a value of this origin, in a flag or a file."""
    return source.startswith(("flag", "file"))


def unset(value: object) -> bool:
    """Whether a setting is open: neither given nor derived. Its declared type is that of a resolved run, without None."""
    return value is None


@dataclass(frozen=True)
class Facts:
    """The processes of the run, the cores of this machine, and the launcher; the settings do not contain them.

    `launcher` is empty if Pentatron starts the processes. `has_rendezvous`: the launcher has set MASTER_ADDR.
    """

    world_size: int
    local_processes: int = 1
    cores: int = 1
    launcher: str = ""
    has_rendezvous: bool = False


ONE_PROCESS = Facts(1)


class Settings(
    RunSettings,
    TransformerConfig,
    MoEConfig,
    DataConfig,
    TrainConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    MemoryConfig,
    KernelConfig,
    CheckpointConfig,
    LoopConfig,
    LogConfig,
    LaunchConfig,
):
    """Typed access to every setting by name. `assign` is the only way to change one, and records the origin.

    `epoch_samples`: samples of one pass over the training data, as far as they were counted for `--epochs`.
    """

    facts: Facts
    epoch_samples: int | None
    _names: tuple[str, ...]
    _origins: dict[str, str]

    def __init__(
        self, values: Mapping[str, Any], origins: Mapping[str, str] | None = None, facts: Facts = ONE_PROCESS
    ) -> None:
        # The sections are frozen dataclasses, whose fields cannot be set as attributes.
        self.__dict__.update(values)
        self._names, self._origins = tuple(values), dict(origins or {})
        self.facts, self.epoch_samples = facts, None

    @classmethod
    def defaults(cls, **values: Any) -> "Settings":
        """The defaults of all declarations, but for the given values."""
        declared = {
            f.name: f.default for section in cls.__mro__ if is_dataclass(section) for f in fields(section)
        }
        return Settings({**declared, **values})

    @classmethod
    def of_sections(cls, saved: Mapping[str, Mapping[str, Any]]) -> "Settings":
        """Settings saved by section. One that is not among them has its default."""
        return cls.defaults(**{name: value for section in saved.values() for name, value in section.items()})

    def assign(self, source: str, **values: Any) -> None:
        """Sets settings to values of one origin."""
        if unknown := values.keys() - set(self._names):
            raise AttributeError(f"no such setting: {', '.join(sorted(unknown))}")
        self.__dict__.update(values)
        self._origins.update(dict.fromkeys(values, source))

    def derive(self, reason: str, **values: Any) -> None:
        """Sets settings to values that follow from others."""
        self.assign(f"derived: {reason}", **values)

    def source(self, name: str) -> str:
        """The origin of a value."""
        return self._origins.get(name, "default")

    def given(self, name: str) -> bool:
        """Whether the user wrote this value in a flag or a file."""
        return is_written(self.source(name))

    def flat(self) -> dict[str, Any]:
        """Every value by name, in the order of the declarations."""
        return {name: self.__dict__[name] for name in self._names}

    @property
    def sources(self) -> dict[str, str]:
        """The origin of every value."""
        return {name: self.source(name) for name in self._names}

    def changed(self, **values: Any) -> Self:
        """A copy with other values."""
        other = self.copy()
        other.__dict__.update(values)
        return other

    def copy(self) -> Self:
        """An independent copy."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._origins = dict(self._origins)
        return other

    @property
    def is_synthetic(self) -> bool:
        """Whether samples are generated, `--dataset-size` of them."""
        named = (self.corpus, self.data_path, self.train_data_path, self.mock_data)
        return not any(named) and self.dataset_size is not None

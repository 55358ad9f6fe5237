"""Typed access to all settings of a run by name, with the origin of each value.

`Settings` inherits the declarations of all sections, so type checkers know each attribute. Rules, derivations
and needs read it. `RunConfig` is the frozen form by section.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Self

from pentatron.settings.model import KernelConfig, MoEConfig, TransformerConfig
from pentatron.settings.output import CheckpointConfig, LogConfig, RunSettings
from pentatron.settings.parallel import LaunchConfig, MemoryConfig, ParallelConfig, PrecisionConfig
from pentatron.settings.training import DataConfig, LoopConfig, OptimConfig, TrainConfig

# Prefix of the reason of values that a resumed run keeps from its first start.
KEPT_PREFIX = "kept from"


@dataclass(frozen=True)
class Assigned:
    """A value and its origin: `flag --lr`, `file X.yaml`, `preset demo`, `derived: REASON`, `default`."""

    value: Any
    source: str


def is_unset(value: object) -> bool:
    """Whether a setting is neither given nor derived yet.

    The declared type excludes None, because resolved settings are always set.
    """
    return value is None


@dataclass(frozen=True)
class ProcessFacts:
    """Properties of the run that are not settings: its processes, the cores of this machine and the launcher.

    `launcher` is empty if Pentatron starts the processes. `has_rendezvous`: the launcher sets MASTER_ADDR.
    """

    world_size: int
    local_processes: int = 1
    cores: int = 1
    launcher: str = ""
    has_rendezvous: bool = False


ONE_PROCESS = ProcessFacts(1)


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
    """All settings by name. `assign` changes values and records their origin.

    `epoch_samples`: samples of one epoch of the training data, None if not counted.
    """

    facts: ProcessFacts
    epoch_samples: int | None
    _names: tuple[str, ...]
    _origins: dict[str, str]

    def __init__(
        self, values: Mapping[str, Any], origins: Mapping[str, str] = {}, facts: ProcessFacts = ONE_PROCESS
    ) -> None:
        # Bypasses __setattr__, as the sections are frozen dataclasses.
        self.__dict__.update(values)
        self._names, self._origins = tuple(values), dict(origins)
        self.facts, self.epoch_samples = facts, None

    @classmethod
    def defaults(cls, **values: Any) -> "Settings":
        """Returns the declared defaults, with `values` in place of some."""
        sections = filter(is_dataclass, cls.__mro__)
        return Settings({f.name: f.default for section in sections for f in fields(section)} | values)

    @classmethod
    def of_sections(cls, saved: Mapping[str, Mapping[str, Any]]) -> "Settings":
        """Returns settings that were saved by section, and defaults for those that are missing."""
        return cls.defaults(**{name: value for section in saved.values() for name, value in section.items()})

    def assign(self, source: str, **values: Any) -> None:
        """Sets values and records their origin."""
        if unknown := values.keys() - set(self._names):
            raise AttributeError(f"no such setting: {', '.join(sorted(unknown))}")
        self.__dict__.update(values)
        self._origins.update(dict.fromkeys(values, source))

    def derive(self, reason: str, **values: Any) -> None:
        """Sets values that are derived from others."""
        self.assign(f"derived: {reason}", **values)

    def fill(self, reason: str, **values: Any) -> None:
        """Sets those of the values that are unset, as `derive` does. None leaves a setting unset."""
        unset = [name for name, value in values.items() if value is not None and getattr(self, name) is None]
        self.derive(reason, **{name: values[name] for name in unset})

    def source(self, name: str) -> str:
        """Returns the origin of a value."""
        return self._origins.get(name, "default")

    def given(self, name: str) -> bool:
        """Whether the user gave this value in a flag or a file."""
        return self.source(name).startswith(("flag", "file"))

    def by_flag(self, name: str) -> bool:
        """Whether the user gave this value in a flag."""
        return self.source(name).startswith("flag ")

    def flat(self) -> dict[str, Any]:
        """Returns all values by name, in the order of the declarations."""
        return {name: self.__dict__[name] for name in self._names}

    @property
    def sources(self) -> dict[str, str]:
        """The origin of every value."""
        return {name: self.source(name) for name in self._names}

    def changed(self, **values: Any) -> Self:
        """Returns a copy with other values, without a record of their origin."""
        other = self.copy()
        other.__dict__.update(values)
        return other

    def copy(self) -> Self:
        """Returns an independent copy."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._origins = dict(self._origins)
        return other

    @property
    def virtual_stages(self) -> int:
        """Stages on each pipeline rank."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that hold one replica of the model together."""
        tensor_ranks = self.tensor_model_parallel_size * self.context_parallel_size
        return tensor_ranks * self.pipeline_model_parallel_size

    @property
    def is_synthetic(self) -> bool:
        """Whether samples are synthetic, `--dataset-size` of them."""
        named = (self.corpus, self.data_path, self.train_data_path, self.mock_data)
        return not any(named) and self.dataset_size is not None


class Draft(Settings):
    """Settings that are being resolved, with the notices and problems found so far.

    `notices` are printed before those of the rules, `further_notices` after them. `wrong` maps settings whose
    value is invalid by itself to the error. `in_run_folder` maps settings to paths relative to the run
    folder, until that is known. `refuse_unimplemented`: a feature that is not implemented is a problem rather
    than a notice.
    """

    def __init__(self, values: Mapping[str, Assigned], notices: Sequence[str] = ()) -> None:
        origins = {name: assigned.source for name, assigned in values.items()}
        super().__init__({name: assigned.value for name, assigned in values.items()}, origins)
        self.notices = list(notices)
        self.further_notices: list[str] = []
        self.problems: list[str] = []
        self.wrong: dict[str, str] = {}
        self.in_run_folder: dict[str, str] = {}
        self.refuse_unimplemented = True

    def copy(self) -> Self:
        other = super().copy()
        for name in ("notices", "further_notices", "problems", "wrong", "in_run_folder"):
            other.__dict__[name] = getattr(self, name).copy()
        return other


# Settings that select what is loaded from a checkpoint.
LOAD_OPTIONS = ("finetune", "no_load_optim", "no_load_rng")


class Start(Enum):
    """How a run treats an earlier run in its folder.

    `RESUME`: resume from the newest checkpoint step of the run. Without one, load `--load` or initialize
    weights. `NEW`: move an earlier run in the folder aside, then load `--load` or initialize weights.
    `IN_PLACE`: move nothing, as `--load` names the folder or something inside it, and load that. Checkpoint
    steps that are already there belong to earlier runs.
    """

    RESUME = "resume"
    NEW = "new"
    IN_PLACE = "in place"


def start_of(s: Settings, load_given: bool, resumes: bool) -> Start:
    """Returns how a run starts.

    `resumes`: the program resumes by default, or this is a restart of its job.
    """
    if s.fresh:
        return Start.NEW
    if resumes or (s.skip_train and not load_given):
        return Start.RESUME
    if not load_given or is_unset(s.load):
        return Start.NEW
    if not any(getattr(s, name) for name in LOAD_OPTIONS) and is_checkpoint_folder(s.load, s.save):
        return Start.RESUME
    return Start.IN_PLACE if s.skip_train or is_inside(s.load, s.run_dir, s.save) else Start.NEW


def how_to_resume(start: Start, save: str) -> str:
    """Returns the advice how to resume from the last checkpoint, given the start of this command."""
    if start is Start.RESUME:
        return "the same command resumes from there"
    return f"the same command with --load {save}, and without --finetune, resumes from there"


def other_run_error(run_dir: str) -> str:
    """Returns the beginning of the error for a derived run folder that holds another run."""
    return f"another run is in {run_dir}; give another --run-dir"


def is_checkpoint_folder(load: str, save: str) -> bool:
    """Whether `load` is the checkpoint folder `save` or the run folder that contains it."""
    return Path(save).resolve() in (Path(load).resolve(), (Path(load) / "checkpoints").resolve())


def is_inside(path: str, *folders: str) -> bool:
    """Whether a path is one of the folders or inside one."""
    return any(Path(path).resolve().is_relative_to(Path(folder).resolve()) for folder in folders)

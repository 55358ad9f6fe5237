"""Every setting of a run as one typed attribute, with the origin of its value.

`Settings` inherits the declarations of all sections, so a type checker knows each attribute. Rules, derivations and
needs read it; `RunConfig` is the frozen form by section.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Self

from pentatron.settings.model import KernelConfig, MoEConfig, TransformerConfig
from pentatron.settings.output import CheckpointConfig, LogConfig, RunSettings
from pentatron.settings.parallel import LaunchConfig, MemoryConfig, ParallelConfig, PrecisionConfig
from pentatron.settings.training import DataConfig, LoopConfig, OptimConfig, TrainConfig

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


# Settings while they are resolved: notices and problems met on the way.


class Draft(Settings):
    """`notices` come before those of the rules, `further_notices` after them. `problems` were met so far.

    `wrong` holds a sentence for each setting whose value cannot be used, whatever the others are.
    `in_run_folder`: settings that name a place in the run's own folder, and the place, until the folder is known.
    `built_only`: a feature that is not built is a problem, not a notice.
    """

    notices: list[str]
    further_notices: list[str]
    problems: list[str]
    wrong: dict[str, str]
    in_run_folder: dict[str, str]
    built_only: bool

    def __init__(
        self, values: Mapping[str, Assigned], notices: list[str] | None = None, facts: Facts = ONE_PROCESS
    ) -> None:
        super().__init__(
            {name: assigned.value for name, assigned in values.items()},
            {name: assigned.source for name, assigned in values.items()},
            facts,
        )
        self.notices, self.further_notices, self.problems = list(notices or ()), [], []
        self.wrong, self.in_run_folder, self.built_only = {}, {}, True

    def copy(self) -> Self:
        other = super().copy()
        other.notices, other.further_notices = self.notices.copy(), self.further_notices.copy()
        other.problems, other.wrong = self.problems.copy(), self.wrong.copy()
        other.in_run_folder = self.in_run_folder.copy()
        return other


# How a run treats what its folder already holds: decided once, from the command and from whether this is a
# restart.


# They choose what is taken from what is loaded.
CHOOSING = ("finetune", "no_load_optim", "no_load_rng")


class Start(Enum):
    """`RESUME`: goes on from the run's own newest step; without one, begins with what `--load` names, else with new weights.

    `ANEW`: moves an earlier run in the folder aside, then begins with what `--load` names, else with new weights.

    `IN_PLACE`: moves nothing, as `--load` names the folder itself or something inside it, and begins with that; steps that are
    there already belong to earlier runs.
    """

    RESUME = "resume"
    ANEW = "anew"
    IN_PLACE = "in place"


def start_of(s: Settings, load_given: bool, resumes: bool) -> Start:
    """The start of a run with these settings. `resumes`: the program goes on by itself, or this is a restart of its job."""
    if s.fresh:
        return Start.ANEW
    if resumes or (s.skip_train and not load_given):
        return Start.RESUME
    if not load_given or unset(s.load):
        return Start.ANEW
    chooses = s.finetune or s.no_load_optim or s.no_load_rng
    if not chooses and names_checkpoints(s.load, s.save):
        return Start.RESUME
    inside = is_inside(s.load, s.run_dir, s.save)
    return Start.IN_PLACE if inside or s.skip_train else Start.ANEW


def how_to_go_on(start: Start, save: str) -> str:
    """What goes on from the last checkpoint, for the command whose start this is."""
    if start is Start.RESUME:
        return "the same command goes on from there"
    return f"the same command with --load {save}, and without --finetune, goes on from there"


def another_run(run_dir: str) -> str:
    """Begins the refusal of a run whose folder was named after its model and data, and holds something else."""
    return f"another run is in {run_dir}; choose --run-dir for this one"


def names_checkpoints(load: str, save: str) -> bool:
    """Whether `load` means the folder of checkpoints `save`: itself, or the run that keeps them."""
    own = Path(save).resolve()
    return own in (Path(load).resolve(), (Path(load) / "checkpoints").resolve())


def is_inside(path: str, *folders: str) -> bool:
    """Whether a path is one of the folders, or lies in one."""
    return any(Path(path).resolve().is_relative_to(Path(folder).resolve()) for folder in folders)

"""A configuration on its way: values with their origins, and the facts about the machine."""

from dataclasses import dataclass, field
from typing import Any

from pentatron.config.flags import Assigned, is_written

# The reason of a derived value that a run has had from its beginning.
KEPT = "kept from"


@dataclass(frozen=True)
class Facts:
    """What the command line knows and the configuration cannot: the processes, the cores, and who started them.

    `launcher` is empty when we start the processes ourselves; `has_meeting_point`: it also said where they meet.
    """

    world_size: int
    local_processes: int = 1
    cores: int = 1
    launcher: str = ""
    has_meeting_point: bool = False


@dataclass
class Draft:
    """`wrong` holds a sentence for every setting whose value cannot be used, whatever the others are.

    `epoch`: the samples of one pass over the training data, where `--epochs` asks and files were read for it. `in_run_folder`: settings
    that name a place in the run's own folder, and the place, as long as the folder is not known.
    """

    values: dict[str, Assigned]
    notices: list[str] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)
    epoch: int | None = None
    in_run_folder: dict[str, str] = field(default_factory=dict)

    def copy(self) -> "Draft":
        """To be changed while this one stays as it is."""
        return Draft(
            dict(self.values), list(self.notices), dict(self.wrong), self.epoch, dict(self.in_run_folder)
        )

    def __getitem__(self, name: str) -> Any:
        return self.values[name].value

    def given(self, name: str) -> bool:
        """Whether the user wrote this value (in a flag or a file) rather than inheriting it."""
        return is_written(self.values[name].source)

    @property
    def is_synthetic(self) -> bool:
        """Whether the samples are made up, `--dataset-size` of them."""
        named = any(self[name] for name in ("corpus", "data_path", "train_data_path", "mock_data"))
        return not named and self["dataset_size"] is not None

    def source(self, name: str) -> str:
        return self.values[name].source

    def derive(self, name: str, value: Any, reason: str) -> None:
        self.values[name] = Assigned(value, f"derived: {reason}")

"""A configuration on its way: values with their origins, and the facts about the machine."""

from dataclasses import dataclass, field
from typing import Any

from pentatron.config.flags import Assigned


@dataclass(frozen=True)
class Facts:
    """What the command line knows and the configuration cannot: how many processes and cores there are."""

    world_size: int
    local_processes: int = 1
    cores: int = 1


@dataclass
class Draft:
    values: dict[str, Assigned]
    notices: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        return self.values[name].value

    def given(self, name: str) -> bool:
        """Whether the user wrote this value (in a flag or a file) rather than inheriting it."""
        return self.values[name].source.startswith(("flag", "file"))

    def derive(self, name: str, value: Any, reason: str) -> None:
        self.values[name] = Assigned(value, f"derived: {reason}")

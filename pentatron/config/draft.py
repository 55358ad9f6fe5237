"""Settings while they are resolved: notices and problems met on the way."""

from collections.abc import Mapping
from typing import Self

from pentatron.config.settings import ONE_PROCESS, Assigned, Facts, Settings


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

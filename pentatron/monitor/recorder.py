"""What keeps the numbers of a run: a file, a viewer's folder, a service."""

import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from pentatron.monitor.report import StepReport


class RecorderDown(Exception):
    """It cannot record, for a reason that is not the user's mistake and may pass."""


class Recorder:
    # What a message calls it.
    name = "a recorder"

    def record(self, report: StepReport, validation: float | None) -> None:
        """After every step; `validation` is the loss of the evaluation that followed it, if one did."""

    def left_out(self, step: int, consumed_samples: int) -> None:
        """In place of `record`, for a step that was not trained (--iterations-to-skip)."""

    def evaluated(self, step: int, losses: Mapping[str, float]) -> None:
        """After the last step: the losses on the `validation` and the `test` set, as far as there are any."""

    def saved(self, step: int) -> None:
        """After every checkpoint."""

    def close(self) -> None:
        """At the end of the run, also of one that failed."""


class AppendedFile:
    """A file that lines are added to for as long as the run lasts.

    One that was deleted or replaced meanwhile is made again, and `tell` gets a line: without that, lines would go to an inode without
    a name.
    """

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        self.path, self._tell = path, tell
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")

    def write(self, text: str, instead_of: int | None = None) -> int:
        """Adds a text and flushes it; returns where it begins. What lies from `instead_of` on is removed first."""
        made_again = not self._is_there()
        if made_again:
            self._file.close()
            self._file = self.path.open("a", encoding="utf-8", errors="backslashreplace")
        elif instead_of is not None:
            self._file.truncate(instead_of)
        place = self._file.seek(0, io.SEEK_END)
        self._file.write(text)
        self._file.flush()
        if made_again:
            self._tell(
                f"note: {self.path} was deleted or replaced during the run; it was made again, and has what comes from here on"
            )
        return place

    def close(self) -> None:
        self._file.close()

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False
        except ValueError:
            # Closed, as it could not be opened again.
            return False

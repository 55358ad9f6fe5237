"""The folder of a sweep's results; that of an earlier sweep is kept."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from pentatron.bench import plot_results
from pentatron.errors import UserError
from pentatron.files import numbered, rename


@dataclass(frozen=True)
class ResultsFolder:
    path: Path

    @property
    def summary(self) -> Path:
        return self.path / "summary.csv"

    def run(self, layout: str) -> Path:
        """Where a layout trains: its settings, log and metrics."""
        return self.path / "runs" / layout.replace(" ", "-")

    def output(self, layout: str) -> Path:
        """What its processes said."""
        return self.path / "output" / layout.replace(" ", "-")

    def open(self) -> Path | None:
        """Makes the folder; returns where an earlier one went."""
        moved = None
        try:
            if self.path.is_dir() and any(self.path.iterdir()):
                moved = self._move_aside()
            self.path.mkdir(parents=True, exist_ok=True)
            # Beside the results, so that they can be drawn where this package is not installed.
            shutil.copyfile(plot_results.__file__, self.path / "plot_results.py")
        except OSError as error:
            raise UserError(
                f"the folder {self.path} cannot be used for results ({error.strerror}); name another with --out"
            ) from None
        return moved

    def _move_aside(self) -> Path:
        if not self.summary.exists() and not (self.path / "plot_results.py").exists():
            raise UserError(
                f"{self.path} holds other files than a benchmark's, so it is not moved aside; name another folder with --out"
            )
        whole = self.path.resolve()
        aside = numbered(whole, ".")
        rename(whole, aside)
        return aside

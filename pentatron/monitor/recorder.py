"""What keeps the numbers of a run: a file, a viewer's folder, a service."""

from collections.abc import Mapping

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

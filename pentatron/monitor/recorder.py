"""What keeps the numbers of a run: a file, a viewer's folder, a service."""

from pentatron.monitor.report import StepReport


class Recorder:
    def record(self, report: StepReport, validation: float | None) -> None:
        """After every step; `validation` is the loss of the evaluation that followed it, if one did."""

    def saved(self, step: int) -> None:
        """After every checkpoint."""

    def close(self) -> None:
        """At the end of the run, also of one that failed."""

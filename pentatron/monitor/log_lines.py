"""Megatron's line, every so many steps."""

from datetime import datetime

from pentatron.monitor.report import StepReport
from pentatron.text import in_mib


class LogLines:
    """Numbers of the steps since the last line; the first step of a run gets a line that counts in the next one too."""

    def __init__(self, interval: int, throughput: bool) -> None:
        self.interval, self.throughput = interval, throughput
        self._since: list[StepReport] = []
        self._is_first = True

    def after(self, report: StepReport, now: datetime) -> str | None:
        """The line that is due after this step, if one is."""
        self._since.append(report)
        due = report.step % self.interval == 0
        line = log_line(self._since, now, self.throughput) if due or self._is_first else None
        self._is_first = False
        if due:
            self._since = []
        return line


def log_line(reports: list[StepReport], now: datetime, throughput: bool) -> str:
    """Means over the given steps. Ours stand at the end, so that what reads Megatron's line reads this one."""
    last = reports[-1]
    seconds = sum(r.seconds for r in reports) / len(reports)
    fields = [
        f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {last.step:8d}/{last.total_steps:8d}",
        f"consumed samples: {last.consumed_samples:12d}",
    ]
    if last.skipped_samples:
        fields.append(f"skipped samples: {last.skipped_samples:12d}")
    fields.append(f"elapsed time per iteration (ms): {seconds * 1000:.1f}")
    if throughput:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {_teraflops(reports):.1f}")
    fields += [
        f"learning rate: {last.next_learning_rate:.6E}",
        f"global batch size: {last.global_batch_size:5d}",
    ]
    # A step that left the weights alone, because its numbers were none, would make the mean none as well.
    advanced = [r for r in reports if not r.is_skipped]
    if advanced:
        fields += [f"{name}: {value:.6E}" for name, value in _losses(advanced).items()]
        fields += last.experts.fields() if last.experts else ()
    fields += [
        f"loss scale: {last.loss_scale:.1f}",
        f"grad norm: {last.gradient_norm:.3f}",
        f"number of skipped iterations: {sum(r.is_skipped for r in reports):3d}",
        f"number of nan iterations: {sum(r.is_nan for r in reports):3d}",
        f"tokens/s: {sum(r.tokens for r in reports) / sum(r.seconds for r in reports):.0f}",
    ]
    if last.peak_teraflops:
        fields.append(f"MFU: {100 * _teraflops(reports) / last.peak_teraflops:.1f} %")
    fields.append(f"memory (MiB): {in_mib(last.memory_bytes, '.0f')}")
    if last.experts is not None:
        fields.append(f"busiest expert: {last.experts.imbalance:.2f} x mean")
        fields.append(f"idle experts: {last.experts.idle}")
    return " | ".join(fields) + " |"


def _losses(reports: list[StepReport]) -> dict[str, float]:
    """The loss, and what a loss function reports; a name is averaged over the steps that have it."""
    values: dict[str, list[float]] = {}
    for report in reports:
        for name, value in {"lm loss": report.loss, **report.reported}.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def _teraflops(reports: list[StepReport]) -> float:
    """Of one device; steps may differ in their size."""
    return sum(r.flops for r in reports) / sum(r.seconds for r in reports) / reports[-1].devices / 1e12

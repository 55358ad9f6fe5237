import dataclasses
from datetime import datetime

from pentatron.monitor.report import LogLines, StepReport, log_line

NOW = datetime(2025, 2, 20, 11, 18, 36, 5)
REPORT = StepReport(
    step=7,
    total_steps=100,
    loss=6.612992,
    learning_rate=2e-5,
    next_learning_rate=1e-5,
    gradient_norm=111.1734,
    tokens=4096,
    consumed_samples=28,
    global_batch_size=4,
    seconds=0.5,
    memory_bytes=3 * 2**20,
    flops=12.34e12,
    devices=2,
)


def report(step: int, **changes: object) -> StepReport:
    return dataclasses.replace(REPORT, step=step, **changes)


def test_the_line_is_megatrons_with_ours_at_the_end() -> None:
    assert log_line([REPORT], NOW, throughput=True) == (
        " [2025-02-20 11:18:36.000005] iteration        7/     100 | consumed samples:           28 | "
        "elapsed time per iteration (ms): 500.0 | throughput per GPU (TFLOP/s/GPU): 12.3 | "
        "learning rate: 1.000000E-05 | global batch size:     4 | lm loss: 6.612992E+00 | loss scale: 1.0 | "
        "grad norm: 111.173 | number of skipped iterations:   0 | number of nan iterations:   0 | "
        "tokens/s: 8192 | memory (MiB): 3 |"
    )
    assert "throughput" not in log_line([REPORT], NOW, throughput=False)


def test_a_line_has_the_means_since_the_last_one_and_the_first_step_counts_twice() -> None:
    lines = LogLines(interval=2, throughput=False)
    first = lines.after(report(1, loss=4.0, seconds=3.0), NOW)
    second = lines.after(report(2, loss=2.0, seconds=1.0), NOW)
    assert lines.after(report(3, loss=9.0), NOW) is None
    third = lines.after(report(4, loss=1.0), NOW)
    assert first and "lm loss: 4.000000E+00" in first and "(ms): 3000.0" in first
    assert second and "lm loss: 3.000000E+00" in second and "(ms): 2000.0" in second
    assert third and "lm loss: 5.000000E+00" in third, "the steps of the line before do not count"


def test_a_skipped_step_is_counted_and_left_out_of_the_mean() -> None:
    bad = report(1, loss=float("nan"), is_skipped=True, is_nan=True, loss_scale=2.0**32)
    line = log_line([bad, report(2, loss=2.0, loss_scale=2.0**31)], NOW, False)
    assert "lm loss: 2.000000E+00 | loss scale: 2147483648.0" in line
    assert "number of skipped iterations:   1 | number of nan iterations:   1 |" in line
    assert "lm loss" not in log_line([bad], NOW, False), (
        "no step moved the weights, so there is no loss to show"
    )


def test_skipped_samples_and_mfu_are_shown_if_known() -> None:
    line = log_line([report(1, skipped_samples=8, peak_teraflops=989.0)], NOW, False)
    assert "consumed samples:           28 | skipped samples:            8 | elapsed" in line
    assert "| MFU: 1.2 % |" in line

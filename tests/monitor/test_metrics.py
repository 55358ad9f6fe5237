import math
from pathlib import Path

from pentatron.monitor.metrics import MetricsFile, read_metrics


def test_rows_are_readable_while_the_run_goes_on(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl", resumed_step=0)
    file.write({"step": 1, "loss": 0.1 + 0.2})
    assert list(read_metrics(tmp_path / "m.jsonl")) == [{"step": 1, "loss": 0.1 + 0.2}], "to the last digit"
    file.close()


def test_resuming_drops_the_steps_that_are_computed_again(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    file = MetricsFile(path, resumed_step=2)
    file.write({"step": 3, "again": True})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "again": true}\n'


def test_no_file_has_no_rows(tmp_path: Path) -> None:
    assert list(read_metrics(tmp_path / "none")) == []


def test_numbers_that_are_none_are_left_out(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl", resumed_step=0)
    file.write({"step": 1, "loss": math.nan, "gradient_norm": math.inf, "skipped": True})
    file.close()
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1, "skipped": true}\n'

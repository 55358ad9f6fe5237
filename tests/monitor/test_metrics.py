import json
import math
import random
from pathlib import Path

import pytest

from pentatron.monitor.curve import loss_curve
from pentatron.monitor.metrics import MetricsFile, MetricsFollower, read_metrics
from pentatron.monitor.view import RunStatus, Screen, render_view, status_line


def test_rows_are_readable_during_the_run(tmp_path: Path) -> None:
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


def test_nan_and_inf_are_left_out(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl", resumed_step=0)
    file.write({"step": 1, "loss": math.nan, "gradient_norm": math.inf, "skipped": True})
    file.close()
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1, "skipped": true}\n'


GOOD = {
    "step": 1,
    "loss": 3.5,
    "seconds": 0.1,
    "tokens_per_second": 10.0,
    "memory_bytes": 1000,
    "ranks": {"memory_bytes": [1000, 2000]},
}
DAMAGED = [
    b"null", b"[]", b"7", b'"step"', b"{}", b"", b"\xff\xfe", b"\0" * 40, b'{"step": 2, "lo', b'{"step": "2"}', b'{"step": true}',
    b'{"step": -1}', b'{"step": 1e400}', b'{"step": 9007199254740992}', b'{"step": 2, "loss": "3.5"}', b'{"step": 2, "loss": NaN}',
    b'{"step": 2, "loss": "NaN"}', b'{"step": 2, "loss": Infinity}', b'{"step": 2, "loss": 1e300}', b'{"step": 2, "loss": null}',
    b'{"step": 2, "seconds": []}', b'{"step": 2, "validation_loss": {}}', b'{"step": 2, "ranks": 7}', b'{"step": 2, "ranks": {"memory_bytes": 7}}',
    b'{"step": 2, "ranks": {"memory_bytes": ["7"]}}', b'{"step": 2, "ranks": {"busy_seconds": []}}', b"[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_is_skipped_and_counted(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    good = json.dumps(GOOD).encode()
    path.write_bytes(good + b"\n" + line + b"\n" + good + b"\n")
    rows = read_metrics(path)
    assert rows == [GOOD, GOOD] and rows.damaged == 1
    follower = MetricsFollower(path)
    for _ in range(2):
        seen = follower.poll()
        assert len(seen.damaged) == 1 and list(seen.losses) == [1]
    told: list[str] = []
    MetricsFile(path, resumed_step=1, tell=told.append).close()
    assert told == [
        "note: metrics.jsonl: 1 line is damaged and was skipped; the original file is metrics.jsonl.damaged-1"
    ]
    assert read_metrics(path) == [GOOD, GOOD] and line in (tmp_path / "metrics.jsonl.damaged-1").read_bytes()


def test_any_flipped_bit_leaves_a_view(tmp_path: Path) -> None:
    """Readers survive any flipped bit: a field that they compute with is a number or left out."""
    path = tmp_path / "metrics.jsonl"
    text = (json.dumps(GOOD) + "\n").encode()
    run = RunStatus("a", "running", "", 9, "none")
    draw = random.Random(0)
    for place in range(len(text) - 1):
        bit = 1 << draw.randrange(8)
        path.write_bytes(text + text[:place] + bytes([text[place] ^ bit]) + text[place + 1 :])
        seen = MetricsFollower(path).poll()
        assert render_view(run, seen, Screen()) and (not seen.recent or status_line(run, seen))
        rows = [row for row in read_metrics(path) if "loss" in row]
        assert loss_curve("a", [(float(row["step"]), float(row["loss"])) for row in rows], [])


def test_a_deleted_file_is_made_again_with_a_line(tmp_path: Path) -> None:
    told: list[str] = []
    file = MetricsFile(tmp_path / "m.jsonl", resumed_step=0, tell=told.append)
    file.write({"step": 1})
    (tmp_path / "m.jsonl").unlink()
    file.write({"step": 2})
    file.evaluated(2, {"validation": 1.5})
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 2, "validation_loss": 1.5}] and len(told) == 1
    (tmp_path / "m.jsonl").unlink()
    file.evaluated(2, {"test": 2.5})
    assert [row["step"] for row in read_metrics(tmp_path / "m.jsonl")] == [2] and len(told) == 2

"""Recordings of outputs: only noise is removed, and every difference between two is reported."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from record_outputs import main  # noqa: E402  (scripts/ is not a package)
from recorded.configurations import flag_entries  # noqa: E402
from recorded.noise import Noise, without_times  # noqa: E402

NOISE = Noise({"PLACE": "/tmp/recording-1/runs", "WORK": "/tmp/recording-1"})
LINE = "step     1/4  loss  4.1939  lr 1.00e-02     7807 tokens/s    252 MiB  left 0:00"


def test_times_rates_and_paths_are_removed_and_losses_are_kept() -> None:
    assert NOISE.remove(LINE, "times") == "step     1/4  loss  4.1939  lr 1.00e-02 N tokens/s N bytes  left T"
    assert NOISE.remove(LINE, "exact") == LINE
    assert NOISE.remove("/tmp/recording-1/runs/one", "exact") == "PLACE/one"
    saved = "saved 2026-11-18 19:43:42 at step 4, lr 0.01, 12 GiB"
    assert NOISE.remove(saved, "times") == "saved DATE at step 4, lr 0.01, 12 GiB"


def test_values_that_measure_time_are_masked_with_their_structure_kept() -> None:
    row = {
        "loss": 4.5,
        "seconds": 0.1,
        "ranks": {"busy_seconds": [0.1, 0.2]},
        "tokens": 128,
        "memory_bytes": 7,
    }
    masked = {"loss": 4.5, "seconds": "...", "ranks": {"busy_seconds": ["...", "..."]}, "tokens": 128}
    assert without_times(row) == {**masked, "memory_bytes": "..."}
    assert json.loads(NOISE.remove(json.dumps(row), "times")) == {**masked, "memory_bytes": "..."}


def test_flags_are_read_from_a_help_page() -> None:
    page = (
        "Run  (--help run)\n  --fresh         start again\n  --lr, --learning-rate X\n"
        "                  peak of the\n                  rate\n\nend"
    )
    assert list(flag_entries(page)) == [
        ("--fresh", "start again"),
        ("--lr, --learning-rate X", "peak of the rate"),
    ]


def test_every_difference_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for root in (first, second):
        root.mkdir()
        for name in ("one", "two", "three"):
            (root / name).write_text("same\nlr 0.1\n")
    asked = ["--compare", str(first), str(second)]
    assert main(asked) == 0 and "3 outputs in both, 0 differ" in capsys.readouterr().out
    for name in ("one", "two"):
        (second / name).write_text("same\nlr 0.2\n")
    (second / "three").unlink()
    assert main(asked) == 1
    told = capsys.readouterr().out
    assert f"only in {first}: three" in told and "one and 1 more\n  -lr 0.1\n  +lr 0.2" in told

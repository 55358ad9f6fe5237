"""Draws the pictures of results with Python alone."""

import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pentatron.bench import plot_results
from pentatron.bench.results import COLUMNS


def summary(folder: Path, **speeds: float) -> Path:
    with (folder / "summary.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for name, speed in speeds.items():
            numbers = {
                "tokens_per_second": speed,
                "memory_mib_per_rank": 300.0,
                "communication_share": 0.5,
                "collective_share": 0.3,
                "pipeline_wait_share": 0.2,
            }
            told = {
                "processes": 4,
                "device": "CPU",
                "precision": "fp32",
                "global_batch_size": 8,
                "seq_length": 64,
            }
            ran = {"status": "ok", **numbers, **told} if speed else {"status": "failed", "reason": "why"}
            writer.writerow({"layout": name, **ran})
    return folder


def bars(picture: Path, colour: str) -> list[float]:
    return [
        float(w) for w in re.findall(rf'width="([\d.]+)" height="16" fill="{colour}"', picture.read_text())
    ]


def test_drawn_beside_the_results_by_python_alone(tmp_path: Path) -> None:
    shutil.copy(plot_results.__file__, summary(tmp_path, dp4=400.0, tp4=100.0, pp4=0.0))
    # -I -S hides all installed packages, also ours and matplotlib.
    words = [sys.executable, "-I", "-S", "plot_results.py"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "no .png: matplotlib is not installed" in ended.stdout
    fast, slow = bars(tmp_path / "throughput.svg", plot_results._BLUE)
    assert fast == pytest.approx(4 * slow, rel=0.01)
    drawn = (tmp_path / "throughput.svg").read_text()
    assert drawn.index(">dp4<") < drawn.index(">tp4<") and ">pp4<" not in drawn
    assert "1 more without a result" in drawn and "tokens/s" in drawn
    shares = [bars(tmp_path / "time.svg", c)[0] for c in ("#2171b5", "#d94801", "#c6c6c6")]
    assert shares == pytest.approx([sum(shares) * s for s in (0.5, 0.3, 0.2)], rel=0.01)
    assert {file.name for file in tmp_path.glob("*.svg")} == {"throughput.svg", "memory.svg", "time.svg"}


def test_nothing_to_draw_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot_results.main([str(tmp_path)]) == 2
    assert "has no summary.csv" in capsys.readouterr().err
    assert plot_results.main([str(summary(tmp_path, dp4=0.0))]) == 2
    assert "has a result to draw" in capsys.readouterr().err

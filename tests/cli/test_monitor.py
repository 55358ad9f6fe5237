import json
import os
from pathlib import Path

import pytest

from pentatron.cli.main import main
from pentatron.cli.monitor import newest_run
from pentatron.config.errors import UserError


def make_run(folder: Path, steps: int, total: int = 10) -> Path:
    folder.mkdir(parents=True)
    rows = [
        {"step": s, "loss": 9.0 - s, "tokens_per_second": 1234.5, "memory_bytes": 5 * 2**20, "seconds": 2.0}
        for s in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(
        f"train:\n  # eval_iters: 3\n  train_iters: {total}  # flag --train-iters\n"
    )
    return folder


def test_a_running_run_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", steps=4)
    assert main(["monitor", str(folder), "--once", "--interval", "5"]) == 0
    shown = capsys.readouterr().out
    assert "step 4/10  loss 5.0000 (mean of 4: 6.5000)" in shown
    assert "1,234 tokens/s" in shown and "5 MiB" in shown and "left 0:12" in shown


def test_a_finished_run_ends_the_watching(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", str(make_run(tmp_path / "run", steps=10))]) == 0
    assert "step 10/10" in capsys.readouterr().out


def test_without_a_folder_the_newest_run_is_watched(tmp_path: Path) -> None:
    old, new = make_run(tmp_path / "runs" / "old", 2), make_run(tmp_path / "output_3d_parallel", 2)
    os.utime(old / "metrics.jsonl", (1, 1))
    assert newest_run(tmp_path) == new
    os.utime(new / "metrics.jsonl", (0, 0))
    assert newest_run(tmp_path) == old


def test_nothing_to_watch_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="there is no run"):
        newest_run(tmp_path)
    assert main(["monitor", str(tmp_path)]) == 2
    assert "holds no metrics.jsonl" in capsys.readouterr().err


def test_a_wrong_flag_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", "--intervall", "3"]) == 2
    assert "did you mean --interval?" in capsys.readouterr().err

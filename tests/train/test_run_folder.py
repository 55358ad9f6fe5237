"""Tests a start in the folder of an earlier run that left no checkpoint."""

import json
from pathlib import Path

import pytest

from pentatron.parallel.world import single_process
from pentatron.train.session import run_training
from tests.support import LLAMA, resolved

QUICK = f"{LLAMA} --no-save-checkpoints --log-interval 1"


def train(words: str, folder: Path) -> None:
    run_training(resolved(f"{QUICK} {words} --run-dir {folder}"), single_process(), resumes=True)


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_metrics_of_another_run_are_kept_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--train-iters 2", tmp_path)
    capsys.readouterr()
    train("--train-iters 3 --hidden-size 64", tmp_path)
    said = capsys.readouterr().out
    assert f"note: another run was in {tmp_path} and left no checkpoint" in said and "--run-dir" in said
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3]
    assert steps(tmp_path / "metrics.1.jsonl") == [1, 2]


def test_the_same_run_computes_its_steps_once_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        train("--train-iters 2", tmp_path)
    assert "another run" not in capsys.readouterr().out
    assert steps(tmp_path / "metrics.jsonl") == [1, 2]
    assert not (tmp_path / "metrics.1.jsonl").exists()

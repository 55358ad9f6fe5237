"""Runs a sweep of `pentatron bench` with real processes and checks its files."""

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pentatron.bench.fork_server import ForkServer, RankExits
from pentatron.cli.bench_worker import BenchJob, reason_of_failure
from pentatron.cli.main import main
from pentatron.settings.entry_points import TRAIN

TINY = "--num-layers 2 --hidden-size 24 --num-attention-heads 3 --seq-length 16 --vocab-size 64".split()


def test_a_sweep(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    really = ForkServer.run

    def one_fails(starter: ForkServer, target: Any, arguments_of: Any, *rest: Any) -> RankExits:
        if "--context-parallel-size" in arguments_of(0)[0].words:
            return RankExits([0, 3])
        return really(starter, target, arguments_of, *rest)

    monkeypatch.setattr(ForkServer, "run", one_fails)
    words = ["bench", "--nproc-per-node", "2", *TINY, "--steps", "2", "--warmup=1", "--device", "cpu"]
    assert main(words) == 0
    shown = capfd.readouterr().out
    with Path("benchmark_results/summary.csv").open(newline="") as file:
        rows = {row["layout"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["dp2", "tp2", "cp2", "pp2"]
    failed = rows.pop("cp2")
    assert failed["status"] == "failed" and failed["reason"].startswith("exit codes [0, 3]; see ")
    refused = rows.pop("tp2")
    assert refused["status"] == "refused" and "3" in refused["reason"] and not refused["tokens_per_second"]
    assert f"tp2     refused: {refused['reason']}" in shown
    for name, row in rows.items():
        assert row["status"] == "ok" and row["steps"] == "2", row
        speed, seconds = float(row["tokens_per_second"]), float(row["step_seconds"])
        assert speed * seconds == pytest.approx(4 * 16, rel=0.01)
        assert float(row["samples_per_second"]) * 16 == pytest.approx(speed, rel=0.01)
        parts = float(row["collective_share"]) + float(row["pipeline_wait_share"])
        assert 0 < float(row["communication_share"]) < 1
        assert float(row["communication_share"]) == pytest.approx(parts, abs=2e-4)
        assert (float(row["pipeline_wait_share"]) > 0) == (name == "pp2")
        memory = [float(m) for m in row["memory_mib_of_ranks"].split()]
        assert len(memory) == 2 and max(memory) == float(row["memory_mib_per_rank"]) > 50
        assert float(row["teraflops_per_process"]) >= 0 and row["mfu"] == ""
    assert "no GPU is used" in shown and "fastest: " in shown and "least memory: " in shown
    assert not list(Path("benchmark_results").rglob("checkpoints")), "nothing is saved"
    for name in ("throughput.svg", "memory.svg", "time.svg"):
        assert (tmp_path / "benchmark_results" / name).stat().st_size > 500
    # `pentatron config` accepts the command in a row.
    command = rows["pp2"]["command"].split()
    assert command[:2] == ["pentatron", "train"] and "--global-batch-size" in command
    assert main(["config", *command[2:]]) == 0
    capfd.readouterr()

    # Earlier results are kept, and a timeout ends only its own layout.
    before = Path("benchmark_results/summary.csv").read_text()
    again = ["bench", "--nproc-per-node", "2", *TINY, "--pp_size", "2", "--layout-timeout", "0.05"]
    assert main([*again, "--device", "cpu"]) == 1
    assert Path("benchmark_results.1/summary.csv").read_text() == before
    assert "timed out after 0 s" in Path("benchmark_results/summary.csv").read_text()


def test_list_of_candidates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--nproc-per-node", "8", "--device", "cpu", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 20 and not any("refused" in line for line in lines)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--variants zeroes", "--variants zeroes is unknown"),
        ("--tp_size 3", "no layout of 2 processes has the given sizes"),
        ("--nproc-per-node 0", "--nproc-per-node 0 must be more than 0"),
        ("--steps 0", "--steps 0 must be 1 or more"),
        ("--setp_size 3", "unknown flag --setp_size"),
    ],
)
def test_mistakes_are_sentences(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--nproc-per-node", "2", "--device", "cpu", *words.split()]) == 2
    assert sentence in capsys.readouterr().err


def test_foreign_files_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    words = ["bench", "--nproc-per-node", "2", "--device", "cpu", "--out", str(tmp_path)]
    assert main(words) == 2
    assert "contains files that are not a benchmark's" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_under_a_launcher_it_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["bench"]) == 2
    assert "starts its processes itself" in capsys.readouterr().err


def test_the_script_passes_the_number_on(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = {
        "NUM_GPUS": "4",
        "PYTHON": sys.executable,
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(root),
    }
    words = ["bash", str(root / "benchmark.sh"), "--device", "cpu", "--list"]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.splitlines()) == 10


def test_the_reason_is_that_of_the_rank_that_failed_by_itself(tmp_path: Path) -> None:
    job = BenchJob([], TRAIN, 3, 1, tmp_path)
    assert reason_of_failure(job) is None
    job.output(0).write_text("step 1\npentatron: rank 0: lost contact with another rank (Broken pipe)\n")
    assert reason_of_failure(job) == "rank 0: lost contact with another rank (Broken pipe)"
    assert reason_of_failure(job, "rank 1 was killed by SIGABRT") == "rank 1 was killed by SIGABRT"
    trace = "Traceback (most recent call last):\n  File\ntorch.OutOfMemoryError: CUDA out of memory.\n"
    job.output(2).write_text(f"note: a word\n{trace}")
    assert reason_of_failure(job) == "rank 2: torch.OutOfMemoryError: CUDA out of memory."
    job.output(1).write_text("pentatron: the loss is nan\n")
    assert reason_of_failure(job) == "rank 1: the loss is nan"


@pytest.mark.parametrize(("flag", "instead"), [("--train-iters", "--steps"), ("--run-dir", "--out")])
def test_settings_chosen_by_the_benchmark_are_refused(
    flag: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--list", "--device", "cpu", flag, "7"]) == 2
    assert f"{flag} cannot be set in a benchmark; use {instead}" in capsys.readouterr().err


def test_where_no_layout_can_run_no_pictures_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--nproc-per-node 2 --device cpu --hidden-size 64 --num-attention-heads 3 --steps 1"
    assert main(["bench", *words.split(), "--out", str(tmp_path / "out")]) == 1
    assert f"results: {tmp_path / 'out' / 'summary.csv'}\n" in capsys.readouterr().out

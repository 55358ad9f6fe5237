"""Tests the log and the progress, performance and memory files of a run."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pentatron.layout.ranks import Grid
from pentatron.parallel.world import create_groups, single_process
from pentatron.train.session import run_training
from tests.harness import distributed
from tests.train.test_session import settings

FILES = (
    "--log-progress --save-performance-summary --monitor-memory-continuously --memory-monitor-interval 0.05"
)


@distributed(world=2)
def test_one_log_and_every_file_that_was_asked_for(tmp_path: Path) -> None:
    words = (
        f"--tensor-model-parallel-size 2 --log-throughput --tensorboard-dir {tmp_path}/tb {FILES} --job-id 77"
    )
    rank = dist.get_rank()
    world = create_groups(Grid(tensor=2), rank, rank, torch.device("cpu"))
    run_training(settings(tmp_path / "a", words, 2), world, True)
    dist.barrier()
    log = (tmp_path / "a" / "train.log").read_text()
    parts = (
        r"-{24} arguments -{24}\n  accumulate_allreduce|-{24} arguments -{24}\n  a",
        r"using world size: 2, data-parallel size: 1, context-parallel size: 1, tensor-model-parallel size: 2, pipeline",
        r" > number of parameters on \(tensor, pipeline\) model parallel rank \(0, 0\): \d+\n",
        r" > number of parameters on \(tensor, pipeline\) model parallel rank \(1, 0\): \d+\n",
        r"Theoretical memory footprints: weight and optimizer=[\d.]+ MB, activation=[\d.]+ MB, total=[\d.]+ MB\n",
        r"planned memory by pipeline rank \(MB\): [\d.]+ \(weights .* at most\)\n",
        r" iteration        1/       6 \|",
        r"\[Rank 0\] \(after 1 iterations\) memory \(MB\) \| resident: [\d.]+ \| max resident: [\d.]+\n\[Rank 1\]",
        r" iteration        2/       6 \|.*throughput per GPU",
        r"  successfully saved checkpoint from iteration       2 to ",
        r" validation loss at iteration 3 \| lm loss value",
        r" iteration        6/       6 \|",
    )
    assert "loss.svg, performance_summary.json, memory/), checkpoints" in log
    at = 0
    for part in parts:
        found = re.compile(part).search(log, at)
        assert found is not None, part
        at = found.end()
    progress = (tmp_path / "a" / "checkpoints" / "progress.txt").read_text().splitlines()
    assert [line.split("\t")[1:4] for line in progress] == [
        ["Job ID: 77", "# GPUs: 2", event] for event in ["Starting job", *["Saved checkpoint"] * 3]
    ]
    summary = json.loads((tmp_path / "a" / "performance_summary.json").read_text())
    assert (
        summary["tensor_parallel"] == 2 and summary["measured_steps"] == 4 and summary["precision"] == "fp32"
    )
    assert {p.name for p in (tmp_path / "a" / "memory").iterdir()} == {"rank-00000.csv", "rank-00001.csv"}
    assert list((tmp_path / "tb").iterdir())


def test_the_terminal_can_show_the_log_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_training(settings(tmp_path / "a", "--console-lines megatron"), single_process(), True)
    shown = capsys.readouterr().out
    missing = set((tmp_path / "a" / "train.log").read_text().splitlines()) - set(shown.splitlines())
    assert not missing and " iteration        2/" in shown
    run_training(settings(tmp_path / "b", "--console-lines short"), single_process(), True)
    shown = capsys.readouterr().out
    assert " iteration        2/" not in shown and "step     1/6" in shown


def test_resumed_run_keeps_its_operation_count(tmp_path: Path) -> None:
    whole = settings(tmp_path / "whole", "--log-progress")
    run_training(whole, single_process(), True)
    for steps in (3, 6):
        words = f"--log-progress --train-iters {steps} --lr-decay-iters 6"
        run_training(settings(tmp_path / "cut", words), single_process(), True)

    def operations(folder: str) -> str:
        last = (tmp_path / folder / "checkpoints" / "progress.txt").read_text().splitlines()[-1]
        return last.split("\t")[7]

    assert operations("cut") == operations("whole") and "e+" in operations("whole")

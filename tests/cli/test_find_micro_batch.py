"""`pentatron bench --find-micro-batch`: the sizes tried, the output, and the resulting command."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pentatron.bench.candidates import MicroBatch
from pentatron.bench.results import Measured, Row
from pentatron.cli import bench
from pentatron.cli.main import main
from pentatron.plan.memory import memory_of

TINY = "--num-layers 2 --hidden-size 24 --num-attention-heads 3 --seq-length 16 --vocab-size 64".split()
ALONE = ["bench", "--find-micro-batch", *TINY, "--nproc-per-node", "1"]


def test_without_a_gpu_it_is_foreseen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "host_memory", lambda: (2**30, 40 * 2**20))
    assert main([*ALONE, "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "no steps are run" in shown and not list(tmp_path.iterdir())
    size = int(re.search(r"largest: (\d+)", shown)[1])  # type: ignore[index]
    command = shown.strip().splitlines()[-1].split()
    assert command[:2] == ["pentatron", "train"]
    assert command[-4:] == ["--micro-batch-size", str(size), "--global-batch-size", str(size)]

    def planned(micro_batch: int) -> float:
        words = [
            *TINY,
            "--device",
            "cpu",
            "--nproc-per-node",
            "1",
            "--dataset-size",
            "10",
            "--train-iters",
            "1",
        ]
        sizes = ["--micro-batch-size", str(micro_batch), "--global-batch-size", str(micro_batch)]
        from pentatron.cli.configure import prepare
        from pentatron.settings.entry_points import TRAIN

        entry = dataclasses.replace(TRAIN, default_preset=None)
        return memory_of(prepare([*words, *sizes], entry).resolved.config).largest.total

    room = 0.95 * 40 * 2**20
    assert planned(size) <= room < planned(size + 1)


def on_a_gpu_of(room: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fakes a GPU with `room` bytes, where a sample needs 10**6; returns the list of sizes tried."""
    tried: list[int] = []

    def measured(sweep: Any, layout: MicroBatch, starter: Any, live: Any) -> Row:
        tried.append(layout.size)
        if 10**6 * layout.size > room:
            return Row(layout, "failed", 1, "", "out of GPU memory (Tried to allocate 2 GiB); see x")
        found = Measured(0.1, 1.0, 1000.0 + layout.size, [10**6 * layout.size], None, None, None, 4)
        return Row(layout, "ok", 1, "", measured=found)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(bench, "_query_gpu", lambda code: "Some GPU")
    monkeypatch.setattr(bench, "measure_layout", measured)
    monkeypatch.setattr(bench._MicroBatchSearch, "room", lambda search: float(room))
    return tried


def test_real_steps_decide_on_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    tried = on_a_gpu_of(21_500_000, monkeypatch)
    assert main(ALONE) == 0
    shown = capsys.readouterr().out
    assert "largest: 21;" in shown and {21, 22} <= set(tried)
    # The search starts at the estimate, which is far too large here.
    assert f"`pentatron plan`: {tried[0]}" in shown and tried[0] > 21
    assert (tmp_path / "benchmark_results/summary.csv").read_text().count("out of GPU memory") >= 1
    kept = json.loads((tmp_path / "benchmark_results/micro_batch.json").read_text())
    assert (
        kept["largest"] == 21
        and kept["foreseen"] == tried[0]
        and kept["settings"].startswith("--num-layers 2")
    )
    assert [trial["size"] for trial in kept["trials"]] == tried
    # With a given global batch size, only its divisors are tried.
    tried.clear()
    assert main([*ALONE, "--global-batch-size", "32"]) == 0
    assert "largest: 16;" in capsys.readouterr().out and set(tried) <= {1, 2, 4, 8, 16, 32}
    tried.clear()
    assert main([*ALONE, "--gradient-accumulation-steps", "2"]) == 0
    assert "largest: 21;" in capsys.readouterr().out


def test_in_fp8_only_micro_batches_of_so_many_tokens_are_tried(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    tried = on_a_gpu_of(21_500_000, monkeypatch)
    fp8 = [*ALONE, "--bf16", "--fp8", "e4m3", "--seq-length", "24"]
    assert main(fp8) == 0
    assert "largest: 20;" in capsys.readouterr().out and tried and not any(size % 2 for size in tried)
    tried.clear()
    assert main([*fp8, "--global-batch-size", "12"]) == 0
    assert "largest: 12," in capsys.readouterr().out and set(tried) <= {2, 4, 6, 12}
    # No size divides this batch: the error lists possible lengths.
    assert main([*fp8, "--global-batch-size", "9"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "use a multiple of 2 for --micro-batch-size, or one of 16 for --seq-length" in said


def test_other_failures_are_not_taken_for_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    on_a_gpu_of(10**9, monkeypatch)
    broken = Row(MicroBatch(1), "failed", 1, "", "rank 0: no kernel image is available; see x")
    monkeypatch.setattr(bench, "measure_layout", lambda *_: broken)
    assert main(ALONE) == 2
    assert "no kernel image is available" in capsys.readouterr().err


def test_given_micro_batch_size_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ALONE, "--device", "cpu", "--micro-batch-size", "4"]) == 2
    assert "leave it out" in capsys.readouterr().err


def test_a_size_that_is_refused_is_one_that_does_not_fit() -> None:
    refused = Row(MicroBatch(1, size=8), "refused", 1, "", "needs 4 or more micro-batches")
    assert bench.trial_of(8, refused).reason == "needs 4 or more micro-batches"


@pytest.mark.parametrize("words", [["--list"], ["--variants", "zero1"]])
def test_it_tries_one_layout(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ALONE, *words]) != 0
    assert "--find-micro-batch measures one layout" in capsys.readouterr().err

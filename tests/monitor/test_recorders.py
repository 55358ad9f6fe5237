"""Reads the files of every recorder back with the readers they are meant for."""

import json
import mmap
import struct
import sys
import time
from pathlib import Path

import pytest
import torch

from pentatron.monitor.memory import MemorySampler, memory_scalars
from pentatron.monitor.recorder import PerformanceSummary, ProgressFile, earlier_seconds
from pentatron.monitor.trackers import (
    OptionalScalars,
    TensorBoard,
    WandbDestination,
    WeightsAndBiases,
    scalars,
)
from pentatron.train.run_header import arguments_block
from tests.monitor.test_log_lines import report


def test_numbers_have_megatrons_names() -> None:
    found = {n for n, *_ in scalars(report(1, skipped_samples=4), 2.0, OptionalScalars(True, True, 8, True))}
    both = ["learning-rate", "batch-size", "lm loss", "loss-scale", "grad-norm", "lm loss validation"]
    both.append("lm loss validation ppl")
    once = {"skipped-train-samples", "world-size", "mem-max-allocated-bytes", "throughput", "iteration-time"}
    assert found == once | {"tokens-per-second"} | {n for name in both for n in (name, f"{name} vs samples")}
    rates = {
        name: value
        for name, value, _ in scalars(
            report(1, learning_rate=1.0, next_learning_rate=2.0), None, OptionalScalars()
        )
    }
    assert rates["learning-rate"] == rates["learning-rate vs samples"] == 2.0, "the one that the log shows"
    plain = {name for name, *_ in scalars(report(1), None, OptionalScalars())}
    assert not plain & once and not any("validation" in name for name in plain)


def test_memory_of_a_gpu_has_megatrons_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 6)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"allocation.all.current": 7})
    found = memory_scalars(torch.device("cuda"))
    assert found.pop("mem-resident-bytes") > 0
    assert found == {"mem-allocated-bytes": 5, "mem-reserved-bytes": 6, "mem-allocated-count": 7}
    assert set(memory_scalars(torch.device("cpu"))) == {"mem-resident-bytes"}


def test_tensorboard_reads_the_written_values(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path, {"hidden_size": 64}, OptionalScalars(), interval=2, step=0)
    for step in (1, 2, 3):
        board.record(report(step, loss=float(step), consumed_samples=10 * step), 0.5 if step == 3 else None)
    board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    losses = [(e.step, e.value) for e in events.Scalars("lm loss")]
    assert losses == [(2, 2.0), (3, 3.0)], "every second step, and the one with a validation"
    assert [e.step for e in events.Scalars("lm loss vs samples")] == [20, 30]
    assert [e.value for e in events.Scalars("lm loss validation")] == [0.5]
    assert "hidden_size/text_summary" in events.Tags()["tensors"]


def test_steps_that_are_computed_again_replace_the_lost_ones(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for begins_at, value in ((0, 1.0), (2, 5.0)):
        board = TensorBoard(tmp_path, {}, OptionalScalars(), interval=1, step=begins_at)
        for step in range(begins_at + 1, 5):
            board.record(report(step, loss=value), None)
        board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("lm loss")] == [(1, 1.0), (2, 1.0), (3, 5.0), (4, 5.0)]


def records_of(file: Path) -> list[bytes]:
    """Returns the records in a file of wandb's service.

    A header of 7 bytes is followed by blocks of 32 KiB, which hold pieces of records.
    """
    found, begun = [], b""
    data, at, block = file.read_bytes(), 7, 32768
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        begun += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            found.append(begun)
            begun = b""
    return found


def test_wandb_keeps_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs wandb's real service process without a network and reads the file it writes."""
    wandb_internal_pb2 = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    key = f"hf_{'k' * 24}"
    typed = ["pentatron", "train", "--job-id", key, "--hidden-size", "64"]
    monkeypatch.setattr("sys.argv", typed)
    place = WandbDestination("small", f"first {key}", None, tmp_path / "wandb-files")
    run = WeightsAndBiases(place, {"model": {"hidden_size": 64}}, OptionalScalars(), interval=1)
    for step in (1, 2):
        run.record(report(step, loss=4.0 / step), None)
    run.close()
    [file] = tmp_path.rglob("*.wandb")
    rows: list[dict[str, float]] = []
    # The service reports its end a moment before it has written the last records.
    for _ in range(200):
        records = [wandb_internal_pb2.Record.FromString(data) for data in records_of(file)]
        histories = [record.history.item for record in records if record.HasField("history")]
        rows = [{i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in h} for h in histories]
        if any(record.HasField("exit") for record in records):
            break
        time.sleep(0.1)
    assert [(row["_step"], row["lm loss"]) for row in rows] == [(1, 4.0), (2, 2.0)]
    assert rows[0]["samples vs steps"] == 28 and "lm loss vs samples" not in rows[0]
    assert sys.argv is typed
    holding = [path for path in tmp_path.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    assert not holding, "wandb keeps the command line and the name of a run"
    assert b"--hidden-size" in file.read_bytes(), "so the command line is there, without its secret"


def test_progress_counts_the_time_of_earlier_jobs_up_to_their_last_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "progress.txt"
    head = "Job ID: 7\t# GPUs: 2"
    path.write_text(
        f"2026-01-01 10:00:00\t{head}\tStarting job\n"
        f"2026-01-01 10:01:00\t{head}\tSaved checkpoint\tIteration: 5\n"
        f"2026-01-01 10:30:00\t{head}\tStarting job\n"
        f"2026-01-01 10:30:30\t{head}\tSaved checkpoint\tIteration: 9\n"
        f"2026-01-01 10:40:00\t{head}\tStart"
    )
    assert earlier_seconds(path) == 90
    path.unlink()
    file = ProgressFile(path, "8", devices=2, flops_before=1e15)
    file.record(report(10, flops=1e15, consumed_tokens=3_000_000_000), None)
    file.saved(10)
    start, save = path.read_text().splitlines()
    assert start.split("\t")[1:] == ["Job ID: 8", "# GPUs: 2", "Starting job"]
    # Without a job id, as outside Slurm, the field is empty, as in Megatron.
    ProgressFile(path, "", devices=2, flops_before=0)
    assert path.read_text().splitlines()[-1].split("\t")[1] == "Job ID: "
    words = save.split("\t")
    assert words[3:5] == ["Saved checkpoint", "Iteration: 10"]
    assert words[5].startswith("Job throughput: ") and words[6].startswith("Cumulative throughput: ")
    assert words[7:] == ["Floating-point operations: 2.00e+15", "Tokens (in billions): 3.00"]


def test_the_performance_summary_leaves_out_the_first_steps(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    summary = PerformanceSummary(path, {"device": "CPU"})
    for step, seconds in enumerate((30.0, 5.0, 1.0, 1.0, 4.0), start=1):
        summary.record(report(step, seconds=seconds, peak_teraflops=100.0), None)
    summary.close()
    found = json.loads(path.read_text())
    assert found["device"] == "CPU" and found["steps"] == 5 and found["measured_steps"] == 3
    assert found["step_seconds"] == {"mean": 2.0, "median": 1.0, "fastest": 1.0, "slowest": 4.0}
    assert found["tokens_per_second"] == 2048 and found["samples_per_second"] == 2
    assert found["model_flops_utilisation"] == pytest.approx(3 * 12.34 / 6 / 2 / 100, abs=1e-4)


def test_a_summary_is_json_also_where_a_loss_is_no_number(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    summary = PerformanceSummary(path, {})
    summary.record(report(1, loss=float("nan")), None)
    summary.close()
    assert "NaN" not in path.read_text() and json.loads(path.read_text())["first_loss"] is None


def test_a_run_without_steps_has_no_summary(tmp_path: Path) -> None:
    PerformanceSummary(tmp_path / "summary.json", {}).close()
    assert not list(tmp_path.iterdir())


def test_memory_is_sampled_while_something_else_runs(tmp_path: Path) -> None:
    path = tmp_path / "memory" / "rank-00000.csv"
    sampler = MemorySampler(path, torch.device("cpu"), 0.01, print)
    before = sampler.peak["resident"]
    # mmap allocates new pages; an allocator may reuse freed memory that the process still holds.
    block = mmap.mmap(-1, 64 * 2**20)
    block[:: mmap.PAGESIZE] = b"1" * (len(block) // mmap.PAGESIZE)
    while sampler.peak["resident"] < before + 48 * 2**20:
        assert len(path.read_text().splitlines()) < 2000, "the block was never seen"
        time.sleep(0.01)
    block.close()
    sampler.close()
    sampler.close()
    names, *rows = [line.split(",") for line in path.read_text().splitlines()]
    assert names == ["seconds", "resident_bytes"]
    seconds = [float(row[0]) for row in rows]
    assert seconds == sorted(seconds) and len(rows) >= 3


def test_settings_are_listed_as_megatron_lists_them() -> None:
    block = arguments_block({"seq_length": 128, "Bf16": True, "adam_eps": 1e-8}).splitlines()
    assert block[0] == "------------------------ arguments ------------------------"
    assert [line.split()[0] for line in block[1:-1]] == ["adam_eps", "Bf16", "seq_length"], (
        "without regard to case"
    )
    assert block[1] == "  adam_eps " + "." * 40 + " 1e-08"


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="a device of Linux")
def test_unwritable_memory_samples_are_reported_and_end_nothing() -> None:
    told: list[str] = []
    sampler = MemorySampler(Path("/dev/full"), torch.device("cpu"), 0.01, told.append)
    time.sleep(0.05)
    assert sampler._thread.is_alive(), "there may be room later"
    sampler.close()
    assert told == ["warning: /dev/full lacks rows that could not be written (No space left on device)"]


def test_a_line_of_progress_that_was_cut_short_swallows_no_other(tmp_path: Path) -> None:
    path = tmp_path / "progress.txt"
    ProgressFile(path, "7", 1, 0.0)
    path.write_bytes(path.read_bytes()[:-5])
    ProgressFile(path, "7", 1, 0.0)
    lines = path.read_text().splitlines()
    assert len(lines) == 2 and lines[1].endswith("Starting job")

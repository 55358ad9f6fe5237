"""Lists every layout of a number of processes, each once."""

import csv
import itertools
import json
import math
from pathlib import Path

import pytest

from pentatron.bench.candidates import Candidate, all_layouts, default_sizes
from pentatron.bench.results import Measured, Row, Table, measure, summary_lines, write_summary
from pentatron.errors import UserError


@pytest.mark.parametrize("processes", [1, 6, 8])
def test_all_of_them_and_each_once(processes: int) -> None:
    found = {(c.data, c.tensor, c.context, c.pipeline) for c in all_layouts(processes, None, {}, ())}
    sizes = range(1, processes + 1)
    wanted = {s for s in itertools.product(sizes, repeat=4) if math.prod(s) == processes}
    assert found == wanted and len(all_layouts(processes, None, {}, ())) == len(wanted)


def test_experts_variants_and_given_sizes() -> None:
    with_experts = all_layouts(4, 4, {}, ())
    assert {c.expert for c in with_experts if c.data == 4} == {1, 2, 4}
    assert {c.expert for c in with_experts if c.pipeline == 4} == {1}
    assert {c.name for c in all_layouts(4, None, {"tensor": 2}, ())} == {"dp2 tp2", "tp2 cp2", "tp2 pp2"}
    varied = all_layouts(2, None, {}, ("zero", "sp"))
    assert [c.name for c in varied] == [
        *("dp2", "dp2 zero1", "dp2 zero2", "dp2 zero3", "tp2", "tp2 sp"),
        *("cp2", "cp2 zero1", "cp2 zero2", "cp2 zero3", "pp2"),
    ]
    assert len({c.name for c in varied}) == len(varied)
    with pytest.raises(UserError, match="--variants zeros is unknown"):
        all_layouts(2, None, {}, ("zeros",))


def test_a_layout_in_words() -> None:
    layout = Candidate(data=2, tensor=4, zero=1, sequence=True)
    assert layout.name == "dp2 tp4 sp zero1"
    assert layout.words == [
        *("--tensor-model-parallel-size", "4", "--zero-stage", "1", "--sequence-parallel"),
    ]
    assert Candidate(1).name == "one process"


@pytest.mark.parametrize("processes", [1, 2, 3, 6, 8, 48])
def test_the_model_made_up_suits_every_axis(processes: int) -> None:
    for on_gpu in (False, True):
        sizes = default_sizes(processes, on_gpu)
        assert sizes["num_attention_heads"] % processes == 0 and sizes["num_layers"] % processes == 0
        assert sizes["hidden_size"] % sizes["num_attention_heads"] == 0
        assert sizes["seq_length"] % (2 * processes) == 0
        assert sizes["global_batch_size"] % (sizes["micro_batch_size"] * processes) == 0


def test_measurement_of_a_metrics_file(tmp_path: Path) -> None:
    def row(step: int, seconds: float, waited: float) -> dict[str, object]:
        ranks = {
            "busy_seconds": [seconds - waited, seconds],
            "collective_seconds": [waited, 0.0],
            "message_seconds": [0.0, 0.0],
            "memory_bytes": [step * 2**20, 5 * 2**20],
        }
        return {"step": step, "seconds": seconds, "tokens": 640, "ranks": ranks}

    rows = [row(1, 100.0, 90.0), row(2, 2.0, 1.0), row(3, 4.0, 1.0), row(4, 2.0, 1.0)]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = measure(file, warmup=1, batch=10)
    assert (found.step_seconds, found.samples_per_second, found.tokens_per_second) == (2.0, 5.0, 320.0)
    assert found.memory_bytes == [4 * 2**20, 5 * 2**20] and found.steps == 3
    assert found.communication_share == pytest.approx(3 / 16) and found.pipeline_wait_share == 0.0
    # Without waiting times there is no communication share.
    for r in rows:
        r["ranks"] = {"memory_bytes": [1, 2]}
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert measure(file, warmup=1, batch=10).communication_share is None
    with pytest.raises(UserError, match="no step after"):
        measure(file, warmup=4, batch=10)


def test_the_table_and_its_conclusions(tmp_path: Path) -> None:
    def ran(name: int, speed: float, waited: float, percent: float, mib: int) -> Row:
        memory = [mib * 2**20, 2**20]
        found = Measured(2.0, speed / 10, speed, memory, waited, 0.05, percent, steps=4)
        return Row(
            Candidate(name), "ok", 2, "", measured=found, teraflops=123.4, mfu=0.4, device="NVIDIA H100"
        )

    refused = Row(Candidate(1, tensor=2), "refused", 2, "", "3 heads, 2 ranks")
    rows = [ran(2, 1000.0, 0.10, 95.0, 900), ran(4, 800.0, 0.30, 60.0, 500), refused]
    table = Table([row.candidate.name for row in rows], on_gpu=True)
    heads, line = table.header().split(), table.line(rows[0]).split()
    told = dict(zip(heads, [*line[:3], " ".join(line[3:5]), *line[5:]]))
    assert told == {
        "layout": "dp2",
        "samples/s": "100.0",
        "tokens/s": "1,000",
        "step": "2000 ms",
        "MiB/rank": "900",
        "comm.": "15%",
        "GPU": "95%",
        "TFLOP/s": "123",
        "MFU": "40%",
    }
    assert table.line(refused) == "tp2     refused: 3 heads, 2 ranks"
    told_at_the_end = summary_lines(rows)
    assert told_at_the_end[0].startswith("fastest: dp2") and told_at_the_end[1].startswith(
        "least memory: dp4"
    )
    assert "below 20% of the step, the usual aim: 1 of 2 layouts" in told_at_the_end[2]
    assert "utilisation above 80%, the usual aim: 1 of 2 layouts" in told_at_the_end[3]
    assert summary_lines([refused]) == ["no layout completed"]
    write_summary(tmp_path / "summary.csv", rows)
    with (tmp_path / "summary.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    assert cells[0]["mfu"] == "0.4" and cells[0]["gpu_utilisation"] == "95.0"
    assert cells[2]["reason"] == "3 heads, 2 ranks" and cells[2]["tokens_per_second"] == ""


def test_a_layout_without_sequence_parallelism_says_so() -> None:
    found = all_layouts(2, None, {"tensor": 2}, ["sp"])
    words = {tuple(word for word in c.words if "sequence" in word) for c in found}
    assert words == {("--sequence-parallel",), ("--no-sequence-parallel",)}

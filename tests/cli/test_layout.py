"""Tests `pentatron layout`: tables, drawing and JSON match the layout, and no process starts."""

import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.dom import minidom

import pytest

from pentatron.cli.layout import draw_svg, draw_text, resolve_layout
from pentatron.cli.layout_report import as_data, as_text
from pentatron.cli.main import COMMANDS, main
from pentatron.layout.check import check
from pentatron.layout.schedules import training_schedule

SIXTEEN = "--world-size 16 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2"


def show(capsys: pytest.CaptureFixture[str], words: str) -> str:
    assert main(["layout", *words.split()]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def data(capsys: pytest.CaptureFixture[str], words: str) -> dict[str, Any]:
    found = json.loads(show(capsys, f"{words} --json"))
    assert isinstance(found, dict)
    return found


def refused(capsys: pytest.CaptureFixture[str], words: str) -> str:
    assert main(["layout", *words.split()]) == 2
    return capsys.readouterr().err


def test_it_is_a_command() -> None:
    assert "layout" in COMMANDS


def test_everything_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    text = show(capsys, f"{SIXTEEN} --draw")
    assert text.startswith("16 processes = 4 tensor × 2 pipeline × 1 context × 2 data\n")
    table = re.findall(r"^ +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)$", text, re.MULTILINE)
    assert len(table) == 16
    assert [tuple(map(int, row)) for row in table][:10:3] == [
        (0, 0, 0, 0, 0), (3, 3, 0, 0, 0), (6, 2, 0, 1, 0), (9, 1, 0, 0, 1),
    ]  # fmt: skip
    assert re.search(r"tensor .*\n +0-3  4-7  8-11  12-15\n", text)
    assert re.search(r"data .*\n +0,4  1,5  2,6  3,7  8,12  9,13  \.\.\. 8 in all\n", text)
    assert "1f1b: 4 micro-batches on 2 pipeline ranks" in text
    assert "waiting: 20.0% of the ranks' time (15 steps" in text
    assert "rank 0 ▕F0 F1 ·  ·  B0─── F2 B1─── F3 B2─── ·  B3─── ▏" in text
    assert "rank 1 ▕·  F0 B0─── F1 B1─── F2 B2─── F3 B3─── ·  ·  ▏" in text
    assert "no model is named: this shape is assumed" in text


def test_no_escape_codes_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert "\x1b" not in show(capsys, f"{SIXTEEN} --draw")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, f"{SIXTEEN} --nproc-per-node 8 --num-layers 8 --vocab-size 100 --num-microbatches 6")
    assert found["world_size"] == 16 == len(found["ranks"])
    assert {k: found["sizes"][k] for k in ("tensor", "pipeline", "context", "data")} == {
        "tensor": 4, "pipeline": 2, "context": 1, "data": 2,
    }  # fmt: skip
    assert [row["machine"] for row in found["ranks"]] == [0] * 8 + [1] * 8
    assert found["groups"]["pipeline"][0] == [0, 8]
    assert [stage["layers"] for stage in found["stages"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sum(stage["share"] for stage in found["stages"]) == pytest.approx(1)
    schedule = found["schedule"]
    checked = check(training_schedule("1f1b", 2, 1, 6))
    assert (schedule["kind"], schedule["micro_batches"], tuple(schedule["alive"])) == (
        "1f1b",
        6,
        checked.in_flight,
    )
    assert schedule["bubble"] == checked.bubble
    assert len(schedule["timeline"][0]) == 12
    assert not found["model_is_made_up"]


@pytest.mark.parametrize(
    ("words", "world"),
    [
        ("", 1),
        ("--tp_size 2 --pp_size 3", 6),
        ("--tp_size 2 --data-parallel-size 4", 8),
        ("--nproc-per-node 4 --tp_size 2", 4),
        ("--preset demo", 4),
        ("--preset demo --nproc-per-node 1", 1),
        ("--preset llama3-8b --tp_size 8", 8),
    ],
)
def test_number_of_processes(words: str, world: int) -> None:
    assert resolve_layout(words.split()).grid.world_size == world


@pytest.mark.parametrize("tensor", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("pipeline", [1, 2, 7])
@pytest.mark.parametrize("virtual", [1, 3])
def test_assumed_model_fits_every_layout(tensor: int, pipeline: int, virtual: int) -> None:
    words = f"--tp_size {tensor} --pp_size {pipeline} --sequence-parallel"
    if pipeline > 1:
        words += f" --virtual-pipeline-model-parallel-size {virtual}"
    report = resolve_layout(words.split())
    assert report.is_assumed_model
    assert len(report.config.stages) == pipeline * (virtual if pipeline > 1 else 1)


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        ("--pp_size 2 --pipeline-model-parallel-layout Ettt|ttL", [3, 2]),
        ("--pp_size 2 --decoder-first-pipeline-num-layers 9", [9, 4]),
        ("--pp_size 2 --num-layers-per-virtual-pipeline-stage 3", [3, 3, 3, 3]),
        ("--pp_size 2 --num-layers 3 --vocab-size 10", [2, 1]),
    ],
)
def test_assumed_model_follows_the_pipeline_settings(words: str, layers: list[int]) -> None:
    assert [len(part.layers) for part in resolve_layout(words.split()).config.stages] == layers


def test_many_ranks_are_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--world-size 512 --tp_size 8 --pp_size 4"
    short, full = show(capsys, words), show(capsys, f"{words} --all")
    assert "488 more ranks (--all shows them)" in short and "more ranks" not in full
    assert len(short.splitlines()) < 70 < 512 < len(full.splitlines())
    assert re.search(r"^ +511 +7 +0 +15 +3$", short, re.MULTILINE)
    assert "0,8,...,120" in short and "0,8,16,24,32" in full


def test_expert_coordinates_are_shown_where_there_are_experts(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--tp_size 2 --world-size 8 --num-experts 8 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1"
    text = show(capsys, words)
    assert (
        "8 ranks of a stage = 2 tensor × 1 context × 4 data = 1 expert tensor × 4 expert × 2 expert data"
        in text
    )
    assert "expert data" in next(line for line in text.splitlines() if line.startswith("  rank"))
    assert "does not have yet" not in text
    assert "expert" not in show(capsys, "--tp_size 2")


def test_machines_are_shown_where_they_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert "machine" in show(capsys, "--world-size 4 --nproc-per-node 2")
    assert "machine" not in show(capsys, "--world-size 4")


def test_replicated_heads_and_tied_embeddings_have_groups(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--tp_size 4 --pp_size 2 --num-attention-heads 8 --num-query-groups 2"
    groups = data(capsys, words)["groups"]
    assert groups["kv"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups["embedding"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert "embedding" not in data(capsys, f"{words} --untie-embeddings-and-output-weights")["groups"]


FULL = "--pp_size 2 --num-layers 10 --recompute-granularity full --recompute-method"
EVEN = "--account-for-loss-in-pipeline-split --account-for-embedding-in-pipeline-split"


def test_layers_that_run_again_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    text = show(capsys, f"{FULL} uniform --recompute-num-layers 2 {EVEN}")
    assert (
        "recompute: these layers are recomputed; each micro-batch keeps one input for each chunk of consecutive layers"
        in text
    )
    assert "    stage  0  0-1  2-3  4: keeps 3 inputs\n    stage  1  5-6  7-8  9: keeps 3 inputs\n" in text
    assert "input gradients" not in text, "no halves of backwards here"
    text = show(capsys, f"{FULL} block --recompute-num-layers 1 {EVEN} --pipeline-schedule zero-bubble")
    assert "    stage  0  0: keeps 1 input and all of 4 layers\n" in text
    assert "until its input gradients are computed; inputs of weight gradients until those are" in text
    found = data(capsys, f"{FULL} block --recompute-num-layers 2 {EVEN}")
    assert [stage["recomputed"] for stage in found["stages"]] == [[[0], [1]], [[5], [6]]]
    assert found["recompute"] == {"granularity": "full", "modules": []}


def test_modules_that_run_again_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    text = show(capsys, "--recompute-granularity selective --recompute-modules core_attn mlp")
    assert "core_attn, mlp: recomputed in every layer that has them; only the input is kept" in text
    assert "recomputed" not in show(capsys, "--pp_size 2")


def test_folded_pipeline_needs_no_embedding_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert "embedding" in data(capsys, "--pp_size 2")["groups"]
    assert "embedding" not in data(capsys, "--pp_size 2 --pipeline-schedule zbv")["groups"]


# --- the drawing ---


def cells(lines: list[str], rank: int) -> str:
    """Returns the drawing of one rank, with all lines joined."""
    return "".join(line[line.index("▕") + 1 : -1] for line in lines if line.startswith(f"rank {rank} "))


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize(
    "words",
    [
        "--pp_size 3 --num-microbatches 12",
        "--pp_size 2 --virtual-pipeline-model-parallel-size 2",
        "--pp_size 3 --num-microbatches 12 --pipeline-schedule zero-bubble",
        "--pp_size 2 --num-microbatches 6 --pipeline-schedule dualpipev --untie-embeddings-and-output-weights",
        "",
    ],
)
def test_every_computation_is_drawn_once_and_no_line_is_too_long(words: str, width: int) -> None:
    report = resolve_layout(words.split())
    lines = draw_text(report.checked, report.config.placement, width, colours=False)
    assert all(len(line) <= width for line in lines if line.startswith(("rank", " ")))
    for rank, slots in enumerate(report.checked.timeline):
        drawn = re.findall(r"[FBIW]\d+[a-z]?", cells(lines, rank))
        own = report.config.placement.stages_of(rank)
        letters = [""] if len(own) == 1 else ["a", "b"]
        assert drawn == [
            f"{s.action.kind.value}{s.action.micro_batch}{letters[own.index(s.action.stage)]}" for s in slots
        ]


def test_columns_are_time() -> None:
    """An action at time n is drawn n cell widths from the left on every rank."""
    report = resolve_layout("--pp_size 4 --num-microbatches 8".split())
    lines = draw_text(report.checked, report.config.placement, 400, colours=False)
    for rank, slots in enumerate(report.checked.timeline):
        drawn = cells(lines, rank)
        assert len(drawn) == 3 * report.checked.time
        for slot in slots:
            label = f"{slot.action.kind.value}{slot.action.micro_batch}"
            assert drawn[3 * slot.start :].startswith(label)


def test_halves_of_backwards_are_reported() -> None:
    report = resolve_layout("--pp_size 2 --num-microbatches 4 --pipeline-schedule zero-bubble".split())
    text = as_text(report, everything=False)
    assert "of them between the halves of a split backward, at most, by rank: 1, 2" in text
    assert "(13 steps, a forward taken as 1, each half of a backward as 1)" in text
    assert as_data(report)["schedule"]["deferred"] == [1, 2]
    legend = draw_text(report.checked, report.config.placement, 80, colours=False)[-1]
    assert legend == "F0 forward, I0 input gradient, W0 weight gradient of micro-batch 0, · waiting"
    assert "brown: weight gradient" in draw_svg(report.checked, report.config.placement, "title")
    whole = resolve_layout("--pp_size 2 --num-microbatches 4".split())
    assert "halves" not in as_text(whole, everything=False)
    assert "brown" not in draw_svg(whole.checked, whole.config.placement, "title")


def test_colours_change_nothing_but_colours() -> None:
    report = resolve_layout("--pp_size 2 --virtual-pipeline-model-parallel-size 2".split())
    painted = draw_text(report.checked, report.config.placement, 80, colours=True)
    plain = draw_text(report.checked, report.config.placement, 80, colours=False)
    assert painted != plain
    assert [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in painted] == plain


def test_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "a.svg"
    text = show(capsys, f"--pp_size 3 --num-microbatches 5 --draw {file}")
    assert f"the schedule is drawn in {file}" in text and "▕" not in text
    page = minidom.parse(str(file))
    titles = [node.firstChild.data for node in page.getElementsByTagName("title")]  # type: ignore[union-attr]
    assert len(titles) == 3 * 5 * 2
    assert titles.count("forward of micro-batch 4, stage 2") == 1
    other = tmp_path / "b.svg"
    show(capsys, f"--draw={other} --pp_size 3 --num-microbatches 5")
    assert other.read_text() == file.read_text()


# --- mistakes ---


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "--tp_siz 2",
            "unknown flag --tp_siz (did you mean --tp-size?); pentatron layout --help lists them all",
        ),
        ("--draw a.png", "--draw must name a file with the extension .svg, not 'a.png'"),
        (
            "--draw /nowhere/a.svg",
            "--draw /nowhere/a.svg: No such file or directory; name a file that can be written",
        ),
        ("--world-size 6 --tp_size 4", "6 processes cannot be divided into copies of the model"),
        ("--world-size 0", "--world-size 0 must be more than 0"),
        ("--pp_size 0", "--pipeline-model-parallel-size 0 must be more than 0"),
        ("--tp_size -2", "--tensor-model-parallel-size -2 must be more than 0"),
        ("--num-attention-heads 6 --tp_size 4", "--num-attention-heads 6 is not divisible by"),
        ("--num-layers 3 --pp_size 4", "--num-layers 3 cannot fill the 4 stages"),
        (
            "--pp_size 2 --pipeline-model-parallel-layout Et|m|L",
            "m (multi-token prediction) is not available",
        ),
        ("--preset llama", "unknown preset 'llama'"),
        ("--batch-size 3", "--batch-size is ambiguous here"),
    ],
)
def test_a_mistake_is_one_sentence(capsys: pytest.CaptureFixture[str], words: str, sentence: str) -> None:
    assert sentence in refused(capsys, words)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = show(capsys, "--help")
    assert text.startswith("usage: pentatron layout ")
    for flag in (
        "--world-size",
        "--draw",
        "--all",
        "--json",
        "--tensor-model-parallel-size",
        "--pipeline-schedule",
    ):
        assert flag in text


def test_torch_stays_out(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `import torch` fail."""
    monkeypatch.setitem(sys.modules, "torch", None)
    show(capsys, f"{SIXTEEN} --draw")

"""Tests `pentatron plan`: reports on real models, commands that run, and no import of torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pentatron.cli.main import main
from pentatron.cli.plan import as_data, plan_layouts
from pentatron.cli.plan_report import PlanReport, as_text, command_words, training_command_lines
from pentatron.errors import ConfigError, UserError
from pentatron.plan.advice import SUGGESTED_BY_SIZE, TABLE_3D
from pentatron.plan.search import Layout
from pentatron.settings.entry_points import TRAIN
from pentatron.settings.resolve import gather, resolve
from pentatron.settings.settings import ProcessFacts

SMALL = "--num-layers 4 --hidden-size 256 --seq-length 128 --vocab-size 1000 --global-batch-size 16"


def plan(words: str) -> PlanReport:
    return plan_layouts(words.split())[0]


def settings_words(layout: Layout) -> list[str]:
    return [word for part in command_words(layout) for word in part]


@pytest.fixture(scope="module")
def llama() -> PlanReport:
    return plan("--preset llama3-8b --gpus 8 --gpu h100")


def test_the_page_has_everything_in_its_place(llama: PlanReport) -> None:
    text = as_text(llama)
    places = [
        text.index(part)
        for part in (
            "llama3-8b on 8 × H100",
            "8.03 B parameters",
            "Decision tree",
            "Does it fit one GPU?",
            "Layouts that fit",
            "activations  ",
            "sent in a step",
            "Theoretical memory footprints: weight and optimizer=",
            "To train",
            "pentatron train --nproc-per-node 8",
            "Assumed",
        )
    ]
    assert places == sorted(places)
    assert max(len(line) for line in text.splitlines()) < 200


def test_layouts_are_ranked_and_fit(llama: PlanReport) -> None:
    seconds = [layout.estimate.seconds for layout in llama.layouts if layout.fits]
    assert seconds == sorted(seconds) and len(seconds) >= 5
    assert llama.layouts[0].fits
    assert all(layout.sizes.grid.world_size == 8 for layout in llama.layouts)


@pytest.mark.parametrize(
    ("words", "world"),
    [
        ("--preset llama3-8b --gpus 8 --gpu h100", 8),
        ("--preset qwen3-30b-a3b --gpus 16 --gpu a100", 16),
        (f"{SMALL} --gpus 4 --gpu cpu", 4),
        ("--preset demo --gpus 4 --gpu cpu", 4),
    ],
)
def test_every_command_is_one_that_training_takes(words: str, world: int) -> None:
    """The command resolves to the planned configuration."""
    report = plan(words)
    for layout in report.layouts[:12]:
        made = resolve(gather(settings_words(layout), TRAIN), ProcessFacts(world, min(world, 8)))
        planned = layout.config
        assert made.config.grid == planned.grid
        assert made.config.parallel.zero_stage == planned.parallel.zero_stage
        assert made.config.memory == planned.memory
        assert made.config.train.micro_batch_size == planned.train.micro_batch_size
        assert made.config.train.global_batch_size == planned.train.global_batch_size
        assert made.config.model == planned.model
        idle = [notice for notice in made.notices if "has no effect" in notice]
        assert not idle, idle


@pytest.mark.sweep
def test_the_command_runs(tmp_path: Path) -> None:
    report = plan(f"{SMALL} --gpus 2 --gpu cpu --train-iters 2")
    words = settings_words(report.layouts[0])
    call = [
        sys.executable,
        "-m",
        "pentatron",
        "train",
        "--nproc-per-node",
        "2",
        *words,
        "--run-dir",
        tmp_path / "run",
    ]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_layout_as_given_is_looked_at_first() -> None:
    report = plan("--preset llama3-8b --gpus 8 --gpu a100-40 --tp 2 --micro-batch-size 4")
    assert report.given is not None and not report.given.fits
    assert report.given.config.parallel.zero_stage == 0
    text = as_text(report)
    assert "The given layout: TP 2, DP 4; it does NOT fit: there is room for 36.4 GiB" in text
    assert "To train the first layout of the list" in text


def test_an_optimizer_in_host_memory_has_its_column() -> None:
    text = as_text(plan("--preset llama3-8b --gpus 1 --gpu h100"))
    row = next(line for line in text.splitlines() if "+host" in line)
    assert row.split()[:6] == ["1", "1", "1", "1", "0+host", "full"]


def test_given_schedule_and_zero_stage_apply_to_every_listed_layout() -> None:
    report = plan(f"{SMALL} --gpus 4 --gpu h100 --tp 2 --zero-stage 2 --pipeline-schedule gpipe")
    assert {layout.sizes.grid.tensor for layout in report.layouts} == {1, 2, 4}
    for layout in report.layouts:
        assert layout.config.parallel.zero_stage == 2
        assert layout.config.parallel.pipeline_schedule == "gpipe"
        words = settings_words(layout)
        assert words[words.index("--zero-stage") :][:2] == ["--zero-stage", "2"]
    text = as_text(report)
    assert (
        "sizes other than --tensor-model-parallel-size 2 are listed too; "
        "all have --zero-stage 2 --pipeline-schedule gpipe, as given" in text
    )


@pytest.mark.parametrize(("words", "which"), [("--tp 2", "given"), ("--tp 2 --micro-batch-size 4", "best")])
def test_both_forms_have_the_command_of_the_same_layout(words: str, which: str) -> None:
    report = plan(f"--preset llama3-8b --gpus 8 --gpu {'h200' if which == 'given' else 'a100-40'} {words}")
    found = as_data(report)
    assert all(line in as_text(report) for line in found["command"])
    wanted = report.given if which == "given" else report.best
    assert wanted is not None and wanted is not (report.best if which == "given" else report.given)
    assert found["command"] == training_command_lines(wanted)


def test_a_size_in_a_file_does_not_undo_the_layout_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text("tensor_model_parallel_size: 2\n")
    report = plan(f"{SMALL} --gpus 4 --gpu h100 --config {tmp_path / 'two.yaml'}")
    for layout in report.layouts:
        made = resolve(gather(settings_words(layout), TRAIN), ProcessFacts(4, 4)).config
        assert made.grid == layout.config.grid


def test_a_gpu_without_bf16_is_planned_in_fp16() -> None:
    report = plan(f"{SMALL} --gpus 1 --gpu v100")
    assert report.shown.sizes.config.precision.name == "fp16"
    assert "fp16 (--fp16), as V100 32 GB has no bf16" in report.assumed
    assert any("no bf16 matmuls" in notice for notice in plan(f"{SMALL} --gpus 1 --gpu v100 --bf16").notices)
    assert not plan(f"{SMALL} --gpus 1 --gpu a100 --bf16").notices


def test_one_gpu_must_have_room_for_activations_too() -> None:
    """Static memory is a tenth of the GPU, but activations of a micro-batch exceed the rest."""
    tree = plan("--preset gpt2 --gpus 1 --gpu-memory 24 --micro-batch-size 256").advice.tree
    assert tree[0].answer.startswith("no, weights, gradients and optimizer take 2.09 GiB")
    assert "smaller micro-batches" in tree[0].answer
    adam, plain = (
        plan(f"--preset gpt2 --gpus 1 --optimizer {kind}").advice.tree[0].answer
        for kind in ("adam", "sgd --sgd-momentum 0")
    )
    assert "take 2.09 GiB" in adam and "take 1.16 GiB" in plain


def test_an_optimizer_in_host_memory_must_fit_there() -> None:
    words = "--preset llama3-8b --gpus 1 --gpu h100 --host-memory"
    assert plan(f"{words} 100").layouts[0].fits
    small = plan(f"{words} 64")
    assert not small.layouts[0].fits
    assert "the optimizer needs 89.7 GiB of host memory per machine, which has 64 GiB" in as_text(small)
    assert "not checked; give --host-memory GB" in as_text(plan(words.removesuffix("--host-memory")))


def test_model_that_fits_no_layout_is_reported() -> None:
    text = as_text(plan("--preset gpt3-175b --gpus 2 --gpu rtx4090"))
    assert "No layout fits: a GPU has room for" in text and "more GPUs (--gpus)" in text
    assert "To train" not in text


@pytest.mark.parametrize(
    ("words", "answers", "combination"),
    [
        (
            "--preset gpt2 --gpus 4",
            ("yes, weights, gradients and optimizer take", "data parallelism is enough"),
            "DP",
        ),
        (
            "--preset llama3.1-70b --gpus 64",
            ("no, weights", "yes, 80 layers: consider pipeline parallelism"),
            "PP",
        ),
        (
            "--preset llama3-8b --gpus 1 --gpu h100",
            ("take 135 GiB, activations", "but recompute and the optimizer in host memory are enough"),
            "one GPU",
        ),
        ("--preset llama3.1-405b --gpus 8 --gpu-memory 16", ("tensor parallelism is required",), ""),
    ],
)
def test_the_decision_tree(words: str, answers: tuple[str, ...], combination: str) -> None:
    report = plan(words)
    said = " ".join(answer.answer for answer in report.advice.tree)
    for answer in answers:
        assert answer in said
    assert combination in report.advice.combination


@pytest.mark.parametrize(
    ("preset", "name", "expected"),
    [
        ("gpt2", "small", "4 GPUs as TP 1 × PP 1 × DP 4"),
        ("qwen2.5-7b", "medium", "8 GPUs as TP 2 × PP 2 × DP 2"),
        ("llama3.1-70b", "large", "64 GPUs as TP 8 × PP 4 × DP 2"),
        ("gpt3-175b", "huge", "128 GPUs as TP 8 × PP 8 × DP 2, with ZeRO 3 and the optimizer in host memory"),
    ],
)
def test_the_guides_sets_are_the_advice_for_their_sizes(preset: str, name: str, expected: str) -> None:
    row = SUGGESTED_BY_SIZE[name]
    assert row.tensor * row.pipeline * row.data == row.devices
    assert f"suggested sets, {name}: {expected}" in plan(f"--preset {preset} --gpus 8").advice.tables


def test_the_3d_table_is_whole() -> None:
    rows = [(row.devices, row.data, row.tensor, row.pipeline, row.low, row.high) for row in TABLE_3D]
    assert rows == [
        (4, 4, 1, 1, 0, 1),
        (4, 2, 2, 1, 1, 3),
        (8, 2, 2, 2, 3, 7),
        (16, 2, 4, 2, 7, 13),
        (32, 2, 4, 4, 13, 30),
        (64, 2, 8, 4, 30, 70),
    ]


def test_expert_parallelism_is_in_the_memory_report() -> None:
    text = as_text(plan("--preset mixtral-8x7b --gpus 16 --tp 2 --pp 2 --ep 4 --zero-stage 1"))
    block = text[text.index("Expert parallelism in this layout") :]
    sizes = [line.split() for line in block.splitlines()[2:5]]
    assert [row[:2] for row in sizes] == [["EP", "1"], ["EP", "2"], ["EP", "4"]]
    assert float(sizes[0][2]) > float(sizes[1][2]) > float(sizes[2][2])


def test_a_folder_needs_its_config_alone(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    report, _ = plan_layouts([str(tmp_path), "--gpus", "2"])
    assert report.shown.sizes.config.model.num_layers == 4
    assert report.shown.sizes.config.model.seq_length == 512
    assert "--load" in settings_words(report.layouts[0])


def test_json_has_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL.split(), "--gpus", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpus"] == 2 and found["layouts"][0]["fits"]
    assert set(found["layouts"][0]["bytes"][0]) >= {
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "logits",
        "total",
    }
    assert set(found["layouts"][0]["sent_bytes"]) == {"tensor", "context", "pipeline", "data", "expert"}
    assert found == json.loads(json.dumps(as_data(plan(f"{SMALL} --gpus 2"))))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--gpus 8", "no model is given; add --preset NAME"),
        ("--preset llama3-8b --gpu pentium", "--gpu pentium is unknown"),
        ("--preset llama3-8b --gpus eight", "--gpus must be a whole number, not 'eight'"),
        ("--preset llama3-8b --gpus 0", "--gpus 0 must be 1 or more"),
        ("--preset llama3-8b --gpu-memory 0", "--gpu-memory must be a number above 0, not '0'"),
        ("--preset llama3-8b --gpu-memory lots", "--gpu-memory must be a number"),
        ("--preset llama3-8b --efficiency 2", "--efficiency 2.0 must be above 0 and at most 1"),
        ("nowhere/at/all", "does not exist"),
    ],
)
def test_mistakes_are_sentences(words: str, sentence: str) -> None:
    with pytest.raises((UserError, ConfigError), match=sentence):
        plan(words)


def test_no_torch_is_needed() -> None:
    code = (
        "import sys; from pentatron.cli.main import main; "
        f"assert main('plan {SMALL} --gpus 2'.split()) == 0; assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr


def test_gpus_fill_whole_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--preset", "llama3-8b", "--gpus", "12"]) == 2
    said = capsys.readouterr().err
    assert (
        "12 GPUs are not a multiple of 8 (--gpus-per-machine); add --gpus-per-machine 6, or use --gpus 8 or 16"
        in said
    )
    assert main(["plan", "--preset", "llama3-8b", "--gpus", "12", "--gpus-per-machine", "6"]) == 0
    assert "torchrun --nnodes 2 --nproc_per_node 6" in capsys.readouterr().out


def test_fp8_is_refused_without_support() -> None:
    words = "--preset llama3-8b --gpus 8 --bf16 --fp8 hybrid --gpu"
    with pytest.raises(
        UserError, match=r"--fp8 hybrid needs a GPU with fp8 matmuls .* and A100 80 GB has none; leave it out"
    ):
        plan(f"{words} a100")
    assert plan(f"{words} h100")


def test_cuda_graphs_are_not_planned_on_a_cpu() -> None:
    words = f"{SMALL} --gpus 1 --cuda-graphs on --gpu"
    with pytest.raises(
        UserError, match="--cuda-graphs on needs a GPU, and CPU process is not a GPU; leave it out"
    ):
        plan(f"{words} cpu")
    assert plan(f"{words} h100").shown.largest.graphs > 0

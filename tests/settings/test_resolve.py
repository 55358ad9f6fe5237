"""Resolves preset, file and flags to values with origins, and derives further values."""

from pathlib import Path
from typing import Any

import pytest

from pentatron.errors import UserError
from pentatron.settings.derive import derive
from pentatron.settings.entry_points import EXAMPLE, PARALLEL_3D, PRETRAIN_GPT, STANDARD, TRAIN, EntryPoint
from pentatron.settings.resolve import gather, resolve
from pentatron.settings.run_config import all_settings
from pentatron.settings.settings import ProcessFacts
from tests.settings.builders import draft, notices, problems, resolved, values


def chosen(found: dict[str, Any], names: str) -> dict[str, Any]:
    return {name: found[name] for name in names.split()}


def file(folder: Path, text: str) -> str:
    path = folder / "a.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


# --- which source wins ---


def test_preset_then_file_then_flag(tmp_path: Path) -> None:
    path = file(tmp_path, "preset: demo\nnum_layers: 5\nlr: 5e-5\n")
    found = resolve(gather(["--config", path, "--lr", "7e-5"], TRAIN), ProcessFacts(2, 2))
    expected = {
        "hidden_size": (192, "preset demo"),
        "num_layers": (5, f"file {path}"),
        "lr": (7e-5, "flag --lr"),
        "seed": (1234, "default"),
        "min_lr": (pytest.approx(7e-6), "derived: a tenth of --lr; the preset has 0.0003"),
        "kv_channels": (32, "derived: 192 hidden / 6 heads"),
        "preset": ("demo", f"file {path}"),
        "config": (path, "flag --config"),
    }
    flat = found.config.flat()
    assert {name: (flat[name], found.sources[name]) for name in expected} == expected


def test_a_flags_preset_replaces_the_files(tmp_path: Path) -> None:
    path = file(tmp_path, "preset: demo\nlr: 5e-5\n")
    found = gather(["--config", path, "--preset", "qwen3-8b"], TRAIN)
    assert (found.hidden_size, found.lr, found.corpus) == (4096, 5e-5, None)


def test_entry_point_defaults_lie_below_everything() -> None:
    found = gather([], EXAMPLE)
    assert found.dataset_size == 1000
    assert found.source("dataset_size") == "default of megatron_core_training_example.py"
    assert gather(["--preset", "demo"], EXAMPLE).train_iters == 400
    assert gather(["--dataset-size", "7"], EXAMPLE).dataset_size == 7


def test_megatrons_default_decay_is_kept_in_its_entry_point() -> None:
    assert gather([], PRETRAIN_GPT).lr_decay_style == "linear"
    assert gather([], TRAIN).lr_decay_style == "cosine"


@pytest.mark.parametrize(
    "words",
    [
        "--preset qwen3-8b", "--data-path x", "--mock-data", "--dataset-size 8", "--load x", "--corpus python",
    ],
)  # fmt: skip
def test_demo_is_not_used_with_data_or_a_preset(words: str) -> None:
    assert draft(words).run_dir not in ("runs/demo", "runs/run")
    assert draft("--num-layers 2 --lr 1").run_dir == "runs/demo"


def test_a_file_replaces_the_demo_as_well(tmp_path: Path) -> None:
    assert gather(["--config", file(tmp_path, "num_layers: 3")], TRAIN).corpus is None


def test_the_demo_belongs_to_pentatron_train_only() -> None:
    assert draft("", PRETRAIN_GPT).corpus is None


def test_unknown_preset() -> None:
    with pytest.raises(
        UserError, match=r"unknown preset 'qwen3-8' \(did you mean qwen3-8b\?\); there are: demo, "
    ):
        draft("--preset qwen3-8")


# --- heads and widths ---


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--hidden-size 128", {"num_attention_heads": 8, "kv_channels": 16, "num_query_groups": 8}),
        ("--hidden-size 256", {"num_attention_heads": 8, "kv_channels": 32}),
        ("--hidden-size 1024", {"num_attention_heads": 16, "kv_channels": 64}),
        ("--hidden-size 96", {"num_attention_heads": 12, "kv_channels": 8}),
        ("--hidden-size 40", {"num_attention_heads": 5, "kv_channels": 8}),
        ("--hidden-size 7", {"num_attention_heads": 1, "kv_channels": 7}),
        ("--hidden-size 64 --num-attention-heads 8", {"kv_channels": 8, "num_query_groups": 8}),
        ("--num-attention-heads 8 --kv-channels 100", {"kv_channels": 100}),
        ("--hidden-size 256 --num-query-groups 2", {"num_query_groups": 2, "group_query_attention": True}),
        ("--hidden-size 256 --group-query-attention", {"num_query_groups": 1, "group_query_attention": True}),
        ("--hidden-size 256", {"group_query_attention": False}),
    ],
)  # fmt: skip
def test_heads(words: str, expected: dict[str, Any]) -> None:
    assert chosen(values(words), " ".join(expected)) == expected


def test_a_presets_heads_follow_a_hidden_size_that_was_typed() -> None:
    found = resolved("--preset demo --hidden-size 64", ProcessFacts(1), least="")
    assert chosen(found.config.flat(), "num_attention_heads kv_channels num_query_groups") == {
        "num_attention_heads": 8, "kv_channels": 8, "num_query_groups": 2,
    }  # fmt: skip
    assert found.sources["num_attention_heads"] == "derived: 64 hidden / 8 per head; preset demo has 6"


def test_the_layout_does_not_choose_the_model() -> None:
    """The same settings give the same architecture on any number of ranks; only padding may differ."""
    for words in ("--hidden-size 64", "--hidden-size 256", "--hidden-size 1024 --swiglu"):
        alone, spread = values(words), values(f"{words} --tp_size 4 --pp_size 2", ProcessFacts(8, 8))
        architecture = [
            n for n, s in all_settings().items() if s.section == "model" and n != "padded_vocab_size"
        ]
        assert {n: alone[n] for n in architecture} == {n: spread[n] for n in architecture}


def test_a_presets_groups_follow_heads_that_were_typed() -> None:
    found = resolved("--preset demo --num-attention-heads 8", ProcessFacts(2, 2), least="")
    assert found.config.model.num_query_groups == 2
    assert problems(
        "--preset demo --num-attention-heads 8 --num-query-groups 3", ProcessFacts(2, 2), least=""
    ) == ["--num-attention-heads 8 is not divisible by --num-query-groups 3; use 1, 2, 4 or 8 groups"]


def test_a_presets_heads_stay_where_they_fit() -> None:
    assert values("--preset demo --hidden-size 384", ProcessFacts(2, 2), least="")["num_attention_heads"] == 6
    assert values("--preset qwen3-8b --hidden-size 5000")["num_attention_heads"] == 32


def test_a_preset_without_its_grouping() -> None:
    assert values("--preset qwen3-8b --no-group-query-attention")["num_query_groups"] == 32


@pytest.mark.parametrize(
    ("words", "ffn"),
    [
        ("--hidden-size 256", 1024),
        ("--hidden-size 256 --swiglu", 640),
        ("--hidden-size 4096 --swiglu", 10880),
        ("--hidden-size 32 --swiglu", 64),
        ("--hidden-size 16 --swiglu", 64),
        ("--hidden-size 256 --swiglu --ffn-hidden-size 100", 100),
    ],
)
def test_ffn_width(words: str, ffn: int) -> None:
    assert values(words)["ffn_hidden_size"] == ffn


@pytest.mark.parametrize(
    ("vocab", "divisor", "tp", "padded"),
    [
        (151936, 128, 1, 151936), (151936, 128, 2, 152064), (151936, 128, 4, 152064), (151936, 128, 8, 152576),
        (151936, 1187, 2, 151936), (50257, 128, 1, 50304), (50257, 128, 8, 51200), (152064, 1, 4, 152064),
    ],
)  # fmt: skip
def test_padded_vocabulary(vocab: int, divisor: int, tp: int, padded: int) -> None:
    words = f"--vocab-size {vocab} --make-vocab-size-divisible-by {divisor} --tensor-model-parallel-size {tp}"
    found = draft(f"--mock-data {words}")
    found.facts = ProcessFacts(tp, tp)
    derive(found)
    assert found.problems == []
    assert found.padded_vocab_size == padded


def test_a_padded_vocabulary_that_is_given_stays() -> None:
    assert chosen(values("--padded-vocab-size 130", least="--mock-data --train-iters 3"), "vocab_size padded_vocab_size") == {
        "vocab_size": 130, "padded_vocab_size": 130,
    }  # fmt: skip
    assert values("--vocab-size 100 --padded-vocab-size 130")["padded_vocab_size"] == 130


def test_a_vocabulary_learned_from_a_tokenizer_keeps_its_origin() -> None:
    found = draft("--mock-data --train-iters 3")
    found.derive("tokenizer x", vocab_size=77)
    done = resolve(found, ProcessFacts(1))
    assert done.config.model.padded_vocab_size == 128
    assert done.sources["vocab_size"] == "derived: tokenizer x"


# --- processes and batches ---


def test_processes() -> None:
    found = resolved("", ProcessFacts(8, 4, 16))
    assert chosen(found.config.flat(), "data_parallel_size nproc_per_node threads_per_process") == {
        "data_parallel_size": 8, "nproc_per_node": 4, "threads_per_process": 4,
    }  # fmt: skip
    assert found.sources["data_parallel_size"] == "derived: 8 processes / (tp × pp × cp = 1)"
    assert found.config.grid.world_size == 8


def test_derived_data_parallel_size() -> None:
    for tp, pp, world, dp in ((2, 2, 8, 2), (4, 2, 16, 2), (8, 16, 128, 1), (4, 2, 8, 1)):
        found = draft(f"--tp_size {tp} --pp_size {pp}")
        found.facts = ProcessFacts(world, 8)
        derive(found)
        assert found.data_parallel_size == dp


def test_a_presets_number_of_processes_gives_way_to_the_launchers() -> None:
    found = resolved("--preset demo", ProcessFacts(2, 2, 4, "torchrun", True), least="")
    assert found.config.launch.nproc_per_node == 2
    assert found.sources["nproc_per_node"] == "derived: started by torchrun"
    assert resolved("--preset demo", ProcessFacts(4, 4), least="").sources["nproc_per_node"] == "preset demo"


@pytest.mark.parametrize(
    ("words", "world", "sizes"),
    [
        ("", 4, (2, 2, 1)),
        ("", 1, (1, 1, 1)),
        ("", 2, (2, 1, 1)),
        ("--global-batch-size 12", 3, (1, 1, 3)),
        ("--global-batch-size 12", 6, (2, 1, 3)),
        ("", 8, (2, 2, 2)),
        ("--pp_size 2", 2, (1, 2, 1)),
        ("--pp_size 4", 4, (1, 4, 1)),
        ("--pp_size 1", 4, (1, 1, 4)),
        ("--tp_size 2", 4, (2, 1, 2)),
        ("--zero-stage 1", 2, (1, 1, 2)),
        ("--overlap-grad-reduce", 4, (1, 1, 4)),
        ("--data-parallel-size 2", 2, (1, 1, 2)),
        ("--data-parallel-size 2", 4, (2, 1, 2)),
        ("--num-layers 1", 4, (2, 1, 2)),
        ("--num-attention-heads 3 --num-query-groups 3", 4, (1, 2, 2)),
        ("--virtual-pipeline-model-parallel-size 2", 2, (1, 2, 1)),
    ],
)
def test_the_sizes_of_a_preset_give_way_and_typed_ones_do_not(
    words: str, world: int, sizes: tuple[int, int, int]
) -> None:
    found = values(f"--preset demo {words}", ProcessFacts(world, world), least="")
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")
    assert tuple(found[name] for name in names) == sizes


def test_why_a_size_gave_way() -> None:
    name = "pipeline_model_parallel_size"
    alone = resolved("--preset demo", ProcessFacts(1), least="").sources
    assert alone[name] == "derived: fits 1 process; the preset has 2"
    pair = resolved("--preset demo", ProcessFacts(2, 2), least="").sources
    assert pair[name] == "derived: fits 2 processes; the preset has 2"
    assert pair["tensor_model_parallel_size"] == "preset demo"
    short = resolved("--preset demo --num-layers 1", ProcessFacts(4, 4), least="").sources
    assert short[name] == "derived: fits the given settings; the preset has 2"


def test_a_typed_size_is_insisted_on() -> None:
    """Errors name the sizes that were typed, not those that the preset would add."""
    assert problems("--preset demo --tp_size 4", ProcessFacts(2, 2), least="") == [
        "2 processes are too few: one copy of the model needs 4 (tensor) × 1 (pipeline) × 1 (context) = 4; "
        "start 4 processes or a multiple, or lower the parallel sizes",
        "--num-attention-heads 6 is not divisible by --tensor-model-parallel-size 4; use 1, 2, 3 or 6",
    ]


@pytest.mark.parametrize(
    ("words", "world", "virtual", "schedule", "reason"),
    [
        ("", 2, None, "1f1b", "default"),
        ("--virtual-pipeline-model-parallel-size 2", 2, 2, "interleaved", "flag"),
        ("--num-virtual-stages-per-pipeline-rank 2", 2, 2, "interleaved", "flag"),
        ("--virtual-pipeline-model-parallel-size 1", 2, 1, "1f1b", "flag"),
        ("--num-layers-per-virtual-pipeline-stage 2", 2, 2, "interleaved", "derived: 8 layers / (2 ranks × 2 layers)"),
        ("--num-layers-per-virtual-pipeline-stage 1", 2, 4, "interleaved", "derived: 8 layers / (2 ranks × 1 layers)"),
        ("--num-layers-per-virtual-pipeline-stage 4", 2, 1, "1f1b", "derived: 8 layers / (2 ranks × 4 layers)"),
        ("--pipeline-model-parallel-layout Ettt|tt|tt|tL", 2, 2, "interleaved",
         "derived: 4 stages in --pipeline-model-parallel-layout / 2 ranks"),
        ("--pipeline-model-parallel-layout Ettttt|tttL", 2, None, "1f1b", "default"),
    ],
)  # fmt: skip
def test_virtual_stages(words: str, world: int, virtual: int | None, schedule: str, reason: str) -> None:
    found = resolved(f"--num-layers 8 --pp_size {world} {words}", ProcessFacts(world, world))
    assert found.config.parallel.virtual_pipeline_model_parallel_size == virtual
    assert found.config.virtual_stages == (virtual or 1)
    assert found.config.parallel.pipeline_schedule == schedule
    assert found.sources["virtual_pipeline_model_parallel_size"].startswith(reason)
    assert found.config.placement.stages == world * (virtual or 1) == len(found.config.stages)


@pytest.mark.parametrize(
    ("words", "world", "micro", "total", "steps"),
    [
        ("", 4, 1, 4, 1),
        ("--micro-batch-size 2", 4, 2, 8, 1),
        ("--global-batch-size 16", 4, 4, 16, 1),
        ("--micro-batch-size 2 --global-batch-size 16", 4, 2, 16, 2),
        ("--micro-batch-size 1 --global-batch-size 64", 2, 1, 64, 32),
        ("--micro-batch-size 2 --gradient-accumulation-steps 3", 4, 2, 24, 3),
        ("--global-batch-size 24 --gradient-accumulation-steps 3", 4, 2, 24, 3),
        ("--global-batch-size 24 --num-microbatches 3", 4, 2, 24, 3),
        ("--micro-batch-size 2 --global-batch-size 24 --gradient-accumulation-steps 3", 4, 2, 24, 3),
        ("--micro-batch-size 2 --gradient-accumulation-steps 3 --num-microbatches 3", 4, 2, 24, 3),
        ("--rank-batch-size 8 --num-microbatches 4", 2, 2, 16, 4),
        ("--global-batch-size 24 --rampup-batch-size 6 6 100", 2, 3, 24, 4),
        ("--global-batch-size 24 --rampup-batch-size 6 6 100 --pp_size 2", 4, 3, 24, 4),
        ("--step-batch-size-schedule 0:4 10K:12", 2, 2, 12, 3),
    ],
)
def test_batches(words: str, world: int, micro: int, total: int, steps: int) -> None:
    config = resolved(words, ProcessFacts(world, world)).config
    assert (config.train.micro_batch_size, config.train.global_batch_size) == (micro, total)
    assert config.accumulation == steps


@pytest.mark.parametrize(
    ("entry", "words", "world", "micro", "total", "steps"),
    [
        (EXAMPLE, "", 1, 8, 8, 1),
        (EXAMPLE, "--batch-size=16", 8, 2, 16, 1),
        (EXAMPLE, "--batch-size=16 --micro-batch-size 1", 8, 1, 16, 2),
        (STANDARD, "", 4, 8, 32, 1),
        (STANDARD, "--batch_size 4", 1, 4, 4, 1),
        (STANDARD, "--batch_size 4 --gradient_accumulation_steps 8", 2, 4, 64, 8),
        (PARALLEL_3D, "--num_microbatches 4", 2, 2, 16, 4),
        (PARALLEL_3D, "--batch_size 8 --num_microbatches 4 --gradient_accumulation_steps 2", 2, 2, 32, 8),
        (STANDARD, "--micro-batch-size 3", 2, 3, 6, 1),
        (STANDARD, "--global-batch-size 12", 2, 6, 12, 1),
    ],
)
def test_batches_of_the_guides_programs(
    entry: EntryPoint, words: str, world: int, micro: int, total: int, steps: int
) -> None:
    config = resolved(words, ProcessFacts(world, world), entry, least="").config
    assert (config.train.micro_batch_size, config.train.global_batch_size) == (micro, total)
    assert config.accumulation == steps


def test_a_presets_micro_batch_gives_way_to_the_number_of_processes() -> None:
    found = resolved("--preset demo --nproc-per-node 32", ProcessFacts(32, 32), least="")
    assert (found.config.train.micro_batch_size, found.config.train.global_batch_size) == (2, 16)
    assert found.sources["micro_batch_size"] == "derived: a divisor of 16 / 8 ranks; the preset has 4"


# --- length of the run ---


def length(words: str, entry: EntryPoint = EXAMPLE) -> tuple[int, list[str]]:
    found = resolved(words, ProcessFacts(1), entry, least="")
    assert found.config.train.train_iters is not None
    return found.config.train.train_iters, [n for n in found.notices if n.startswith("training stops")]


def test_epochs_and_steps_end_at_the_nearer_one() -> None:
    assert length("--batch-size=16 --epochs=3 --train-steps=1000") == (
        186, ["training stops after 186 steps: 3 epochs of 62 steps, before --train-iters 1000"],
    )  # fmt: skip
    assert length("--batch-size=16 --epochs=3 --train-steps=100") == (
        100, ["training stops after 100 steps: --train-iters ends it before 3 epochs of 62 steps"],
    )  # fmt: skip


def test_epochs_alone_are_not_cut_by_a_default() -> None:
    assert length("--epochs 3 --dataset-size 800") == (300, [])
    assert length("--epochs 1 --dataset-size 3") == (1, [])
    assert length("--train-steps 10") == (10, [])


def test_a_typed_length_is_stronger_than_one_in_a_file(tmp_path: Path) -> None:
    """A length on the command line replaces both the epochs and the steps of a saved configuration."""
    file = tmp_path / "saved.yaml"
    file.write_text("dataset_size: 800\nglobal_batch_size: 8\nepochs: 2\ntrain_iters: 200\n")
    assert length(f"--config {file}") == (200, [])
    assert length(f"--config {file} --epochs 3") == (300, [])
    assert length(f"--config {file} --train-steps 900") == (900, [])
    file.write_text("dataset_size: 800\nglobal_batch_size: 8\ntrain_samples: 80\n")
    assert length(f"--config {file} --epochs 3") == (300, [])
    file.write_text("dataset_size: 800\nglobal_batch_size: 8\nepochs: 2\ntrain_iters: 50\n")
    assert length(f"--config {file}") == (
        50, ["training stops after 50 steps: --train-iters ends it before 2 epochs of 100 steps"],
    )  # fmt: skip


def test_epochs_and_batches_that_grow() -> None:
    """An epoch of 100 samples has 7 steps: 2 of 8 samples and 5 of 16."""
    ramp = "--batch-size=16 --rampup-batch-size 8 8 9 --dataset-size 100"
    assert length(f"{ramp} --epochs 1") == (7, [])
    assert length(f"{ramp} --epochs 1 --train-samples 4000") == (
        7, ["training stops after 7 steps: 1 epoch (7 steps of changing size), before --train-samples 4000"],
    )  # fmt: skip
    assert length(f"{ramp} --epochs 9 --train-samples 50") == (
        4, ["training stops after 4 steps: --train-samples ends it before 9 epochs (57 steps of changing size)"],
    )  # fmt: skip


def test_a_run_as_long_as_its_samples() -> None:
    found = resolved("--train-samples 43 --global-batch-size 4", least="--mock-data --vocab-size 100")
    flat = found.config.flat()
    assert chosen(flat, "train_iters lr_decay_iters lr_decay_samples") == {
        "train_iters": 10, "lr_decay_iters": None, "lr_decay_samples": 43,
    }  # fmt: skip
    assert found.sources["train_iters"] == "derived: steps of 43 samples; 3 are not used"


def test_flags_override_equivalent_settings_of_a_file(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        "mock_data: true\nvocab_size: 100\ntrain_iters: 50\nlr_warmup_iters: 5\nlr_decay_iters: 40\n",
    )
    words = f"--config {path} --train-samples 30 --lr-warmup-fraction 0.1 --lr-decay-samples 20"
    found = resolved(words, least="")
    assert chosen(found.config.flat(), "train_iters lr_warmup_iters lr_decay_iters") == {
        "train_iters": 30, "lr_warmup_iters": 2, "lr_decay_iters": None,
    }  # fmt: skip
    # Within one file, samples and fractions take precedence over steps, and a notice says so.
    path = file(tmp_path, "mock_data: true\nvocab_size: 100\ntrain_iters: 50\ntrain_samples: 30\n")
    assert resolved(f"--config {path}", least="").notices == [
        "--train-samples 30 is used to set the length of the run, so --train-iters 50 is ignored"
    ]


def test_decay_and_warmup() -> None:
    assert chosen(values("--train-iters 1000 --lr-warmup-iters 30"), "lr_decay_iters lr_warmup_iters") == {
        "lr_decay_iters": 1000, "lr_warmup_iters": 30,
    }  # fmt: skip
    guide_004 = values("--train-iters 500000 --lr-decay-iters 430000 --lr-warmup-fraction .001")
    assert guide_004["lr_warmup_iters"] == 430
    assert values("", entry=EXAMPLE, least="")["lr_warmup_iters"] == 10
    assert values("--train-steps 20", entry=EXAMPLE, least="")["lr_warmup_iters"] == 2
    assert values("--train-steps 20 --warmup-steps 15", entry=EXAMPLE, least="")["lr_warmup_iters"] == 15


def test_folders() -> None:
    assert chosen(values(), "run_dir save load save_interval") == {
        "run_dir": "runs/4l-256h-mock", "save": "runs/4l-256h-mock/checkpoints", "load": "runs/4l-256h-mock/checkpoints",
        "save_interval": 10,
    }  # fmt: skip
    assert values("--preset qwen3-8b")["run_dir"] == "runs/qwen3-8b-mock"
    assert chosen(values("--run-dir a --save b --load c"), "save load") == {"save": "b", "load": "c"}
    assert values("--run-dir a --save b")["load"] == "b"
    assert values("--run-dir a --save b")["run_dir"] == "a"
    assert values("--save b")["run_dir"] == "b", "two runs told apart by --save have logs of their own"
    assert values("--save b --no-save-checkpoints")["run_dir"] != "b"


# --- wrong values do not stop the other checks ---


@pytest.mark.parametrize(
    "words",
    [
        "--tp_size 0", "--pp_size 0", "--context-parallel-size -1", "--data-parallel-size 0", "--num-attention-heads 0",
        "--hidden-size 0", "--num-query-groups 0", "--micro-batch-size 0", "--global-batch-size 0", "--vocab-size 0",
        "--make-vocab-size-divisible-by 0", "--gradient-accumulation-steps 0", "--rank-batch-size -2",
        "--num-microbatches 0", "--epochs -1", "--lr-decay-iters 0", "--seq-length 0",
        "--nproc-per-node 0", "--padded-vocab-size 0", "--kv-channels 0", "--ffn-hidden-size -4",
    ],
)  # fmt: skip
def test_a_number_that_cannot_be_is_one_sentence_and_hides_nothing(words: str) -> None:
    found = problems(f"{words} --min-lr 5 --lr 1")
    assert len(found) == 2
    assert found[0].endswith("must be more than 0")
    assert found[1] == "--min-lr 5.0 is above --lr 1.0; lower the first or raise the second"


def test_problems_found_while_reading_flags_are_reported_with_the_rest() -> None:
    found = draft("--mock-data --train-iters 3 --min-lr 5")
    found.wrong["vocab_size"] = "Tokenizer not found."
    with pytest.raises(UserError) as error:
        resolve(found, ProcessFacts(1))
    assert str(error.value).splitlines()[1:] == [
        "  1. Tokenizer not found.",
        "  2. --min-lr 5.0 is above --lr 0.0003; lower the first or raise the second",
    ]


def test_nothing_to_say_about_a_plain_run() -> None:
    assert notices() == []
    assert problems() == []


# --- recompute ---


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", (None, None, None, ())),
        ("--recompute-activations", ("selective", None, None, ("core_attn",))),
        ("--recompute-granularity selective", ("selective", None, None, ("core_attn",))),
        ("--recompute-activations --recompute-modules mlp", ("selective", None, None, ("mlp",))),
        ("--recompute-granularity full", ("full", "uniform", 1, ())),
        ("--recompute-granularity full --recompute-num-layers 2", ("full", "uniform", 2, ())),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2", ("full", "block", 2, ())),
    ],
)  # fmt: skip
def test_recompute(words: str, expected: tuple[Any, ...]) -> None:
    names = "recompute_granularity recompute_method recompute_num_layers recompute_modules"
    assert tuple(chosen(values(words), names).values()) == expected

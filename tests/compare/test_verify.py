"""Tests `verify`: the small twin of a layout keeps its structure, and planted bugs are named."""

import math
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from pentatron.cli.layout import resolve_layout
from pentatron.compare.trial import Gap, Trajectory, run_trial
from pentatron.compare.verify import (
    LayoutVerdict,
    compare_trajectories,
    read_settings,
    run_reference,
    single_process_config,
    small_twin,
    uncompared_settings,
    write_settings,
)
from pentatron.settings.run_config import RunConfig
from tests.harness import run_distributed
from tests.parity.bugs import plant
from tests.parity.trajectory import here


def twin(words: str, replicas: int | None = None) -> RunConfig:
    return small_twin(resolve_layout(words.split()).config, replicas)


def on_a_rank(words: str, bug: str) -> Trajectory:
    plant(bug)
    config = twin(words)
    assert config.grid.world_size == dist.get_world_size()
    return run_trial(config, here(config))


def verdict(words: str, bug: str = "") -> LayoutVerdict:
    config = twin(words)
    ranks = run_distributed(on_a_rank, config.grid.world_size, timeout=120.0, words=words, bug=bug)
    return compare_trajectories(ranks, run_reference(config))


LLAMA = "--preset llama3-8b"


@pytest.mark.parametrize(
    "words",
    [
        "--tp_size 2",
        "--pp_size 2 --recompute-granularity full",
        "--dp_size 2 --zero-stage 1",
        f"{LLAMA} --tp_size 2 --sequence-parallel --hidden-dropout 0.1",
    ],
)
def test_sound_layouts_pass(words: str) -> None:
    found = verdict(words)
    assert found.passes and found.first is None


@pytest.mark.parametrize(
    ("words", "bug", "first", "parameters"),
    [
        (
            "--tp_size 2 --sequence-parallel",
            "row bias gradient not summed",
            "gradients 1 of ",
            {"linear_fc2.bias", "linear_proj.bias"},
        ),
        (f"{LLAMA} --tp_size 2", "row output not summed", "loss on rank 0, step 1", set()),
        ("--dp_size 2 --zero-stage 1", "stale ZeRO shard", "", set()),
    ],
)
def test_a_planted_bug_is_named(words: str, bug: str, first: str, parameters: set[str]) -> None:
    found = verdict(words, bug)
    assert not found.passes and found.first is not None
    assert found.first.what.startswith(first)
    if parameters:
        wrong = {g.tensor for g in found.judged if g.kind == "gradients 1" and g.fails}
        assert {name.split(".", 3)[3] for name in wrong} == parameters
        assert found.first.tensor in wrong and found.tensors()[0][0] in wrong


def test_the_first_is_first_in_the_order_of_computation() -> None:
    judged = [
        Gap("loss on rank 0, step 1", 0.5),
        Gap("loss on rank 0, step 2", 3.0),
        Gap("gradients 1 of a", 2.0, "a", "gradients 1"),
        Gap("gradients 1 of b", 2.0, "b", "gradients 1"),
        Gap("gradients 1 of c", 0.1, "c", "gradients 1"),
    ]
    found = LayoutVerdict(judged).first
    assert found is not None and found.what == "gradients 1 of a"
    judged[0] = Gap("loss on rank 0, step 1", math.nan)
    assert LayoutVerdict(judged).first == judged[0], "what is no number differs"


# --- the twin ---

LARGE = (
    "--preset qwen3-0.6b --tp_size 4 --pp_size 2 --dp_size 4 --zero-stage 2 --sequence-parallel --micro-batch-size 4 "
    "--num-microbatches 64"
)


def test_the_twin_keeps_layout_and_structure() -> None:
    large, small = resolve_layout(LARGE.split()).config, twin(LARGE)
    assert small.grid == large.grid and small.parallel.sequence_parallel and small.parallel.zero_stage == 2
    kept = "num_attention_heads num_query_groups normalization gated_linear_unit qk_layernorm position_embedding_type"
    for name in (*kept.split(), "untie_embeddings_and_output_weights", "hidden_dropout"):
        assert getattr(small.model, name) == getattr(large.model, name), name
    assert small.model.num_layers == 4 and small.model.hidden_size == 32
    assert small.accumulation == 4 and small.train.micro_batch_size == 2
    assert small.model.padded_vocab_size != small.model.vocab_size
    assert small.optim.clip_grad == 0.5 and small.model.init_method_std == 0.1


def test_windows_and_stretched_positions_act_in_the_twin() -> None:
    """Windows and wavelengths of thousands of tokens would have no effect in the twin's short sequences."""
    small = twin("--preset llama3.1-8b --window-size 4095,0").model
    assert small.window_size[0] < small.seq_length - 1 and small.rope_scaling_type == "llama3"
    assert small.rope_scaling_original_max_position_embeddings == small.seq_length // 2
    plain = twin("--preset llama3-8b").model
    assert plain.window_size == () and plain.rope_scaling_original_max_position_embeddings is None


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        ("--num-layers 6 --window-size 4,0 --window-attn-skip-freq [1,1,0]*2", [6]),
        ("--num-layers 6 --window-size 4,0 --window-attn-skip-freq 3", [2]),
        ("--pp_size 2 --num-layers 64", [2, 2]),
        ("--pp_size 2 --num-layers 63", [3, 2]),
        ("--pp_size 2 --num-layers 64 --virtual-pipeline-model-parallel-size 2", [2, 2, 2, 2]),
        ("--pp_size 2 --pipeline-model-parallel-layout Et|tttL", [1, 3]),
        ("--num-layers 1", [1]),
        ("--num-layers 40 --recompute-granularity full --recompute-num-layers 3", [4]),
    ],
)
def test_layers_of_the_compared_model(words: str, layers: list[int]) -> None:
    assert sorted(len(part.layers) for part in twin(words).stages) == sorted(layers)


def test_fewer_replicas() -> None:
    assert twin(LARGE, replicas=2).grid.world_size == 16


def test_one_process_is_one_process() -> None:
    config = single_process_config(twin(f"{LARGE} --recompute-activations"))
    assert config.grid.world_size == 1 and config.accumulation == 1 and len(config.stages) == 1
    assert config.memory.recompute_granularity is None and config.parallel.zero_stage == 0
    assert config.train.global_batch_size == twin(LARGE).train.global_batch_size


def test_settings_survive_the_way_to_the_ranks(tmp_path: Path) -> None:
    config = twin(f"{LARGE} --recompute-activations")
    write_settings(config, tmp_path)
    assert read_settings(tmp_path) == config


def test_settings_left_out_of_the_comparison_are_reported() -> None:
    words = "--bf16 --fp8 e4m3 --attention-dropout 0.1 --compile on --cuda-graphs on"
    config = twin(words)
    assert config.kernels.compile == config.kernels.cuda_graphs == "off"
    assert not config.precision.bf16 and config.precision.fp8_format is None
    assert config.model.attention_dropout == 0
    notes = uncompared_settings(resolve_layout(words.split()).config)
    said = [re.split(" (?:is|are) not compared", note)[0] for note in notes]
    assert said == ["bf16", "fp8", "attention dropout", "the compiler", "CUDA graphs"]
    assert uncompared_settings(resolve_layout([]).config) == []
    assert uncompared_settings(resolve_layout(["--device", "cuda"]).config) == [
        "--device cuda has no effect: the comparison runs on a CPU"
    ]

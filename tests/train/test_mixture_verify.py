"""Tests the small twin of a layout with experts: its sizes, and the verdict on it."""

import dataclasses

import pytest
import torch

from pentatron.cli.layout import resolve_layout
from pentatron.compare.trial import run_trial
from pentatron.compare.verify import (
    compare_trajectories,
    describe_config,
    fewest_replicas,
    single_process_config,
)
from pentatron.parallel.world import single_process
from pentatron.settings.run_config import RunConfig
from pentatron.settings.settings import Settings
from tests.compare.test_verify import on_a_rank, twin, verdict
from tests.harness import run_distributed

QWEN3 = "--preset qwen3-30b-a3b"
BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"


@pytest.mark.parametrize(
    "words",
    [
        "--num-experts 4 --dp_size 2 --ep 2",
        f"{QWEN3} --tp_size 2 --ep 2 --expert-tensor-parallel-size 1 --moe-token-dispatcher-type allgather",
        f"--preset qwen2-57b-a14b --dp_size 2 --ep 2 --zero-stage 1 --moe-expert-capacity-factor 1.0 {BIAS} "
        "--no-moe-router-pre-softmax --micro-batch-size 1",
    ],
)
def test_sound_layouts_pass(words: str) -> None:
    found = verdict(words)
    assert found.passes and found.first is None


def test_another_partition_of_the_batch_would_be_seen() -> None:
    """The balancing loss is per micro-batch, so one process must split the batch as the ranks do."""
    words = "--num-experts 4 --dp_size 2 --ep 2 --moe-aux-loss-coeff 0.1 --micro-batch-size 1"
    config = twin(words)
    ranks = run_distributed(on_a_rank, 2, timeout=120.0, words=words, bug="")
    reference = single_process_config(config)
    at_once = RunConfig.of(
        Settings({**reference.flat(), "micro_batch_size": reference.train.global_batch_size})
    )
    world = single_process(torch.device("cpu"))
    assert compare_trajectories(ranks, run_trial(reference, world)).passes
    wrong = compare_trajectories(ranks, run_trial(at_once, world))
    assert {
        gap.tensor.rpartition(".mlp.")[2] for gap in wrong.judged if gap.fails and gap.kind == "gradients 1"
    } >= {"router.weight"}


@pytest.mark.parametrize(
    ("words", "whole"),
    [
        ("--num-experts 4", True),
        ("--num-experts 4 --moe-aux-loss-coeff 0.1", False),
        ("--num-experts 4 --moe-aux-loss-coeff 0", True),
        ("--num-experts 4 --moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type seq_aux_loss", True),
        ("--num-experts 4 --moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type none", True),
        ("--num-experts 4 --moe-z-loss-coeff 0.1", True),
        ("--num-experts 4 --moe-expert-capacity-factor 1.5", False),
        ("--moe-aux-loss-coeff 0.1", True),
    ],
)
def test_one_process_takes_the_batch_at_once_where_that_is_the_same(words: str, whole: bool) -> None:
    config = twin(f"{words} --dp_size 2 --micro-batch-size 1 --num-microbatches 2")
    taken = single_process_config(config).train.micro_batch_size
    assert taken == (4 if whole else 1) and single_process_config(config).train.global_batch_size == 4


def test_one_process_has_all_experts() -> None:
    words = f"{QWEN3} --tp_size 2 --dp_size 4 --ep 4 --expert-tensor-parallel-size 2 --moe-token-dispatcher-type allgather"
    config = single_process_config(twin(words))
    assert config.grid.world_size == config.grid.expert == config.grid.expert_tensor == 1
    assert config.moe.moe_token_dispatcher_type == "alltoall"
    assert config.moe.num_experts == twin(words).moe.num_experts


@pytest.mark.parametrize(
    ("words", "experts", "inner", "shared"),
    [
        # Eight experts for a token and an unused one, rounded up for two ranks.
        (f"{QWEN3} --dp_size 2 --ep 2", 10, 24, None),
        (f"{QWEN3} --dp_size 8 --ep 8", 16, 24, None),
        ("--num-experts 64 --moe-router-topk 2 --dp_size 4 --ep 4", 8, 24, None),
        ("--num-experts 2 --moe-router-topk 2 --dp_size 2 --ep 2", 2, 24, None),
        ("--num-experts 60 --dp_size 5 --ep 5 --moe-shared-expert-intermediate-size 999", 10, 24, 16),
        (
            "--num-experts 64 --tp_size 5 --num-attention-heads 5 --moe-shared-expert-intermediate-size 500",
            3,
            25,
            20,
        ),
        (
            "--num-experts 64 --moe-router-topk 8 --moe-router-num-groups 8 --moe-router-group-topk 4 --dp_size 2 --ep 2",
            16,
            24,
            None,
        ),
    ],
)
def test_experts_are_few_and_narrow(words: str, experts: int, inner: int, shared: int | None) -> None:
    large, small = resolve_layout(words.split()).config, twin(words)
    assert small.grid == large.grid
    moe = small.moe
    assert (moe.num_experts, moe.moe_ffn_hidden_size, moe.moe_shared_expert_intermediate_size) == (
        experts,
        inner,
        shared,
    )
    changed = ("num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
    assert dataclasses.replace(moe, **{name: getattr(large.moe, name) for name in changed}) == large.moe


@pytest.mark.parametrize(
    ("words", "layers", "with_experts"),
    [
        ("--num-experts 4 --num-layers 12", 2, (0, 1)),
        ("--num-experts 4 --num-layers 12 --moe-layer-freq 2 --pp_size 2", 4, (0, 2)),
        ("--num-experts 4 --num-layers 5 --moe-layer-freq [0]*2+[1]*3", 5, (2, 3, 4)),
        ("--num-layers 5 --moe-layer-freq [0]*2+[1]*3", 2, ()),
    ],
)
def test_layers(words: str, layers: int, with_experts: tuple[int, ...]) -> None:
    found = twin(words)
    assert (found.model.num_layers, found.layers_with_experts) == (layers, with_experts)


@pytest.mark.parametrize(
    ("words", "replicas"),
    [
        ("--dp_size 8", 2),
        ("--dp_size 1", 1),
        ("--num-experts 8 --dp_size 8 --ep 4", 4),
        ("--num-experts 8 --dp_size 8 --tp_size 2 --ep 4 --expert-tensor-parallel-size 1", 2),
        ("--num-experts 8 --dp_size 8 --tp_size 2 --ep 4", 4),
        ("--num-experts 8 --dp_size 8 --ep 8", 8),
    ],
)
def test_as_few_replicas_as_can_hold_the_experts(words: str, replicas: int) -> None:
    config = resolve_layout(words.split()).config
    assert fewest_replicas(config) == replicas
    assert twin(words, replicas).grid.data == replicas


def test_words() -> None:
    words = describe_config(
        twin(
            "--num-experts 64 --num-layers 4 --moe-layer-freq 2 --dp_size 4 --ep 2 --moe-shared-expert-intermediate-size 9"
        )
    )
    assert "; 4 experts of 24 in 1 of the layers, 2 for a token, and a shared one of 16\n" in words
    assert "4 data (1 expert tensor × 2 expert × 2 expert data), ZeRO 0;" in words
    assert "expert" not in describe_config(twin("--dp_size 2"))

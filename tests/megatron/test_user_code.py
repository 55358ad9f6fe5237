"""Tests what programs may do in the functions given to `pretrain`, and the errors of the rest."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pretrain_gpt
from gpt_builders import gpt_builder
from model_provider import model_provider
from pentatron.errors import UserError
from pentatron.layout.ranks import Axis
from pentatron.megatron.arguments import take_extra_arguments
from pentatron.megatron.core import mpu
from pentatron.megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from pentatron.megatron.core.datasets.gpt_dataset import GPTDataset
from pentatron.megatron.core.enums import ModelType
from pentatron.megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from pentatron.megatron.core.transformer.transformer_config import core_of
from pentatron.megatron.core.utils import get_model_config
from pentatron.megatron.program import UserProgram
from pentatron.megatron.state import current_run
from pentatron.megatron.training import get_args, get_timers, pretrain
from pentatron.megatron.training.arguments import (
    core_gpt_dataset_config_from_args,
    core_transformer_config_from_args,
)
from pentatron.megatron.training.checkpointing import BasicLocalCheckpointManager
from pentatron.megatron.training.yaml_arguments import core_transformer_config_from_yaml
from pentatron.parallel.world import create_groups, single_process
from pentatron.settings.entry_points import PRETRAIN_GPT
from pentatron.train.model import Program
from pentatron.train.session import run_training
from tests.harness import distributed
from tests.megatron.test_programs import RUN, outcome, write_corpus
from tests.support import resolved

PROVIDER = partial(model_provider, gpt_builder)


def run(folder: Path, program: Program, words: str = "") -> Any:
    corpus = folder.parent / "corpus"
    if not corpus.with_suffix(".idx").exists():
        write_corpus(corpus)
    config = resolved(f"{RUN} --data-path {corpus} --run-dir {folder} {words}")
    run_training(config, single_process(), True, program=program)
    return outcome(folder)


def program(
    datasets: Any = pretrain_gpt.train_valid_test_datasets_provider,
    model: Callable[..., Any] = PROVIDER,
    forward_step: Any = pretrain_gpt.forward_step,
    **extra: Any,
) -> UserProgram:
    return UserProgram(datasets, model, forward_step, extra)


class Wrapped(torch.utils.data.Dataset[Any]):
    """A user's dataset around the builder's, with tensors and without optional keys."""

    def __init__(self, samples: Any, shift: int = 0) -> None:
        self.samples, self.shift = samples, shift

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        found = {name: torch.from_numpy(value) for name, value in self.samples[index].items()}
        del found["position_ids"]
        return {**found, "tokens": (found["tokens"] + self.shift) % 257}


def wrapping(sizes: Any, shift: int = 0) -> Any:
    given = pretrain_gpt.train_valid_test_datasets_provider(sizes)
    return tuple(None if samples is None else Wrapped(samples, shift) for samples in given)


def test_datasets_of_the_users_own(tmp_path: Path) -> None:
    expected = run(tmp_path / "configured", Program())
    assert run(tmp_path / "wrapped", program(wrapping))[0] == expected[0]
    assert run(tmp_path / "shifted", program(partial(wrapping, shift=1)))[0] != expected[0], "they are read"


def test_program_resumes_where_it_stopped(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", program())
    run(tmp_path / "cut", program(), "--train-iters 1 --lr-decay-iters 2")
    seen: list[int] = []

    def step(data_iterator: Any, model: Any) -> Any:
        seen.append(get_args().iteration)
        return pretrain_gpt.forward_step(data_iterator, model)

    cut = run(tmp_path / "cut", program(forward_step=step), "--train-iters 2 --lr-decay-iters 2")
    assert [row[0] for row in cut[0]] == [row[0] for row in whole[0]]
    assert set(seen) == {1, 2}, "iterations done: while the second is trained, and while it is evaluated"


def of_logits(data_iterator: Any, model: Any) -> Any:
    """Calls the model without labels; the loss function computes losses from logits."""
    batch = next(data_iterator)
    mask, labels = batch["loss_mask"], batch["labels"]

    def loss_func(logits: torch.Tensor) -> Any:
        losses = vocab_parallel_cross_entropy(logits, labels)
        return (losses * mask).sum(), mask.sum()

    return model(batch["tokens"], batch["position_ids"], None), loss_func


def test_a_loss_may_be_made_of_logits(tmp_path: Path) -> None:
    expected = run(tmp_path / "configured", Program())
    found = run(tmp_path / "logits", program(forward_step=of_logits))
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert mine[:2] == pytest.approx(theirs[:2], rel=1e-5)


def test_arguments_and_timers_inside_the_forward_step(tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def step(data_iterator: Any, model: Any) -> Any:
        args = get_args()
        asked.update(vars(args))
        asked["model"] = get_model_config(model).hidden_size
        config = core_transformer_config_from_args(args)
        config.qk_layernorm = True
        assert core_of(config).qk_layernorm and config.bf16 is False
        with pytest.raises(UserError, match=r"args\.lr is 0\.01 and the run was prepared with that"):
            args.lr = 1.0
        args.note = "of the program"
        get_timers()("forward").start()
        get_timers()("forward").stop()
        assert get_timers()("forward").active_time() > 0
        with pytest.raises(UserError, match="timer forward was stopped before it was started"):
            get_timers()("forward").stop()
        get_timers()("inner", log_level=2).start()
        get_timers()("inner").stop()
        assert get_timers()("inner").active_time() == 0, "above --timing-log-level nothing is measured"
        return pretrain_gpt.forward_step(data_iterator, model)

    run(tmp_path / "a", program(forward_step=step, greeting="hello"), "--train-iters 1")
    expected = {"greeting": "hello", "hidden_size": 32, "model": 32, "world_size": 1, "swiglu": True}
    assert {name: asked[name] for name in expected} == expected
    assert asked["padded_vocab_size"] == 384 and asked["retro_project_dir"] is None


def twice(data_iterator: Any, model: Any) -> Any:
    next(data_iterator)
    return next(data_iterator)


def halved(data_iterator: Any, model: Any) -> Any:
    batch = next(data_iterator)
    return model(batch["tokens"][:, :8], batch["position_ids"][:, :8]), lambda output: None


def other_length(sizes: Any) -> Any:
    config = core_gpt_dataset_config_from_args(get_args())
    config.sequence_length = 8
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


def other_number(sizes: Any) -> Any:
    config = core_gpt_dataset_config_from_args(get_args())
    return BlendedMegatronDatasetBuilder(GPTDataset, [1, 1, 1], lambda: True, config).build()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"forward_step": twice}, "took a second micro-batch from data_iterator"),
        ({"forward_step": halved}, r"tokens of shape \(1, 8\), but this rank computes \(1, 16\)"),
        ({"forward_step": lambda data, model: 3}, r"must return \(output_tensor, loss function\)"),
        ({"model": lambda pre_process, post_process: nn.Linear(2, 2)}, "returned a torch.*Linear; it must"),
        ({"datasets": lambda sizes: None}, r"must return \(train, valid, test\)"),
        ({"datasets": other_length}, "sequence_length=8, the run has --seq-length 16"),
        ({"datasets": other_number}, "was asked for 1 train samples, the run needs 8"),
        ({"datasets": lambda sizes: ([{"text": [1]}] * 20, None, None)}, "has no tokens and labels"),
    ],
)
def test_mistakes_get_a_sentence(wrong: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        run(tmp_path / "a", program(**wrong))


def test_extra_arguments_are_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--greeting", default="none")
        parser.add_argument("--times", type=int, nargs="+")

    words = "--lr 1e-3 --greeting hello --times 1 2 --bf16".split()
    left, own = take_extra_arguments(words, add, PRETRAIN_GPT)
    assert left == "--lr 1e-3 --bf16".split() and own == {"greeting": "hello", "times": [1, 2]}
    with pytest.raises(UserError, match="adds --lr, which is a flag already"):
        take_extra_arguments(words, lambda parser: parser.add_argument("--lr"), PRETRAIN_GPT)


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        ("--hidden-sizee 3", ModelType.encoder_or_decoder, "unknown flag --hidden-sizee"),
        ("", ModelType.retro_decoder, "only decoder models are supported"),
    ],
)
def test_pretrain_ends_with_a_sentence(
    words: str,
    kind: ModelType,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["my_script.py", *words.split()])
    with pytest.raises(SystemExit) as end:
        pretrain(None, PROVIDER, kind, pretrain_gpt.forward_step)
    assert end.value.code == 2 and said in capsys.readouterr().err


AXES: dict[Axis, Callable[[], Any]] = {
    "tensor": mpu.get_tensor_model_parallel_group,
    "pipeline": mpu.get_pipeline_model_parallel_group,
    "data": mpu.get_data_parallel_group,
    "context": mpu.get_context_parallel_group,
    "replicas": partial(mpu.get_data_parallel_group, with_context_parallel=True),
}


def asking(data_iterator: Any, model: Any) -> Any:
    """Compares the process groups and ranks of `mpu` with the grid."""
    world = current_run().world
    rank = dist.get_rank()
    for axis, ask in AXES.items():
        expected = next(members for members in world.grid.groups(axis) if rank in members)
        assert tuple(dist.get_process_group_ranks(ask())) == expected
    assert mpu.get_data_parallel_rank() == world.at.data and mpu.get_tensor_model_parallel_world_size() == 1
    virtual = mpu.get_virtual_pipeline_model_parallel_rank()
    assert mpu.get_virtual_pipeline_model_parallel_world_size() == 2 and virtual in (0, 1)
    assert mpu.is_pipeline_first_stage() == (world.at.pipeline == 0 and virtual == 0) == model.pre_process
    assert mpu.is_pipeline_last_stage() == (world.at.pipeline == 1 and virtual == 1) == model.post_process
    assert mpu.is_pipeline_first_stage(ignore_virtual=True) == (world.at.pipeline == 0)
    return pretrain_gpt.forward_step(data_iterator, model)


@distributed(world=4)
def test_mpu_answers_as_the_layout_is(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        write_corpus(tmp_path / "corpus")
    dist.barrier()
    words = "--num-layers 4 --pipeline-model-parallel-size 2 --vpp 2 --train-iters 1 --eval-interval 0"
    config = resolved(f"{RUN} --data-path {tmp_path}/corpus --run-dir {tmp_path}/a {words}", 4)
    world = create_groups(config.config.grid, dist.get_rank(), dist.get_rank(), torch.device("cpu"))
    run_training(config, world, True, program=program(forward_step=asking))


def test_a_configuration_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("model:\n  qk_layernorm: true\n")
    found: list[Any] = []

    def step(data_iterator: Any, model: Any) -> Any:
        args = get_args()
        assert args.yaml_cfg == str(tmp_path / "settings.yaml")
        found.append(core_transformer_config_from_yaml(args, "language_model"))
        with pytest.raises(UserError, match="describes one model, language_model, not vision"):
            core_transformer_config_from_yaml(args, "vision")
        return pretrain_gpt.forward_step(data_iterator, model)

    words = f"--train-iters 1 --yaml-cfg {tmp_path}/settings.yaml"
    run(tmp_path / "a", program(forward_step=step), words)
    assert found[0].qk_layernorm and found[0].normalization == "RMSNorm"


def test_local_checkpoints_are_refused_clearly() -> None:
    with pytest.raises(RuntimeError, match="the local checkpoint manager is not integrated"):
        BasicLocalCheckpointManager("/local")

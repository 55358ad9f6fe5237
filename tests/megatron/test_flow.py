"""Runs a program that calls the steps of `pretrain` one by one, as in guide 004."""

import atexit
import json
import os
import runpy
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import pretrain_gpt
from gpt_builders import gpt_builder
from model_provider import model_provider
from pentatron.errors import UserError
from pentatron.megatron.core.enums import ModelType
from pentatron.megatron.training import get_args, initialize_megatron
from pentatron.megatron.training.checkpointing import save_checkpoint
from pentatron.megatron.training.training import (
    build_train_valid_test_data_iterators,
    setup_model_and_optimizer,
    train_step,
)
from pentatron.train.model import Program
from tests.harness import run_distributed
from tests.megatron.test_programs import GUIDE_CODE, RUN, guide_module, train, write_corpus
from tests.support import DEFAULT

ROOT = Path(__file__).parent.parent.parent
LAYOUT = "--num-layers 4 --pipeline-model-parallel-size 2 --vpp 2"


def both(folder: Path, port: int) -> None:
    """Runs the configured training, and then the guide's program as a launcher would start it."""
    train(Program(), folder / "configured", LAYOUT, 2)
    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    guide_module("guide_pretrain")
    words = f"{DEFAULT} {RUN} {LAYOUT} --data-path {folder}/corpus --run-dir {folder}/flow --device cpu --save-checkpoints"
    own = "--threads-per-process 1 --log-interval 1 --log-progress --greeting hello"
    sys.argv = ["guide_flow.py", *f"{words} {own}".split()]
    with (folder / f"said-{rank}").open("w") as said:
        sys.stdout = said
        try:
            runpy.run_path(str(GUIDE_CODE / "guide_flow.py"), run_name="__main__")
            atexit._run_exitfuncs()
        finally:
            sys.stdout = sys.__stdout__


def rows(folder: Path) -> list[tuple[Any, ...]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["gradient_norm"]) for row in found]


def test_the_printed_flow_trains_as_the_configured_run(tmp_path: Path) -> None:
    """Covers virtual stages (lists of models and iterators) and an argument of the program."""
    write_corpus(tmp_path / "corpus")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_distributed(both, 2, folder=tmp_path, port=port)
    assert rows(tmp_path / "flow") == rows(tmp_path / "configured")
    said = (tmp_path / "said-0").read_text()
    order = [
        "time to initialize megatron (seconds)",
        "building GPT model ...",
        "[after model, optimizer, and learning rate scheduler are built] datetime: ",
        "> building train, validation, and test datasets for GPT ...",
        "done with setup ...",
        "    model-and-optimizer-setup ......................: (",
        "training ...",
        " iteration        2/       2 |",
        "validation loss at iteration 2 on validation set | lm loss value:",
        "validation loss at iteration 2 on test set | lm loss value:",
        "the program's own argument: hello",
    ]
    places = [said.find(line) for line in order]
    assert -1 not in places and places == sorted(places), places
    assert said.count("building GPT model ...") == 2, "one for each virtual stage of the first rank"
    assert (tmp_path / "flow/checkpoints/step-00000002").is_dir()
    assert (tmp_path / "flow/checkpoints/progress.txt").read_text().count("Starting job") == 1


def test_a_script_is_run_with_megatrons_names() -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pentatron.megatron", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    shown = run(str(GUIDE_CODE / "guide_pretrain.py"), "--help")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("usage: guide_pretrain.py ")
    assert "there is no script nothing.py" in run("nothing.py").stderr


def two_steps(folder: Path) -> list[float]:
    """Calls the training step from a program, after reading a micro-batch by hand."""
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    words = f"{DEFAULT} {RUN} --data-path {folder}/corpus --run-dir {folder}/steps --device cpu"
    sys.argv = ["my_script.py", *words.split()]
    initialize_megatron(args_defaults={"lr": 7.0, "greeting": "hello"})
    assert get_args().greeting == "hello" and get_args().lr == 0.01, "a flag counts more than a default"
    with pytest.raises(UserError, match="there is no model yet"):
        build_train_valid_test_data_iterators(None)
    model, optimizer, schedule = setup_model_and_optimizer(
        partial(model_provider, gpt_builder), ModelType.encoder_or_decoder
    )
    iterator, _, _ = build_train_valid_test_data_iterators(pretrain_gpt.train_valid_test_datasets_provider)
    by_hand, _, _ = build_train_valid_test_data_iterators(None)
    assert next(by_hand)["tokens"].shape == (1, 16) and schedule.get_lr() > 0
    losses = []
    for number in range(2):
        found, skipped, norm, _ = train_step(pretrain_gpt.forward_step, iterator, model, optimizer, schedule)
        assert not skipped and norm > 0
        losses.append(found["lm loss"].item())
        with pytest.raises(UserError, match=f"the run is at iteration {number + 1}, not 9"):
            save_checkpoint(9, model, optimizer, schedule, 0)
    with pytest.raises(UserError, match="the data iterator is none of build_train"):
        train_step(pretrain_gpt.forward_step, iter([]), model, optimizer, schedule)
    return losses


def configured(folder: Path) -> None:
    train(Program(), folder / "configured", "", 1)


def test_a_step_by_itself(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    run_distributed(configured, 1, folder=tmp_path)
    losses = run_distributed(two_steps, 1, folder=tmp_path)[0]
    assert losses == pytest.approx([row[1] for row in rows(tmp_path / "configured")], rel=1e-6)

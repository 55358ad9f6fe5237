"""Tests the guides' parallel scripts, tables and example layouts, and a resume in another layout."""

import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml

from pentatron.cli.layout import resolve_layout
from pentatron.cli.main import main
from pentatron.layout.check import ScheduleProperties, check
from pentatron.layout.schedules import training_schedule
from tests.cli.test_train import ROOT, environment, finish, losses
from tests.harness import run_distributed

PARALLEL = "tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size"


def layout_of(folder: Path) -> tuple[int, ...]:
    """Returns tensor and pipeline size from the folder of a run."""
    saved = yaml.safe_load((folder / "config.yaml").read_text())["parallel"]
    return tuple(saved[name] for name in PARALLEL[:2])


# --- variables of the shell scripts ---


def words_given(script: str, tmp_path: Path, variables: str, further: str = "") -> str:
    """Returns the arguments passed to Python, which is replaced by a program that records them."""
    recorder = tmp_path / "recorder"
    recorder.write_text('#!/bin/sh\necho "$@"\n')
    recorder.chmod(recorder.stat().st_mode | stat.S_IXUSR)
    chosen = dict(pair.split("=") for pair in variables.split())
    known = "NUM_GPUS TP_SIZE PP_SIZE HIDDEN_SIZE NUM_LAYERS CONFIG_FILE NUM_NODES NODE_RANK MASTER_ADDR MASTER_PORT"
    inherited = {k: v for k, v in os.environ.items() if k not in known.split()}
    shown = subprocess.run(
        ["bash", ROOT / script, *further.split()],
        env={**inherited, **chosen, "PYTHON": str(recorder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return shown.stdout.strip()


@pytest.mark.parametrize(
    ("script", "variables", "words"),
    [
        ("run_3d_parallel.sh", "", "train_3d_parallel.py --nproc-per-node 8 --tp_size 2 --pp_size 2"),
        (
            "run_3d_parallel.sh",
            "NUM_GPUS=16 TP_SIZE=4 PP_SIZE=1",
            "train_3d_parallel.py --nproc-per-node 16 --tp_size 4 --pp_size 1",
        ),
        ("run_megatron.sh", "", "train_megatron.py --nproc-per-node 8"),
        (
            "run_megatron.sh",
            "NUM_GPUS=4 TP_SIZE=2 PP_SIZE=2 HIDDEN_SIZE=1024 NUM_LAYERS=24 CONFIG_FILE=configs/medium_model.yaml",
            "train_megatron.py --nproc-per-node 4 --config configs/medium_model.yaml --hidden_size 1024 "
            "--num_layers 24 --tp_size 2 --pp_size 2",
        ),
        ("run_pytorch_ddp.sh", "NUM_GPUS=2", "train.py --nproc-per-node 2"),
        (
            "run_multinode.sh",
            "NUM_NODES=2 NODE_RANK=1 MASTER_ADDR=192.168.1.100",
            "-m torch.distributed.run --nproc_per_node=8 --nnodes=2 --node_rank=1 --master_addr=192.168.1.100 "
            "--master_port=29500 train_3d_parallel.py --tp_size 2 --pp_size 2",
        ),
        (
            "run_multinode.sh",
            "NUM_NODES=4 NODE_RANK=3 MASTER_ADDR=head MASTER_PORT=6000 NUM_GPUS=4 TP_SIZE=4 PP_SIZE=4",
            "-m torch.distributed.run --nproc_per_node=4 --nnodes=4 --node_rank=3 --master_addr=head "
            "--master_port=6000 train_3d_parallel.py --tp_size 4 --pp_size 4",
        ),
    ],
)
def test_script_variables_become_flags(script: str, variables: str, words: str, tmp_path: Path) -> None:
    assert words_given(script, tmp_path, variables) == words
    further = "--max_steps 5"
    assert words_given(script, tmp_path, variables, further) == f"{words} {further}"


def test_missing_node_rank_is_reported(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        words_given("run_multinode.sh", tmp_path, "NUM_NODES=2 MASTER_ADDR=head")
    assert "set NODE_RANK to 0, 1, ... on each machine" in refused.value.stderr


SMALL = (
    "--vocab_size 100 --hidden_size 32 --num_attention_heads 2 --num_layers 2 --max_seq_len 16 --batch_size 4 "
    "--max_steps 3 --threads-per-process 1"
)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_two_launchers_train_one_model(tmp_path: Path) -> None:
    """Simulates two machines: each launcher starts one tensor rank."""
    folder = tmp_path / "run"
    common = {
        **environment(), "PYTHON": sys.executable, "NUM_NODES": "2", "NUM_GPUS": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TP_SIZE": "2", "PP_SIZE": "1",
    }  # fmt: skip
    machines = [
        subprocess.Popen(
            ["bash", ROOT / "run_multinode.sh", *SMALL.split(), "--run-dir", str(folder)],
            env={**common, "NODE_RANK": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    ended = [finish(machine) for machine in machines]
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert layout_of(folder) == (2, 1)
    assert [step for step, _ in losses(folder)] == [1, 2, 3]


# --- resume in another layout ---


def train_on_a_rank(words: list[str], port: int) -> int:
    """Runs `pentatron train` as a worker of a launcher."""
    rank, processes = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ.update({name: str(number) for name, number in (place | {"MASTER_PORT": port}).items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", CUDA_VISIBLE_DEVICES="")
    return main(["train", *words])


def test_run_resumes_in_another_layout(tmp_path: Path) -> None:
    """One process saves at step 3 and ends at step 6; two pipeline ranks repeat steps 4 to 6."""
    folder = tmp_path / "run"
    words = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 100 --dataset-size 100 "
        "--hidden-dropout 0.1 --global-batch-size 4 --micro-batch-size 2 --train-iters 6 --save-interval 3 "
        f"--threads-per-process 1 --run-dir {folder}"
    ).split()
    assert run_distributed(train_on_a_rank, 1, words=words, port=free_port()) == [0]
    before = losses(folder)
    assert layout_of(folder) == (1, 1)
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    words += ["--pipeline-model-parallel-size", "2"]
    assert run_distributed(train_on_a_rank, 2, words=words, port=free_port()) == [0, 0]
    assert "resuming at step 3" in (folder / "train.log").read_text()
    assert layout_of(folder) == (1, 2)
    assert losses(folder) == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in before]


# --- the guides' tables ---

MODELS = {
    "13b": "--num-layers 40 --hidden-size 5120 --num-attention-heads 40",
    "72b": "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --num-query-groups 8 --ffn-hidden-size 29568",
    "405b": "--num-layers 126 --hidden-size 16384 --num-attention-heads 128 --num-query-groups 8 --ffn-hidden-size 53248",
}


def sizes(model: str, processes: int, tensor: int, pipeline: int) -> tuple[int, ...]:
    """Returns the resolved layout of a model of the table."""
    words = MODELS.get(model, f"--preset {model}")
    parallel = f"--world-size {processes} --tp_size {tensor} --pp_size {pipeline}"
    report = resolve_layout(f"{words} {parallel} --global-batch-size {8 * processes}".split())
    assert sum(len(part.layers) for part in report.config.stages) == report.config.model.num_layers
    return tuple(getattr(report.config.parallel, name) for name in PARALLEL)


@pytest.mark.parametrize(
    ("processes", "data", "tensor", "pipeline", "model"),
    [
        (4, 4, 1, 1, "qwen3-0.6b"),
        (4, 2, 2, 1, "llama3.2-1b"),
        (8, 2, 2, 2, "qwen3-4b"),
        (16, 2, 4, 2, "llama3-8b"),
        (32, 2, 4, 4, "13b"),
        (64, 2, 8, 4, "qwen2.5-32b"),
    ],
)
def test_the_3d_table(processes: int, data: int, tensor: int, pipeline: int, model: str) -> None:
    """GPUs, DP, TP and PP of guide 002, each with a model of the size its row names."""
    assert sizes(model, processes, tensor, pipeline) == (tensor, pipeline, data)


@pytest.mark.parametrize(
    ("model", "processes", "tensors", "pipelines"),
    [
        ("qwen2.5-7b", 8, (1, 2), (1,)),
        ("qwen2.5-32b", 32, (4, 8), (1, 2)),
        ("72b", 64, (8,), (2, 4)),
        ("405b", 512, (8,), (8, 16)),
    ],
)
def test_the_table_by_model_size(
    model: str, processes: int, tensors: tuple[int, ...], pipelines: tuple[int, ...]
) -> None:
    """Ranges of TP and PP of guide 001; data parallelism takes the rest."""
    for tensor in tensors:
        for pipeline in pipelines:
            expected = (tensor, pipeline, processes // (tensor * pipeline))
            assert sizes(model, processes, tensor, pipeline) == expected


def test_sixteen_gpus_on_four_machines() -> None:
    """Guide 003's example: tensor groups stay inside a machine, stages are on different ones."""
    report = resolve_layout(
        (
            "--world-size 16 --nproc-per-node 4 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 "
            "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --micro-batch-size 1 "
            "--global-batch-size 64 --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine --train-iters 100000 --bf16 "
            "--save-interval 1000 --log-interval 10"
        ).split()
    )
    grid, config = report.grid, report.config
    assert (grid.tensor, grid.pipeline, grid.data, grid.world_size) == (4, 2, 2, 16)
    assert all(len({report.place(rank)["machine"] for rank in group}) == 1 for group in grid.groups("tensor"))
    assert all(
        len({report.place(rank)["machine"] for rank in group}) == 2 for group in grid.groups("pipeline")
    )
    assert config.accumulation == 32
    assert (config.optim.lr, config.optim.min_lr, config.optim.lr_decay_style) == (1.5e-4, 1.5e-5, "cosine")
    assert config.train.train_iters == 100000 and config.precision.bf16
    assert (config.checkpoint.save_interval, config.log.log_interval) == (1000, 10)
    assert [len(part.layers) for part in config.stages] == [16, 16]


# --- schedules ---


def checked(kind: str, micro_batches: int) -> ScheduleProperties:
    return check(training_schedule(kind, 4, 1, micro_batches))


def test_memory_and_bubble_of_the_schedules() -> None:
    """Compares the memory and the bubble of 1F1B and GPipe.

    1F1B keeps fewer micro-batches alive. With the memory that GPipe needs for four micro-batches, 1F1B has a
    smaller bubble. More micro-batches make the bubble smaller.
    """
    assert max(checked("1f1b", 16).in_flight) == 4 < max(checked("gpipe", 16).in_flight) == 16
    assert max(checked("gpipe", 4).in_flight) == 4, "the same memory as 1F1B with any number of micro-batches"
    assert checked("gpipe", 4).bubble > checked("1f1b", 16).bubble
    for kind in ("1f1b", "gpipe"):
        waiting = [checked(kind, count).bubble for count in (4, 8, 16, 32)]
        assert waiting == sorted(waiting, reverse=True) and len(set(waiting)) == 4
        assert waiting == [pytest.approx(3 / (count + 3)) for count in (4, 8, 16, 32)]
    kept = [max(checked("gpipe", count).in_flight) for count in (4, 8, 16, 32)]
    assert kept == [4, 8, 16, 32], "more micro-batches, more memory"

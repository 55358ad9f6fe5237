"""Refuses impossible layouts with one sentence and its equation, before a process group starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pentatron.errors import ConfigError
from pentatron.settings.settings import ProcessFacts
from tests import support
from tests.settings.builders import problems

ROOT = Path(__file__).parents[2]

# name: processes, words, the one sentence. The model: 2 layers, 32 wide, 4 heads, 16 tokens, global batch 8.
IMPOSSIBLE: dict[str, tuple[int, str, str]] = {
    "too few processes": (
        2, "--tp_size 2 --pp_size 2",
        "2 processes are too few: one copy of the model needs 2 (tensor) × 2 (pipeline) × 1 (context) = 4; "
        "start 4 processes or a multiple, or lower the parallel sizes"),
    "processes left over": (
        6, "--tp_size 4 --global-batch-size 6",
        "6 processes cannot be divided into copies of the model of 4 (tensor) × 1 (pipeline) × 1 (context) = 4 processes "
        "each; use 4 or 8 processes, or other parallel sizes"),
    "another number of copies": (
        8, "--tp_size 2 --data-parallel-size 2",
        "--data-parallel-size 2 × 2 (tp × pp × cp) = 4, but there are 8 processes; use 4 or leave it out"),
    "heads": (
        3, "--tp_size 3 --ffn-hidden-size 129",
        "--num-attention-heads 4 is not divisible by --tensor-model-parallel-size 3; use 1, 2 or 4"),
    "groups of heads": (
        2, "--tp_size 2 --hidden-size 36 --num-attention-heads 6 --num-query-groups 3",
        "--num-query-groups 3 is neither a multiple nor a divisor of --tensor-model-parallel-size 2; "
        "use a tensor parallel size of 1 or 3"),
    "width of the MLP": (
        4, "--tp_size 4 --ffn-hidden-size 130",
        "--ffn-hidden-size 130 is not divisible by --tensor-model-parallel-size 4; use --ffn-hidden-size 136"),
    "rows of the vocabulary": (
        2, "--tp_size 2 --padded-vocab-size 63",
        "--padded-vocab-size 63 is not divisible by --tensor-model-parallel-size 2; use 64 or leave it out"),
    "tokens of a sequence": (
        4, "--tp_size 4 --sequence-parallel --seq-length 18",
        "--seq-length 18 is not divisible by 4, as 4 (tensor, for --sequence-parallel) need; use 16 or 20"),
    "layers": (
        4, "--pp_size 4",
        "--num-layers 2 cannot fill the 4 stages of --pipeline-model-parallel-size 4; "
        "use 4 layers or more, or at most 2 stages"),
    "layers for virtual stages": (
        2, "--pp_size 2 --num-layers 5 --virtual-pipeline-model-parallel-size 3",
        "--num-layers 5 cannot fill 2 (pipeline) × 3 (virtual) = 6 stages; use 6 layers or more, or fewer stages"),
    "layers of a virtual stage": (
        2, "--pp_size 2 --num-layers 10 --num-layers-per-virtual-pipeline-stage 2",
        "--num-layers 10 is not divisible by 2 (pipeline) × 2 (--num-layers-per-virtual-pipeline-stage) = 4; "
        "use 8 or 12 layers, or another number for each stage"),
    "shards and halves of a backward": (
        4, "--pp_size 2 --zero-stage 3 --pipeline-schedule zbv --untie-embeddings-and-output-weights --num-layers 4",
        "--pipeline-schedule zbv defers weight gradients until after --zero-stage 3 has reduced the gradients of a layer and freed its weights; use 1f1b, gpipe or interleaved, or --zero-stage 2"),
    "groups of replicas": (
        4, "--zero-stage 3 --num-distributed-optimizer-instances 8",
        "--num-distributed-optimizer-instances 8 does not divide 4 (data) × 1 (context) = 4 ranks that hold the same "
        "weights; use 1, 2 or 4"),
    "virtual stages without a pipeline": (
        1, "--virtual-pipeline-model-parallel-size 2",
        "virtual stages (2 on each rank) need a pipeline, but --pipeline-model-parallel-size is 1; "
        "use 2 or more pipeline ranks, or leave the virtual stages out"),
    "first and last rank take too much": (
        4, "--pp_size 4 --num-layers 8 --decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 3",
        "--decoder-first-pipeline-num-layers 4 and --decoder-last-pipeline-num-layers 3 leave 8 − 7 = 1 layers for the 2 "
        "other stages, which need one each; the sum of all must be --num-layers 8"),
    "first and last rank take too little": (
        2, "--pp_size 2 --num-layers 8 --decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 3",
        "--decoder-first-pipeline-num-layers 4 and --decoder-last-pipeline-num-layers 3 have 7 layers together, but "
        "--num-layers is 8; leave one of them out"),
    "layers divided twice": (
        2, "--pp_size 2 --decoder-first-pipeline-num-layers 1 --pipeline-model-parallel-layout Et|tL",
        "--pipeline-model-parallel-layout and --decoder-first-pipeline-num-layers each set how the layers are divided; "
        "give one of them"),
    "a layout with too few layers": (
        2, "--pp_size 2 --num-layers 30 --pipeline-model-parallel-layout Et*14|t*14L",
        "--pipeline-model-parallel-layout Et*14|t*14L has 28 layers in its 2 stages, but --num-layers is 30; add 2 t"),
    "a layout with too few stages": (
        4, "--pp_size 4 --num-layers 6 --pipeline-model-parallel-layout Ett|tt|ttL",
        "--pipeline-model-parallel-layout Ett|tt|ttL has 3 stages, but 4 (pipeline) × 1 (virtual) = 4; "
        "write 4 stages, or change the sizes"),
    "a folded pipeline with three stages on a rank": (
        2, "--pp_size 2 --num-layers 6 --pipeline-schedule zbv --virtual-pipeline-model-parallel-size 3 "
        "--untie-embeddings-and-output-weights",
        "--pipeline-schedule zbv runs two stages on each rank, not 3; "
        "leave --virtual-pipeline-model-parallel-size out, or use zero-bubble"),
    "too few micro-batches for dualpipev": (
        2, "--pp_size 2 --num-layers 4 --pipeline-schedule dualpipev --untie-embeddings-and-output-weights "
        "--micro-batch-size 4",
        "--pipeline-schedule dualpipev needs 2 × 2 (pipeline ranks) = 4 or more micro-batches, not 2; "
        "use 4 or more, or the schedule zbv"),
    "interleaved without virtual stages": (
        2, "--pp_size 2 --pipeline-schedule interleaved",
        "--pipeline-schedule interleaved needs several stages on each rank; "
        "give --virtual-pipeline-model-parallel-size 2 or more, or use 1f1b"),
    "gpipe with virtual stages": (
        2, "--pp_size 2 --num-layers 4 --pipeline-schedule gpipe --virtual-pipeline-model-parallel-size 2",
        "--pipeline-schedule gpipe runs one stage on each rank, not the 2 of --virtual-pipeline-model-parallel-size 2; "
        "use interleaved, or leave one of the two out"),
    "a group larger than the step": (
        2, "--pp_size 2 --num-layers 4 --virtual-pipeline-model-parallel-size 2 --micro-batch-size 2 "
           "--microbatch-group-size-per-virtual-pipeline-stage 5",
        "--microbatch-group-size-per-virtual-pipeline-stage 5: a group of 5 micro-batches does not fit 4 micro-batches; "
        "use a number from 2 (pipeline ranks) to 4 (micro-batches)"),
    "a group smaller than the pipeline": (
        4, "--pp_size 4 --num-layers 8 --virtual-pipeline-model-parallel-size 2 --micro-batch-size 1 "
           "--microbatch-group-size-per-virtual-pipeline-stage 2",
        "--microbatch-group-size-per-virtual-pipeline-stage 2: a group of 2 micro-batches does not fit 8 micro-batches; "
        "use a number from 4 (pipeline ranks) to 8 (micro-batches)"),
    "a batch that cannot be divided": (
        4, "--pp_size 2 --micro-batch-size 3",
        "global batch size (8) is not divisible by micro batch size (3) times data parallel size (2) = 6; "
        "use --micro-batch-size 1, 2 or 4"),
    "micro-batches that do not add up": (
        2, "--pp_size 2 --micro-batch-size 2 --num-microbatches 3",
        "--global-batch-size 8 ≠ 2 (micro) × 1 (data-parallel) × 3 (micro-batches) = 6; leave one of them out"),
}  # fmt: skip


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible(name: str) -> None:
    processes, words, sentence = IMPOSSIBLE[name]
    with pytest.raises(ConfigError) as error:
        support.resolved(words, processes)
    assert error.value.problems == [sentence]


# The layouts above with one number corrected, so that each refusal is known to come from that number.
POSSIBLE = [
    (4, "--tp_size 2 --pp_size 2"),
    (8, "--tp_size 4"),
    (8, "--tp_size 2 --data-parallel-size 4"),
    (4, "--tp_size 4 --ffn-hidden-size 132"),
    (2, "--tp_size 2 --hidden-size 36 --num-attention-heads 6 --num-query-groups 2"),
    (4, "--tp_size 4 --hidden-size 32 --num-query-groups 2"),
    (2, "--tp_size 2 --padded-vocab-size 64"),
    (4, "--tp_size 4 --sequence-parallel --seq-length 20"),
    (2, "--pp_size 2"),
    (2, "--pp_size 2 --num-layers 6 --virtual-pipeline-model-parallel-size 3"),
    (2, "--pp_size 2 --num-layers 8 --num-layers-per-virtual-pipeline-stage 2"),
    (4, "--pp_size 4 --num-layers 9 --decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 3"),
    (2, "--pp_size 2 --num-layers 30 --pipeline-model-parallel-layout Et*15|t*15L"),
    (2, "--pp_size 2 --num-layers 4 --virtual-pipeline-model-parallel-size 2 --micro-batch-size 2 "
        "--microbatch-group-size-per-virtual-pipeline-stage 3"),
    (4, "--pp_size 4 --num-layers 8 --virtual-pipeline-model-parallel-size 2 --micro-batch-size 1 "
        "--microbatch-group-size-per-virtual-pipeline-stage 5"),
    (4, "--pp_size 2 --micro-batch-size 4"),
    (4, "--pp_size 4 --num-layers 5 --micro-batch-size 8 --pipeline-schedule gpipe"),
]  # fmt: skip


@pytest.mark.parametrize(("processes", "words"), POSSIBLE)
def test_possible(processes: int, words: str) -> None:
    config = support.resolved(words, processes).config
    assert config.grid.world_size == processes
    assert len(config.schedule(config.accumulation).actions) == config.grid.pipeline
    assert sum(len(part.layers) for part in config.stages) == config.model.num_layers


def test_all_problems_are_reported_at_once() -> None:
    words = "--tp_size 3 --pp_size 4 --num-layers 3 --micro-batch-size 5 --global-batch-size 8"
    found = problems(words, ProcessFacts(12, 12))
    assert [sentence.split(" ")[0] for sentence in found] == [
        "--num-attention-heads", "--ffn-hidden-size", "--num-layers", "global",
    ]  # fmt: skip


# Any attempt to make a process group, or another process, ends the program with a traceback and exit code 1.
GUARDED = """
import builtins, subprocess, sys, os

def forbidden(*words, **more):
    raise RuntimeError("started something")

subprocess.Popen.__init__ = forbidden
os.fork = os.posix_spawn = forbidden
real_import = builtins.__import__

def watched(name, *rest):
    if name.startswith("torch"):
        raise RuntimeError(f"imported {name}")
    return real_import(name, *rest)

builtins.__import__ = watched
from pentatron.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def guarded(*words: str) -> "subprocess.CompletedProcess[str]":
    hidden = ("RANK", "WORLD_SIZE", "SLURM_STEP_ID", "NCCL_TIMEOUT")
    environment = {k: v for k, v in os.environ.items() if k not in hidden} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", GUARDED, *words],
        capture_output=True, text=True, check=False, env=environment, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--nproc-per-node 3 --tensor-model-parallel-size 2",
         "3 processes cannot be divided into copies of the model of 2 (tensor) × 1 (pipeline) × 1 (context) = 2"),
        ("--nproc-per-node 4 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tL",
         "has 2 layers in its 2 stages, but --num-layers is 4; add 2 t"),
        ("--nproc-per-node 4 --pipeline-model-parallel-size 2 --pipeline-schedule interleaved",
         "--pipeline-schedule interleaved needs several stages on each rank"),
    ],
)  # fmt: skip
def test_the_command_refuses_before_anything_starts(words: str, sentence: str, tmp_path: Path) -> None:
    done = guarded("train", *words.split(), "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_guard_sees_a_start(tmp_path: Path) -> None:
    """Control: a possible layout does start something."""
    done = guarded("train", "--nproc-per-node", "2", "--run-dir", str(tmp_path / "run"))
    assert done.returncode not in (0, 2)
    assert "RuntimeError: imported torch" in done.stderr or "RuntimeError: started something" in done.stderr

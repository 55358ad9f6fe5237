"""Tests which arguments the multi-node scripts of examples/ pass to the launcher of a machine."""

import subprocess
from pathlib import Path

import pytest

from pentatron.cli.layout import resolve_layout
from tests.cli.test_parallel_commands import words_given

HERE = "NODE_RANK=1 MASTER_ADDR=head"
RUN = "-m torch.distributed.run --nproc_per_node={} --nnodes={} --node_rank=1 --master_addr=head --master_port={} {}"


@pytest.mark.parametrize(
    ("script", "variables", "words"),
    [
        ("pretrain_gpt.sh", "", RUN.format(8, 2, 29500, "pretrain_gpt.py --bf16")),
        ("pretrain_gpt.sh", "NNODES=3 GPUS_PER_NODE=4 MASTER_PORT=6000", RUN.format(4, 3, 6000, "pretrain_gpt.py --bf16")),
        (
            "train_entry.sh",
            "",
            RUN.format(4, 4, 6000, "pretrain_gpt.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --bf16"),
        ),
        (
            "train_entry.sh",
            "WORLD_SIZE=8 GPUS_PER_NODE=2 TENSOR_PARALLEL=2 PIPELINE_PARALLEL=1 DATA_PARALLEL=4 TRAIN_ENTRY=mine.py MASTER_PORT=7000",
            RUN.format(
                2, 4, 7000,
                "mine.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --data-parallel-size 4 --bf16",
            ),
        ),
    ],
)  # fmt: skip
def test_variables_become_words(script: str, variables: str, words: str, tmp_path: Path) -> None:
    assert words_given(f"examples/multinode/{script}", tmp_path, f"{HERE} {variables}", "--bf16") == words


def test_without_words_the_entry_trains_the_guides_model(tmp_path: Path) -> None:
    words = words_given("examples/multinode/train_entry.sh", tmp_path, HERE).split()
    settings = words[words.index("pretrain_gpt.py") + 1 :]
    # Its data and its tokenizer do not exist here.
    left_out = {"--data-path": 2, "--tokenizer-type": 2, "--tokenizer-model": 2, "--save": 2}
    for flag, count in left_out.items():
        place = settings.index(flag)
        del settings[place : place + count]
    report = resolve_layout(["--world-size", "16", "--nproc-per-node", "4", *settings])
    assert (report.grid.tensor, report.grid.pipeline, report.grid.data) == (4, 2, 2)
    assert report.config.accumulation == 32


def test_a_world_that_does_not_fill_its_machines_is_refused(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        words_given("examples/multinode/train_entry.sh", tmp_path, f"{HERE} WORLD_SIZE=10")
    assert "WORLD_SIZE=10 is not a multiple of GPUS_PER_NODE=4" in refused.value.stderr

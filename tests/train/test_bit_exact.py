"""A stopped and resumed run ends with the state of an undisturbed one, bit for bit.

Every part runs in its own processes, so that only the checkpoint carries state over.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pentatron.checkpoint.find import find_step
from pentatron.data.indexed_writer import IndexedDatasetWriter
from pentatron.parallel.world import create_groups, single_process
from pentatron.train.session import run_training
from tests.checkpoint.digest import StateDigest, state_digest
from tests.harness import run_distributed
from tests.parity.cases import GROUPED, MIXTURES
from tests.support import LLAMA, resolved

STEPS, STOP = 7, 3
TIMEOUT = 240.0
# Both kinds of dropout, at least two micro-batches, warm-up, evaluations before and after the stop.
RUN = (
    f"--train-iters {STEPS} --save-interval {STEPS} --log-interval 1 --micro-batch-size 1 --eval-interval 2 --eval-iters 1 "
    f"--lr-warmup-iters 4 --hidden-dropout 0.1 --attention-dropout 0.1 --check-for-spiky-loss --sample-tokens 0"
)
MODEL = f"{LLAMA} {GROUPED} --num-layers 4 --num-attention-heads 8 --kv-channels 8"
FP16 = "--fp16 --initial-loss-scale 262144 --hysteresis 1 --loss-scale-window 2"
RAMP = "--rampup-batch-size 4 4 16 --global-batch-size 8"
WITHOUT_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
# (name, ranks, flags). Every test run has OFTEN; SELDOM is left to `make sweep`.
OFTEN = (
    ("tp2 fp16 ramp", 2, f"--num-layers 2 --tp_size 2 --sequence-parallel {FP16} {RAMP}"),
    ("pp2 zero-bubble bf16", 2, "--num-layers 2 --pp_size 2 --pipeline-schedule zero-bubble --bf16"),
)
SELDOM = (
    ("alone", 1, ""),
    ("alone bf16 sgd", 1, "--bf16 --optimizer sgd --sgd-momentum 0.9"),
    ("alone fp16 offload", 1, f"{FP16} --optimizer-cpu-offload"),
    ("tp2 bf16", 2, "--tp_size 2 --bf16"),
    (
        "tp2 sp full recompute",
        2,
        "--tp_size 2 --sequence-parallel --recompute-granularity full --recompute-method uniform",
    ),
    ("pp2 virtual fp16", 2, f"--pp_size 2 --virtual-pipeline-model-parallel-size 2 {FP16}"),
    ("pp2 zbv ramp", 2, f"--pp_size 2 --pipeline-schedule zbv {RAMP}"),
    ("pp2 dualpipev bf16", 2, "--pp_size 2 --pipeline-schedule dualpipev --bf16"),
    ("pp2 gpipe sgd", 2, "--pp_size 2 --pipeline-schedule gpipe --optimizer sgd"),
    ("dp2", 2, ""),
    ("dp2 zero1 fp16", 2, f"--zero-stage 1 {FP16}"),
    ("dp2 zero1 overlap bf16", 2, "--zero-stage 1 --overlap-grad-reduce --overlap-param-gather --bf16"),
    ("dp2 zero2 sgd bf16", 2, "--zero-stage 2 --optimizer sgd --sgd-momentum 0.9 --bf16"),
    ("dp2 zero3 bf16", 2, "--zero-stage 3 --bf16"),
    ("dp2 zero3 fp16 ramp", 2, f"--zero-stage 3 {FP16} {RAMP}"),
    ("dp4 zero3 hybrid", 4, "--zero-stage 3 --num-distributed-optimizer-instances 2"),
    ("dp2 zero1 offload bf16", 2, "--zero-stage 1 --optimizer-cpu-offload --bf16"),
    ("cp2 bf16", 2, f"--context-parallel-size 2 {WITHOUT_DROPOUT} --bf16"),
    ("cp2 a2a fp16", 2, f"--context-parallel-size 2 --cp-comm-type a2a {WITHOUT_DROPOUT} {FP16}"),
    ("ep2 bf16", 2, f"{MIXTURES['sigmoid']} --expert-model-parallel-size 2 --bf16"),
    ("ep2 global balance fp16", 2, f"{MIXTURES['qwen2-moe']} --expert-model-parallel-size 2 {FP16}"),
    ("ep2 zero3", 2, f"{MIXTURES['sigmoid']} --expert-model-parallel-size 2 --zero-stage 3"),
    ("tp2 etp2 bf16", 2, f"{MIXTURES['mixtral']} --tp_size 2 --sequence-parallel --bf16"),
    (
        "tp2 pp2 virtual bf16",
        4,
        "--tp_size 2 --sequence-parallel --pp_size 2 --virtual-pipeline-model-parallel-size 2 --bf16",
    ),
    ("tp2 pp2 dp2 zero1 fp16", 8, f"--tp_size 2 --sequence-parallel --pp_size 2 --zero-stage 1 {FP16}"),
    ("tp2 dp2 zero2 ramp bf16", 4, f"--tp_size 2 --zero-stage 2 {RAMP} --bf16"),
    (
        "cp2 pp2 zero1 bf16",
        4,
        f"--context-parallel-size 2 --pp_size 2 --zero-stage 1 {WITHOUT_DROPOUT} --bf16",
    ),
    (
        "pp2 dp2 ep2 zero1 bf16",
        4,
        f"{MIXTURES['qwen3-moe']} --pp_size 2 --expert-model-parallel-size 2 --zero-stage 1 --bf16",
    ),
)
CASES = [
    *(pytest.param(ranks, words, id=name) for name, ranks, words in OFTEN),
    *(pytest.param(ranks, words, id=name, marks=pytest.mark.sweep) for name, ranks, words in SELDOM),
]


def write_corpora(folder: Path) -> str:
    """Writes two corpora and returns their flags; the run reads the second for several epochs."""
    draw = np.random.default_rng(0)
    for name, count in (("a", 60), ("b", 9)):
        with IndexedDatasetWriter(folder / name, "uint16") as writer:
            for _ in range(count):
                writer.add_document(draw.integers(0, 60, size=draw.integers(5, 30)))
    return f"--data-path 2 {folder / 'a'} 1 {folder / 'b'} --split 8,2"


def train_on_a_rank(words: str) -> None:
    chosen = resolved(words, dist.get_world_size())
    world = create_groups(chosen.config.grid, dist.get_rank(), dist.get_rank(), torch.device("cpu"))
    run_training(chosen, world if world.all_ranks.size > 1 else single_process(), True)


def train(folder: Path, ranks: int, words: str) -> StateDigest:
    run_distributed(
        train_on_a_rank, ranks, timeout=TIMEOUT, words=f"{RUN} {MODEL} {words} --run-dir {folder}"
    )
    found, complaints = find_step(folder)
    assert not complaints
    return state_digest(found.folder, found.manifest)


@pytest.mark.parametrize(("ranks", "words"), CASES)
def test_a_stopped_run_ends_with_the_state_of_an_undisturbed_one(
    tmp_path: Path, ranks: int, words: str
) -> None:
    words = f"{words} {write_corpora(tmp_path)}"
    whole = train(tmp_path / "whole", ranks, words)
    stopped = train(tmp_path / "cut", ranks, f"{words} --exit-interval {STOP}")
    assert {"weights", "cursor"} <= {*stopped.differences(whole)}
    resumed = train(tmp_path / "cut", ranks, words)
    assert resumed.differences(whole) == []

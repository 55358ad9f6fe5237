"""Resharding in one process writes the same files as the ranks of the target layout."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pentatron.checkpoint.find import find_step
from pentatron.checkpoint.store import Checkpoint
from pentatron.compare.reshard import fragments_of_rank, layout_for, reshard
from pentatron.errors import ConfigError, UserError
from pentatron.monitor.display import SilentDisplay
from pentatron.optim.build import build_optimizer
from pentatron.parallel.world import create_groups
from pentatron.settings.resolve import Resolved
from pentatron.train.model import build_parallel_model
from tests.harness import run_distributed
from tests.support import LLAMA, resolved
from tests.train.test_loaded import train_on_a_rank

CPU = torch.device("cpu")
MOE = "--num-experts 4 --moe-ffn-hidden-size 16 --moe-router-topk 2 --moe-router-enable-expert-bias --moe-router-score-function sigmoid"
LAYOUTS = {
    "zero1": (2, "--zero-stage 1 --ddp-bucket-size 1000"),
    "tp2 pp2": (4, "--tp 2 --pp 2 --sequence-parallel"),
    "folded, tied": (2, "--pp 2 --pipeline-schedule dualpipev --num-layers 4 --micro-batch-size 1"),
    "kv copies": (4, f"--tp 4 --group-query-attention --num-query-groups 2 {LLAMA}"),
    "ep2 tp2 zero2": (4, f"--tp 2 --ep 2 --expert-tensor-parallel-size 1 --zero-stage 2 {MOE} --sequence-parallel"),
    "zero3": (2, "--zero-stage 3"),
    "zero3 of experts": (4, f"--ep 2 --zero-stage 3 {MOE}"),
    "zero3 in instances": (4, "--zero-stage 3 --num-distributed-optimizer-instances 2"),
}  # fmt: skip


def written_by_a_rank(settings: Resolved) -> list[tuple[object, ...]]:
    config, rank = settings.config, dist.get_rank()
    world = create_groups(config.grid, rank, rank, CPU)
    model = build_parallel_model(config, world)
    optimizer = build_optimizer(model.stages, world, config.optim, model.decisions.optimizer, torch.float32)
    fragments = [*optimizer.fragments(owned_only=True), *model.routers.fragments(owned_only=True)]
    return rectangles(f for f in fragments if not f.tensor.startswith("exp_avg"))


def rectangles(fragments: object) -> list[tuple[object, ...]]:
    return sorted((f.tensor, tuple(f.shape), tuple(f.start), tuple(f.values.shape)) for f in fragments)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_writes_the_predicted_fragments(name: str) -> None:
    world, words = LAYOUTS[name]
    settings = resolved(words, world)
    written = run_distributed(written_by_a_rank, world, settings=settings)
    foretold = [rectangles(fragments_of_rank(settings.config, rank)) for rank in range(world)]
    assert foretold == written
    assert len({str(part) for part in written}) == world or name == "zero3 in instances", "ranks differ"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("trained") / "run"
    shape = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 61 --train-iters 2"
    run_distributed(train_on_a_rank, 4, folder=folder, words=f"{shape} --tp 2 --zero-stage 1")
    return find_step(folder)[0]


def sums(found: Checkpoint) -> dict[str, str]:
    return {name: record.sha256 for name, record in found.manifest.files.items()}


def made(found: Checkpoint, out: Path, words: str) -> Checkpoint:
    reshard(found, out, layout_for(found, words.split()), SilentDisplay())
    return find_step(out)[0]


def test_there_and_back_gives_the_same_files(trained: Checkpoint, tmp_path: Path) -> None:
    alone = made(trained, tmp_path / "alone", "")
    assert len(alone.manifest.files) == 1 and sums(alone) != sums(trained)
    assert alone.manifest.run_state == trained.manifest.run_state
    assert alone.manifest.config["parallel"]["tensor_model_parallel_size"] == 1
    elsewhere = made(alone, tmp_path / "elsewhere", "--pp 2 --dp 2 --zero-stage 3")
    assert len(elsewhere.manifest.files) == 4
    back = made(elsewhere, tmp_path / "back", "--tp 2 --world-size 4 --zero-stage 1")
    assert sums(back) == sums(trained)


def test_impossible_reshard_is_refused(trained: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--num-attention-heads 4 is not divisible by"):
        layout_for(trained, ["--tp", "3"])
    with pytest.raises(UserError, match="--lr does not change the files"):
        layout_for(trained, ["--lr", "1"])
    alone = layout_for(trained, [])
    tensors = {**trained.manifest.tensors, "weights/own": trained.manifest.tensors["weights/final_norm.bias"]}
    foreign = Checkpoint(trained.folder, dataclasses.replace(trained.manifest, tensors=tensors))
    with pytest.raises(UserError, match="holds weights/own, which the model of its settings does not have"):
        reshard(foreign, tmp_path / "foreign", alone, SilentDisplay())
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"

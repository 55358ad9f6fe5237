"""Programs written for Megatron train as `pentatron train` does, bit for bit, in every layout."""

import importlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import pentatron.train.compilation as compilation
import pretrain_gpt
from gpt_builders import gpt_builder
from model_provider import model_provider
from pentatron.checkpoint.store import CheckpointStore
from pentatron.data.indexed_writer import IndexedDatasetWriter
from pentatron.layout.stages import StagePart
from pentatron.megatron.names import as_megatron
from pentatron.megatron.program import UserProgram
from pentatron.models.causal_lm import CausalLM
from pentatron.monitor.display import SilentDisplay
from pentatron.nn.options import Axes
from pentatron.nn.recompute import NO_RECOMPUTE
from pentatron.parallel.world import create_groups
from pentatron.train.model import Program, build_parallel_model
from pentatron.train.session import run_training
from tests.harness import run_distributed
from tests.support import LLAMA, resolved

GUIDE_CODE = Path(__file__).parent / "guide_code"
# --eod-mask-loss: micro-batches have different numbers of valid tokens.
DATA = "--split 8,1,1 --tokenizer-type ByteTokenizer --vocab-size 257 --eod-mask-loss --global-batch-size 4"
RUN = (
    f"{LLAMA} {DATA} --train-iters 2 --eval-interval 2 --eval-iters 1 --micro-batch-size 1 --progress-bar off"
)
DOCUMENTS = "--reset-position-ids --reset-attention-mask"


def guide_module(name: str) -> Any:
    """Imports a file of guide_code with Megatron's names.

    Only for a process of its own, because `megatron` is replaced in it.
    """
    for known in [known for known in sys.modules if known.split(".")[0] == "megatron"]:
        del sys.modules[known]
    as_megatron()
    sys.path.insert(0, str(GUIDE_CODE))
    return importlib.import_module(name)


def ours() -> Program:
    """Returns the program of pretrain_gpt.py."""
    provider = partial(model_provider, gpt_builder)
    return UserProgram(
        pretrain_gpt.train_valid_test_datasets_provider, provider, pretrain_gpt.forward_step, {}
    )


def guide() -> Program:
    """Returns the whole program of guide 004."""
    module = guide_module("guide_pretrain")
    return UserProgram(
        module.train_valid_test_datasets_provider, module.model_provider, module.forward_step, {}
    )


def qwen() -> Program:
    """Returns the program of pretrain_gpt.py with the model builder of guide 001."""
    builder = guide_module("qwen_builder").qwen_builder
    provider = partial(model_provider, builder)
    return UserProgram(
        pretrain_gpt.train_valid_test_datasets_provider, provider, pretrain_gpt.forward_step, {}
    )


def write_corpus(prefix: Path) -> None:
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for number in range(40):
            length = 3 + number * number % 23
            writer.add_document([*((7 * number + place) % 256 for place in range(length)), 256])


def train(program: Program, folder: Path, words: str, world_size: int) -> None:
    config = resolved(f"{RUN} --data-path {folder.parent}/corpus --run-dir {folder} {words}", world_size)
    world = create_groups(config.config.grid, dist.get_rank(), dist.get_rank(), torch.device("cpu"))
    run_training(config, world, True, program=program)


def train_both(program: Callable[[], Program], folder: Path, words: str, world_size: int) -> None:
    train(Program(), folder / "configured", words, world_size)
    train(program(), folder / "program", words, world_size)


def outcome(folder: Path) -> Any:
    """Returns losses, gradient norms and validation losses, and checksums of weights and optimizer state."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found, _ = CheckpointStore(folder / "checkpoints", keep=None).newest_valid(verify=True, set_aside=True)
    assert found is not None
    files = {name: record.sha256 for name, record in found.manifest.files.items()}
    return [(row["loss"], row["gradient_norm"], row.get("validation_loss")) for row in rows], files


@pytest.mark.parametrize(
    ("program", "words", "world_size"),
    [
        (guide, "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2", 4),
        (guide, "--pipeline-model-parallel-size 2 --zero-stage 1 --hidden-dropout 0.1", 4),
        (
            qwen,
            "--num-layers 4 --pipeline-model-parallel-size 2 --vpp 2 --untie-embeddings-and-output-weights",
            2,
        ),
        (
            ours,
            f"--num-layers 4 --pipeline-model-parallel-size 2 --vpp 2 --pipeline-schedule zbv {DOCUMENTS}",
            2,
        ),
        (ours, "--zero-stage 3", 2),
    ],
)
def test_a_program_trains_as_the_configured_one(
    program: Callable[[], Program], words: str, world_size: int, tmp_path: Path
) -> None:
    write_corpus(tmp_path / "corpus")
    run_distributed(
        train_both, world_size, program=program, folder=tmp_path, words=words, world_size=world_size
    )
    (rows, weights), (expected, kept) = outcome(tmp_path / "program"), outcome(tmp_path / "configured")
    assert weights == kept
    assert [row[1] for row in rows] == [row[1] for row in expected]
    # Guide 004's function sums its report over ranks in fp32, so that values differ in their last bits.
    for row, other in zip(rows, expected, strict=True):
        assert row == other or (program is guide and row[0] == pytest.approx(other[0], rel=1e-6))
        assert row[2] == (other[2] if other[2] is None else pytest.approx(other[2], rel=1e-6))


def chosen(program: Program, words: str) -> dict[str, object]:
    """Returns the options with which the layers of this rank are built."""
    given = resolved(f"{RUN} {words}", dist.get_world_size())
    world = create_groups(given.config.grid, dist.get_rank(), dist.get_rank(), torch.device("cpu"))
    with program.running(given, world, SilentDisplay()):
        model = build_parallel_model(given.config, world, program)
        # A model that is built beside those of the run does not get the run's options.
        beside = CausalLM(given.config.model, given.config.moe, StagePart((0,), False, False), Axes())
    assert beside.recompute.wanted == NO_RECOMPUTE
    found: dict[str, object] = {"compiled": model.compilation.compiled.layers}
    for number, stage in model.stages.items():
        found[f"{number}"] = (stage.recompute.wanted, stage.cross_entropy, stage.kernels.chosen)
        for name, module in stage.named_modules():
            switch, fp8 = getattr(module, "recompute", stage.recompute), getattr(module, "fp8", None)
            is_deferred = getattr(module, "deferred", None) is model.executor.deferred
            gate, whole = getattr(module, "fuses_gate", None), getattr(module, "runs_whole", None)
            found[f"{number} {name}"] = (switch is stage.recompute, fp8, is_deferred, gate, whole)
    ends = [stage.embedding.word.weight for stage in model.stages.values() if stage.embedding is not None]
    ends += [stage.head.weight for stage in model.stages.values() if stage.head is not None]
    return {**found, "ends": len(ends), "tied ends": len({id(weight) for weight in ends})}


def choose_both(program: Callable[[], Program], words: str) -> tuple[dict[str, object], dict[str, object]]:
    # The models never run, so the compiler need not be tried.
    compilation._trial = lambda device: ""
    return chosen(Program(), words), chosen(program(), words)


@pytest.mark.parametrize("program", [ours, guide])
def test_the_layers_of_a_program_are_built_as_the_configured_ones(program: Callable[[], Program]) -> None:
    words = (
        "--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-schedule zbv --bf16 --fp8 hybrid --compile on "
        "--recompute-granularity selective --recompute-modules mlp"
    )
    ranks = run_distributed(choose_both, 2, program=program, words=words)
    for configured, own in ranks:
        assert own == configured and own["compiled"] == 2
    first, _ = ranks[0]
    fp8, deferred = first["0 layers.0.mlp.linear_fc1"][1:3]  # type: ignore[index]
    assert fp8 is not None and deferred
    assert (first["ends"], first["tied ends"]) == (2, 1)

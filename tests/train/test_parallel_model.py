"""Tests the model spread over ranks: ends of stages, tied embeddings, and activations kept."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pentatron.compare.trial import micro_batches
from pentatron.train.model import ParallelModel, build_parallel_model
from tests.harness import run_distributed
from tests.parity.trajectory import here
from tests.support import LLAMA, resolved

LAYERS, HIDDEN, SEQUENCE, MICRO_BATCH = 4, 64, 16, 4
SHAPE = (
    f"{LLAMA} --num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size 64 --seq-length {SEQUENCE} --vocab-size 61 "
    f"--micro-batch-size {MICRO_BATCH}"
)


def built(words: str) -> ParallelModel:
    config = resolved(f"{SHAPE} {words}", dist.get_world_size()).config
    return build_parallel_model(config, here(config))


def ends_on_a_rank(words: str) -> dict[int, tuple[bool, bool, int]]:
    """Returns for each stage of this rank: has an embedding, computes losses, number of layers."""
    model = built(words)
    return {
        number: (stage.embedding is not None, stage.final_norm is not None, len(stage.layers))
        for number, stage in model.stages.items()
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", [{0: (True, False, 2)}, {1: (False, True, 2)}]),
        (
            "--virtual-pipeline-model-parallel-size 2",
            [{0: (True, False, 1), 2: (False, False, 1)}, {1: (False, False, 1), 3: (False, True, 1)}],
        ),
    ],
    ids=["plain", "virtual stages"],
)
def test_the_first_stage_embeds_and_the_last_one_has_the_head(
    words: str, expected: list[dict[int, tuple[bool, bool, int]]]
) -> None:
    assert run_distributed(ends_on_a_rank, 2, words=f"--pipeline-model-parallel-size 2 {words}") == expected


def counted_on_a_rank(words: str) -> tuple[int, int]:
    """Counts parameters of the whole model, and those that stages of this rank share."""
    model = built(words)
    each = [id(p) for stage in model.stages.values() for p in stage.parameters()]
    return model.count_parameters(), len(each) - len(set(each))


@pytest.mark.parametrize("untied", [False, True])
def test_a_folded_pipeline_holds_a_tied_embedding_once(untied: bool) -> None:
    words = "--untie-embeddings-and-output-weights" if untied else ""
    schedules = [
        "--pipeline-model-parallel-size 2",
        "--pipeline-model-parallel-size 2 --pipeline-schedule zbv",
    ]
    plain, folded = (
        run_distributed(counted_on_a_rank, 2, words=f"{s} {words} --micro-batch-size 1") for s in schedules
    )
    assert {count for count, _ in plain} == {count for count, _ in folded}
    assert [shared for _, shared in folded] == [0 if untied else 1, 0]


def kept_on_a_rank(words: str) -> int:
    """Returns the bytes of activations kept for backward of one micro-batch, without weights."""
    model = built(words)
    (batch,) = model.local_tokens([next(micro_batches(model.config, model.world, 0))])
    weights = {p.untyped_storage().data_ptr() for p in model.stages[0].parameters()}
    kept: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        loss = model.stages[0](batch.tokens, batch.position_ids, batch.labels)
    assert loss.requires_grad
    return sum(kept.values())


def test_sequence_parallelism_keeps_fewer_activations() -> None:
    tensor, split = "--tensor-model-parallel-size 2", "--sequence-parallel"
    without, together = (
        max(run_distributed(kept_on_a_rank, 2, words=words)) for words in (tensor, f"{tensor} {split}")
    )
    # Sequence parallelism saves at least half of the fp32 inputs of each layer's two norms.
    assert without - together >= 2 * LAYERS * 4 * MICRO_BATCH * SEQUENCE * HIDDEN / 2


@pytest.mark.parametrize("exchange", ["p2p", "all_gather", "a2a"])
def test_context_ranks_keep_their_share_of_the_activations(exchange: str) -> None:
    split = f"--context-parallel-size 2 --cp-comm-type {exchange}"
    without, together = (max(run_distributed(kept_on_a_rank, 2, words=words)) for words in ("", split))
    assert 0.4 * without < together < 0.6 * without


def test_without_a_tensor_axis_there_is_nothing_to_save() -> None:
    without, together = (
        run_distributed(kept_on_a_rank, 2, words=words) for words in ("", "--sequence-parallel")
    )
    assert together == without

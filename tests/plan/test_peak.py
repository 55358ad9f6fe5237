"""Compares the planned peak of a step with the bytes of all tensors alive in a real one."""

import itertools
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pentatron.compare.trial import micro_batches
from pentatron.optim.build import build_optimizer
from pentatron.plan.memory import memory_of
from pentatron.train.model import build_parallel_model, model_dtype
from pentatron.train.step import train_step
from tests.harness import run_distributed
from tests.parity.trajectory import here
from tests.support import LLAMA, resolved

SHAPE = f"{LLAMA} --num-layers 2 --hidden-size 128 --num-attention-heads 4 --micro-batch-size 1 --global-batch-size 2"


class Living(TorchDispatchMode):
    """Counts storages of operator outputs while they are referenced, without workspaces of kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in {*given, *self.sizes}:
                self._take(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def _take(self, storage: torch.UntypedStorage) -> None:
        self.sizes[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        weakref.finalize(storage, self._let_go, storage._cdata).atexit = False

    def _let_go(self, place: int) -> None:
        self.now -= self.sizes.pop(place)


def peak_of_a_step(words: str) -> int:
    config = resolved(words, dist.get_world_size() if dist.is_initialized() else 1).config
    world = here(config)
    model = build_parallel_model(config, world)
    optimizer = build_optimizer(
        model.stages, world, config.optim, model.decisions.optimizer, model_dtype(config)
    )
    chunk = list(itertools.islice(micro_batches(config, world, 0), config.accumulation))
    with Living() as living:
        train_step(model, optimizer, chunk, 1e-3, step=0)
    return living.peak


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("--bf16 --seq-length 128 --vocab-size 4000", 1),
        ("--seq-length 128 --vocab-size 4000 --untie-embeddings-and-output-weights", 1),
        ("--bf16 --seq-length 8 --vocab-size 4000", 1),
        ("--bf16 --seq-length 128 --vocab-size 4000 --tensor-model-parallel-size 2", 2),
        ("--bf16 --seq-length 128 --vocab-size 4000 --global-batch-size 1", 1),
        ("--bf16 --seq-length 128 --vocab-size 4000 --global-batch-size 4", 1),
        ("--bf16 --seq-length 16 --vocab-size 400 --num-layers 6 --global-batch-size 1", 1),
        ("--bf16 --seq-length 128 --vocab-size 4000 --global-batch-size 1 --cross-entropy-loss-fusion", 1),
    ],
    ids=[
        *("loss", "loss, fp32", "the table at both ends", "loss of shared words"),
        *("one backward", "many backwards", "gradients", "fused loss"),
    ],
)
def test_the_peak_of_a_step_is_the_planned_one(words: str, ranks: int) -> None:
    command = f"{SHAPE} {words}"
    planned = memory_of(resolved(command, ranks).config).largest
    if ranks == 1:
        measured = peak_of_a_step(command)
    else:
        measured = max(run_distributed(peak_of_a_step, world=ranks, words=command))
    # Gradients are allocated in a step and freed after it.
    between_steps = planned.static.weights + planned.static.optimizer
    assert measured == pytest.approx(planned.total - between_steps, rel=0.05)


def test_messages_that_come_early_have_room_in_the_plan() -> None:
    """In groups as large as the pipeline two messages are in transit; in larger groups more wait."""
    pipeline = (
        f"{SHAPE} --seq-length 16 --vocab-size 400 --num-layers 4 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 8"
    )
    usual, large = (
        memory_of(resolved(f"{pipeline} {words}", 2).config).largest.buffers
        for words in ("", "--microbatch-group-size-per-virtual-pipeline-stage 8")
    )
    message = 4 * 16 * 128
    assert usual == 4 * message
    assert large == usual + 6 * message

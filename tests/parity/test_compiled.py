"""Compiled layers compute the numbers of one eager process, and still defer weight gradients."""

from functools import partial

import pytest
import torch.distributed as dist

import pentatron.train.compilation as compilation
from pentatron.compare.trial import Trajectory, gaps, micro_batches
from pentatron.layout.actions import Kind
from pentatron.nn.compiled import CompileOptions
from pentatron.nn.options import ModelOptions
from pentatron.optim.build import build_optimizer
from pentatron.train.model import build_parallel_model, model_dtype
from pentatron.train.step import train_step
from tests.harness import run_distributed
from tests.parity.cases import FAMILIES, MIXTURES, SHAPE
from tests.parity.trajectory import here, run
from tests.parity.verdicts import failures
from tests.support import resolved

COMPILED = "--compile on"
ZERO_BUBBLE = "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble"
WINDOWS = "--window-size 4,0 --window-attn-skip-freq 2"


def without_a_compiler(backend: str) -> None:
    """Traces layers without generating kernels: the tests depend on the traced graph only."""
    compilation._trial = lambda device: ""
    compilation.CompileOptions = partial(CompileOptions, backend)  # type: ignore[assignment,misc]


def compiled_on_a_rank(words: str) -> Trajectory:
    without_a_compiler("aot_eager")
    return run(words, dist.get_world_size())


LAYOUTS = [
    ("qwen3", "--tensor-model-parallel-size 2 --sequence-parallel", "", pytest.mark.sweep),
    # Without guards on shards, layers with and without a window would share a graph.
    ("llama", "--zero-stage 3", f"{WINDOWS} --num-layers 2", ()),
    ("llama", "--zero-stage 1 --overlap-param-gather --overlap-grad-reduce", "", pytest.mark.sweep),
    ("gpt", "--zero-stage 1 --compile-layers-together 2", "", ()),
    # Each layer waits for its own weights, so it must be compiled alone.
    ("llama", "--zero-stage 1 --overlap-param-gather --compile-layers-together 2", "", pytest.mark.sweep),
    ("llama", "--zero-stage 3 --compile-layers-together 2", "", pytest.mark.sweep),
    ("llama", "--context-parallel-size 2", "", pytest.mark.sweep),
    ("gpt", ZERO_BUBBLE, "", pytest.mark.sweep),
    ("mixtral", "--expert-model-parallel-size 2", "", pytest.mark.sweep),
    ("llama", "--recompute-granularity full --zero-stage 3", "", pytest.mark.sweep),
]


@pytest.mark.parametrize(
    ("family", "words", "both"), [pytest.param(f, w, b, marks=marks) for f, w, b, marks in LAYOUTS]
)
def test_compiled_layers_compute_what_one_process_does(family: str, words: str, both: str) -> None:
    # Compiling costs more than training: two layers, and micro-batches as on one process.
    model = f"{SHAPE} --num-layers 2 {(FAMILIES | MIXTURES)[family]} {both} --micro-batch-size 2"
    ranks = run_distributed(compiled_on_a_rank, 2, words=f"{model} {words} {COMPILED}", timeout=240)
    assert failures(gaps(ranks, run(model, 1))) == []


def waiting_on_a_rank(words: str, split: bool) -> int:
    """Returns the most elements kept for deferred weight gradients in one step.

    Without `split`, layers are compiled as if no gradient were deferred.
    """
    without_a_compiler("eager" if split else "aot_eager")
    if not split:
        # Keeps linear layers in the compiled graph.
        ModelOptions.linear_of_layer = lambda self, layer: self.linear  # type: ignore[method-assign]
    config = resolved(words, dist.get_world_size()).config
    world = here(config)
    model = build_parallel_model(config, world)
    optimizer = build_optimizer(
        model.stages, world, config.optim, model.decisions.optimizer, model_dtype(config)
    )
    batches = micro_batches(config, world, 0)
    most, end = 0, optimizer.end_backward

    def counting_end(stage: int, last: bool, kind: Kind) -> None:
        nonlocal most
        most = max(most, model.executor.deferred.elements)
        end(stage, last, kind)

    optimizer.end_backward = counting_end  # type: ignore[method-assign,assignment]
    train_step(model, optimizer, [next(batches) for _ in range(config.accumulation)], 1e-3, step=0)
    return most


def test_weight_gradients_wait_in_compiled_layers() -> None:
    words = f"{SHAPE} --num-layers 2 {FAMILIES['llama']} --micro-batch-size 1 {ZERO_BUBBLE}"
    eager = run_distributed(waiting_on_a_rank, 2, words=words, split=True)
    assert run_distributed(waiting_on_a_rank, 2, words=f"{words} {COMPILED}", split=True) == eager
    assert min(eager) > 0


@pytest.mark.sweep
def test_compiled_as_they_are_they_would_not() -> None:
    """Control, on the first rank, which has no head whose weight gradient is deferred."""
    words = f"{SHAPE} --num-layers 2 {FAMILIES['llama']} --micro-batch-size 1 {ZERO_BUBBLE} {COMPILED}"
    assert run_distributed(waiting_on_a_rank, 2, words=words, split=False)[0] == 0

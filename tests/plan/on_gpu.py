"""Compares planned memory with steps on a GPU: between steps, of a layer, and at the peak."""

import itertools
import statistics
from dataclasses import dataclass
from typing import Any

import torch

from pentatron.compare.trial import micro_batches
from pentatron.optim.build import build_optimizer
from pentatron.parallel.world import single_process
from pentatron.plan import activations
from pentatron.plan.memory import RankMemory, memory_of
from pentatron.plan.sizes import PlanSizes
from pentatron.settings.entry_points import PRETRAIN_GPT
from pentatron.settings.resolve import gather, resolve
from pentatron.settings.run_config import RunConfig
from pentatron.settings.settings import ProcessFacts
from pentatron.train.model import build_parallel_model, model_dtype
from pentatron.train.step import train_step

# The shapes of docs/performance.md; a step has four sequences of 4096 tokens unless a case sets others.
QWEN3, QWEN2 = "--preset qwen3-8b --num-layers 8", "--preset qwen2.5-1.5b"
_STEP = "--bf16 --seq-length 4096 --micro-batch-size 4 --global-batch-size 4 --train-iters 4 --lr 1e-5 --mock-data"
CASES = {
    "Qwen3-8B, 8 layers": QWEN3,
    "Qwen2.5-1.5B": QWEN2,
    "Qwen3-8B, 8 layers, plain layers": f"{QWEN3} --compile off",
    "Qwen2.5-1.5B, two micro-batches a step": f"{QWEN2} --micro-batch-size 2",
    "Qwen3-8B, 8 layers, full recompute": f"{QWEN3} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "Qwen3-8B, 8 layers, fp32 loss of all logits": f"{QWEN3} --micro-batch-size 2 --global-batch-size 2 --no-cross-entropy-loss-fusion",
}
_STEPS = 3


@dataclass(frozen=True)
class Measured:
    """Bytes between steps, kept by a layer from forward to backward, and at the peak."""

    between: int
    layer: float
    peak: int


def configured(words: str) -> RunConfig:
    return resolve(gather(f"{_STEP} {words}".split(), PRETRAIN_GPT), ProcessFacts(1, 1, 1)).config


def planned(config: RunConfig) -> tuple[RankMemory, int]:
    """Returns planned memory of the run and the activations of one layer."""
    sizes = PlanSizes(config, on_gpu=True)
    if config.memory.recompute_granularity == "full":
        layer = sizes.element_bytes * sizes.local_tokens * sizes.hidden
    else:
        layer = activations.layer_activations(sizes, sparse=0 in sizes.sparse_layers)
    return memory_of(config, on_gpu=True).largest, layer


def measured(config: RunConfig) -> Measured:
    """Measures the last step; kernels are compiled and autotuned in the first."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    before = torch.cuda.memory_allocated()
    world = single_process(device)
    model = build_parallel_model(config, world)
    optimizer = build_optimizer(
        model.stages, world, config.optim, model.decisions.optimizer, model_dtype(config)
    )
    marks: list[int] = []

    def mark(module: Any, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            marks.append(torch.cuda.memory_allocated())

    for layer in model.stages[0].layers.children():
        layer.register_forward_hook(mark)
    batches = list(itertools.islice(micro_batches(config, world, 0), config.accumulation))
    for step in range(_STEPS):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        marks.clear()
        train_step(model, optimizer, batches, 1e-5, step)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    layers = config.model.num_layers
    # The last micro-batch: gradients are allocated already, and nothing has been recomputed.
    of_forward = marks[:layers]
    grown = [after - at for at, after in itertools.pairwise(of_forward)]
    return Measured(torch.cuda.memory_allocated() - before, statistics.median(grown), peak)

"""Measures one layer on one GPU, forward and backward: eager and compiled, with each attention kernel.

    python bench/layer.py [--shape qwen2.5-1.5b] [--micro-batch 4] [--sequence 4096] [--options] [--fp8]
        [--kernels]

Four layers run one after the other, as in a model, in bf16. Prints for each way the time of a layer, the
memory it keeps for backward, the number of graphs and breaks, and the time of the first run. `--options` adds
settings of the compiler. `--fp8` compares only compiled layers in bf16 and in fp8 by tensor and by row.
`--kernels` lists the longest kernels.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor
from torch._dynamo.utils import counters

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.steps import milliseconds_in_a_row
from pentatron.layout.stages import StagePart
from pentatron.models.causal_lm import CausalLM, build_stages
from pentatron.nn.compiled import CompileOptions
from pentatron.nn.options import Axes
from pentatron.ops.fp8_linear import WeightScales
from pentatron.ops.linear import DeferredGradients
from pentatron.parallel.world import single_process
from pentatron.settings.decisions import decide
from pentatron.settings.entry_points import TRAIN
from pentatron.settings.resolve import gather, resolve
from pentatron.settings.settings import ProcessFacts
from pentatron.train.model import device_facts, model_options

LAYERS, WARM, TIMED = 4, 3, 8
DEVICE = torch.device("cuda")
SHAPES = {"qwen2.5-1.5b": "qwen2.5-1.5b", "qwen3-8b-8l": "qwen3-8b"}
FP8 = {
    "bf16": "",
    "fp8": "--fp8 hybrid",
    "fp8 by rows": "--fp8 hybrid --fp8-recipe rowwise",
}
# Settings of inductor, and of functorch's partitioner, which divides a graph into forward and backward.
OPTIONS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "coordinate descent": ({"coordinate_descent_tuning": True}, {}),
    "max autotune, pointwise": ({"max_autotune_pointwise": True}, {}),
    "several kernels": ({"triton.multi_kernel": 1}, {}),
    "memory budget 0.8": ({}, {"activation_memory_budget": 0.8}),
}


def build(shape: str, backend: str, sequence: int, compile: CompileOptions | None, more: str) -> CausalLM:
    words = f"--preset {SHAPES[shape]} --num-layers {LAYERS} --seq-length {sequence} --bf16 --mock-data --train-iters 1 {more}"
    config = resolve(gather(words.split(), TRAIN), ProcessFacts(1, 1, 1)).config
    part = StagePart(tuple(range(LAYERS)), embedding=False, head=False)
    world, scales = single_process(DEVICE), WeightScales(DEVICE)
    options = replace(
        model_options(
            config, decide(config, device_facts(config, DEVICE)), compile, DeferredGradients(), scales, world
        ),
        attention_backend=backend,
        fuses_gates=True,
    )
    model = build_stages(config.model, config.moe, {0: part}, Axes(), 1, DEVICE, options)[0]
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    scales.refresh()
    return model


class Step:
    """Forward and backward of a micro-batch."""

    def __init__(self, model: CausalLM, width: int, batch: int, sequence: int) -> None:
        self.model = model
        self.positions = torch.arange(sequence, device=DEVICE).expand(batch, sequence)
        shape = (batch, sequence, width)
        self.x = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
        self.gradient = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)

    def forward(self) -> Tensor:
        made: Tensor = self.model(self.positions, self.positions, None, self.x)
        return made

    def __call__(self) -> None:
        self.forward().backward(self.gradient)
        for parameter in (*self.model.parameters(), self.x):
            parameter.grad = None

    def kept(self) -> int:
        """Returns the bytes kept for backward, without the parameters."""
        own = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        found: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            memory = tensor.untyped_storage()
            found[memory.data_ptr()] = memory.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self.forward()
        return sum(size for place, size in found.items() if place not in own)


@contextmanager
def options(name: str) -> Iterator[None]:
    inductor, division = OPTIONS.get(name, ({}, {}))
    with ExitStack() as settings:
        settings.enter_context(torch._inductor.config.patch(inductor))
        settings.enter_context(torch._functorch.config.patch(division))
        yield


def measure(
    name: str, arguments: argparse.Namespace, backend: str, compiled: bool, option: str = "", more: str = ""
) -> Step:
    torch._dynamo.reset()
    counters.clear()
    model = build(arguments.shape, backend, arguments.sequence, CompileOptions() if compiled else None, more)
    with options(option):
        width = next(iter(model.layers.values())).input_norm.weight.numel()
        step = Step(model, width, arguments.micro_batch, arguments.sequence)
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        first = time.perf_counter() - began
        took = milliseconds_in_a_row(step, TIMED, WARM) / LAYERS
        kept = step.kept() / LAYERS / 2**20
    graphs = f"{counters['stats']['unique_graphs']} graph, {sum(counters['graph_break'].values())} breaks"
    print(
        f"{name:36}{took:8.3f} ms  {kept:7.0f} MiB  first {first:5.1f} s  {graphs if compiled else ''}",
        flush=True,
    )
    return step


def show_kernels(step: Step) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    for kernel in sorted(seen.key_averages(), key=lambda k: -k.self_device_time_total)[:24]:
        print(f"  {kernel.self_device_time_total / LAYERS / 1e3:8.3f} ms  {kernel.key[:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--options", action="store_true")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this measures a GPU, and there is none here")
    print(f"{arguments.shape}, {arguments.micro_batch} × {arguments.sequence}, a layer forward and backward:")
    if arguments.fp8:
        for name, more in FP8.items():
            step = measure(f"compiled, {name}", arguments, "auto", compiled=True, more=more)
            if arguments.kernels:
                show_kernels(step)
        return
    for backend in ("flash", "auto"):
        measure(f"eager, attention {backend}", arguments, backend, compiled=False)
    measure("compiled, attention flash", arguments, "flash", compiled=True)
    step = measure("compiled, attention auto", arguments, "auto", compiled=True)
    if arguments.kernels:
        show_kernels(step)
    if arguments.options:
        for option in OPTIONS:
            measure(f"compiled, {option}", arguments, "auto", compiled=True, option=option)


if __name__ == "__main__":
    main()

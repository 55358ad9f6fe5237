"""Measures torch.compile on linear layers with split backward, on a CPU.

    python bench/compile_split.py [--width 128] [--tokens 256] [--backend inductor]

Runs forward and backward of a layer of norm, two matrices and an activation in six ways. Prints for each way
its time relative to plain eager, the number of graphs and graph breaks, and how many weight gradients are
deferred to the second half of backward.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from pentatron.ops.linear import DeferredGradients, Product, linear, weight_gradient

REPEATS = 15

Multiply = Callable[[Tensor, nn.Parameter], Tensor]


class Layer(nn.Module):
    def __init__(self, width: int, multiply: Multiply) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4 * width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(width, 4 * width) / (4 * width) ** 0.5)
        self.multiply = multiply

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x, x.shape[-1:])
        return x + self.multiply(F.silu(self.multiply(normed, self.up)), self.down)


def custom_operator(deferred: DeferredGradients) -> Multiply:
    """Wraps the product in a custom operator, which torch.compile does not trace.

    Its backward is a second custom operator, which defers weight gradients to the queue. Operators receive
    tensors, not parameters, so the parameter is looked up by `data_ptr`.
    """
    weights: dict[int, nn.Parameter] = {}

    @torch.library.custom_op("pentatron_bench::product", mutates_args=())
    def product(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    @product.register_fake
    def _(x: Tensor, weight: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:-1], weight.shape[0])

    @torch.library.custom_op("pentatron_bench::input_gradient", mutates_args=())
    def input_gradient(x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        parameter = weights.get(weight.data_ptr(), nn.Parameter(weight))
        made = Product(parameter, weight_gradient, gradient, x)
        later = weight.data_ptr() in weights and deferred.take(made)
        # Zeros stand for a deferred gradient: an operator in a graph cannot return None.
        return gradient @ weight, torch.zeros_like(weight) if later else weight_gradient(gradient, x)

    @input_gradient.register_fake
    def _(x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), torch.empty_like(weight)

    product.register_autograd(
        lambda ctx, gradient: input_gradient(*ctx.saved_tensors, gradient.contiguous()),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )

    def multiply(x: Tensor, weight: nn.Parameter) -> Tensor:
        if not torch.compiler.is_compiling():
            weights[weight.data_ptr()] = weight
        made: Tensor = product(x, weight)
        return made

    return multiply


def ways(backend: str) -> dict[str, tuple[Multiply, DeferredGradients, Callable[[nn.Module], nn.Module]]]:
    def compiled(module: nn.Module) -> nn.Module:
        return torch.compile(module, backend=backend)  # type: ignore[return-value]

    def plain(x: Tensor, weight: nn.Parameter) -> Tensor:
        return F.linear(x, weight)

    found = {}
    for name, how in (("eager", lambda module: module), ("compiled", compiled)):
        found[f"{name}, plain"] = (plain, DeferredGradients(), how)
        queue = DeferredGradients()
        found[f"{name}, split"] = (lambda x, w, q=queue: linear(x, w, None, q), queue, how)
    queue = DeferredGradients()
    eagerly = torch.compiler.disable(lambda x, w, q=queue: linear(x, w, None, q))
    found["compiled, split linears left eager"] = (eagerly, queue, compiled)
    queue = DeferredGradients()
    found["compiled, split as an operator"] = (custom_operator(queue), queue, compiled)
    return found  # type: ignore[return-value]


def halves(run: nn.Module, x: Tensor, queue: DeferredGradients) -> int:
    """Runs one forward and both halves of backward; returns the number of deferred weight gradients."""
    made = run(x)
    with queue.collect((0, 0)):
        made.backward(torch.ones_like(made))
    waiting = len(queue._pending[0, 0])
    queue.compute((0, 0))
    return waiting


def measure(
    multiply: Multiply,
    queue: DeferredGradients,
    how: Callable[[nn.Module], nn.Module],
    width: int,
    tokens: int,
) -> tuple[float, str]:
    torch.manual_seed(1)
    layer = Layer(width, multiply)
    x = torch.randn(1, tokens, width, requires_grad=True)
    layer(x)
    torch._dynamo.reset()
    counters.clear()
    run = how(layer)
    start = time.perf_counter()
    waiting = halves(run, x, queue)
    first = time.perf_counter() - start
    breaks = sum(counters["graph_break"].values())
    graphs = counters["stats"]["unique_graphs"]
    right = _right(layer, width, x)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        halves(run, x, queue)
        times.append(time.perf_counter() - start)
    said = f"{graphs} graphs, {breaks} breaks, first call {first:5.1f} s, {waiting} weight gradients wait, {right}"
    return statistics.median(times), said


def _right(layer: Layer, width: int, x: Tensor) -> str:
    twin = Layer(width, lambda a, w: F.linear(a, w))
    twin.load_state_dict(layer.state_dict())
    made = twin(x.detach())
    made.backward(torch.ones_like(made))
    pairs = [(layer.up.grad, twin.up.grad), (layer.down.grad, twin.down.grad)]
    if any(found is None for found, _ in pairs):
        return "gradients LOST"
    close = all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in pairs if a is not None and b is not None
    )
    return "gradients right" if close else "gradients WRONG"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--backend", default="inductor")
    words = parser.parse_args()
    torch.set_num_threads(1)
    reference = 0.0
    for name, way in ways(words.backend).items():
        try:
            seconds, said = measure(*way, words.width, words.tokens)
        except Exception as error:
            print(f"{name:<36} failed: {type(error).__name__}: {str(error).strip().splitlines()[0][:120]}")
            continue
        reference = reference or seconds
        print(f"{name:<36} {1e3 * seconds:6.2f} ms  {seconds / reference:5.2f} of eager  {said}", flush=True)


if __name__ == "__main__":
    main()

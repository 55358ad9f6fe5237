"""Measures the output head with cross entropy on a GPU, forward and backward.

    python bench/cross_entropy.py [--tokens 16384] [--width 4096 1536] [--vocabulary 151936]
        [--dtype bfloat16]

Prints time, memory and error of each implementation. The lower bound is the time of the head's three matmuls
alone. Memory is counted without the weight and the hidden states: logits, gradients and temporaries. Errors
are those of a small head against fp64: of losses, gradients of the hidden states and gradients of the weight.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.steps import milliseconds_in_a_row
from pentatron.nn.linear import OutputLayer, VocabParallelEmbedding
from pentatron.nn.loss import CrossEntropy
from pentatron.parallel.axes import TensorAxis

REPEATS = 5
# Maps head, hidden states, labels and vocabulary size to losses.
Way = Callable[[VocabParallelEmbedding, Tensor, Tensor, int], Tensor]


def ways(tokens: int) -> dict[str, Way]:
    compiled = torch.compile(lambda logits, labels: F.cross_entropy(logits.float(), labels, reduction="none"))

    def by_compiler(head: VocabParallelEmbedding, x: Tensor, labels: Tensor, words: int) -> Tensor:
        logits = head.logits(x)[..., :words]
        return compiled(logits.flatten(0, 1), labels.flatten()).view(labels.shape)

    return {
        "plain": CrossEntropy("off").from_hidden_states,
        "compiled": by_compiler,
        "fused, native": CrossEntropy("on", "native").from_hidden_states,
        "fused, te": CrossEntropy("on", "te").from_hidden_states,
        "fused, te, 2 chunks": CrossEntropy("on", "te", -(-tokens // 2)).from_hidden_states,
        "fused, te, 4 chunks": CrossEntropy("on", "te", -(-tokens // 4)).from_hidden_states,
    }


def head_of(rows: int, words: int, width: int, dtype: torch.dtype) -> OutputLayer:
    with torch.device("cuda"):
        head = OutputLayer(rows, words, width, TensorAxis())
    torch.nn.init.normal_(head.weight, std=width**-0.5)
    return head.to(dtype)


def matmuls(tokens: int, width: int, words: int, dtype: torch.dtype) -> float:
    x, weight, gradient = (
        torch.randn(shape, device="cuda", dtype=dtype)
        for shape in ((tokens, width), (words, width), (tokens, words))
    )
    return sum(
        milliseconds_in_a_row(product, REPEATS)
        for product in (lambda: x @ weight.t(), lambda: gradient @ weight, lambda: gradient.t() @ x)
    )


def speed(way: Way, tokens: int, width: int, words: int, dtype: torch.dtype) -> tuple[float, float]:
    head = head_of(words, words, width, dtype)
    x = torch.randn(1, tokens, width, device="cuda", dtype=dtype, requires_grad=True)
    labels = torch.randint(0, words, (1, tokens), device="cuda")
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    def step() -> None:
        x.grad = head.weight.grad = None
        (way(head, x, labels, words).sum() / tokens).backward()

    taken = milliseconds_in_a_row(step, REPEATS)
    return taken, (torch.cuda.max_memory_allocated() - held) / 2**30


def errors(way: Way, dtype: torch.dtype) -> list[float]:
    """Returns relative errors against fp64 of losses, hidden-state gradients and weight gradients."""
    torch.manual_seed(1)
    rows, words, width, tokens = 3072, 3000, 256, 999
    head, x = head_of(rows, words, width, dtype), torch.randn(1, tokens, width, device="cuda").to(dtype) * 2
    labels = torch.randint(0, words, (1, tokens), device="cuda")
    weights = torch.rand(1, tokens, device="cuda").masked_fill(labels % 5 == 0, 0)
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, head.weight))
    exact = F.cross_entropy((exact_x @ exact_weight.t())[0, :, :words], labels[0], reduction="none")[None]
    (exact * weights).sum().backward()
    x.requires_grad_()
    found = way(head, x, labels, words)
    (found * weights).sum().backward()
    pairs = ((found, exact), (x.grad, exact_x.grad), (head.weight.grad, exact_weight.grad))
    with torch.no_grad():
        return [float((ours.double() - theirs).norm() / theirs.norm()) for ours, theirs in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, nargs="+", default=[4096, 1536])
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench/cross_entropy.py measures on a GPU, and there is none")
    dtype = getattr(torch, given.dtype)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {given.dtype}, {given.tokens} tokens")
    for width in given.width:
        floor = matmuls(given.tokens, width, given.vocabulary, dtype)
        torch.cuda.empty_cache()
        print(f"\nwidth {width}, {given.vocabulary} words; the three matmuls alone {floor:.1f} ms")
        for name, way in ways(given.tokens).items():
            taken, memory = speed(way, given.tokens, width, given.vocabulary, dtype)
            torch.cuda.empty_cache()
            print(f"  {name:<20} {taken:7.1f} ms  {memory:5.1f} GiB")
    print("\nerrors against fp64: losses, gradient of the stream, of the weight")
    for name, way in ways(999).items():
        print(f"  {name:<20} " + "  ".join(f"{error:.1e}" for error in errors(way, dtype)))


if __name__ == "__main__":
    main()

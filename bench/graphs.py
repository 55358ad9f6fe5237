"""Measures the largest possible gain of CUDA graphs for a small model.

    python bench/graphs.py [--micro-batch 8 32]

Times forward and backward of GPT-2 124M with 1024 tokens a sequence in bf16, eager and compiled, with kernels
launched one by one and as a replayed graph. A replay is a bound: it leaves out all Python code of a step.
bench/gpu.py with the cases `ours:--cuda-graphs on` and `ours:--cuda-graphs off` measures the gain in a step
of the trainer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.steps import milliseconds
from pentatron.models.causal_lm import CausalLM, build_model
from pentatron.settings.model import TransformerConfig

LENGTH, WORDS = 1024, 50304


def gpt2() -> CausalLM:
    config = TransformerConfig(
        num_layers=12,
        hidden_size=768,
        ffn_hidden_size=3072,
        num_attention_heads=12,
        num_query_groups=12,
        kv_channels=64,
        vocab_size=WORDS,
        padded_vocab_size=WORDS,
        max_position_embeddings=LENGTH,
        position_embedding_type="learned_absolute",
        normalization="LayerNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return build_model(config, 0, torch.device("cuda")).to(torch.bfloat16)


def replayed(work: Callable[[], None]) -> float | str:
    """Returns milliseconds of the same work as one CUDA graph, or why it cannot be captured."""
    try:
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return milliseconds(graph.replay)
    except RuntimeError as error:
        return f"not possible ({str(error).splitlines()[0][:120]})"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[8, 32])
    if not torch.cuda.is_available():
        print("bench/graphs.py needs a GPU")
        return 0
    for size in parser.parse_args().micro_batch:
        model = gpt2()
        tokens = torch.randint(WORDS, (size, LENGTH), device="cuda")
        positions, labels = torch.arange(LENGTH, device="cuda").expand(size, LENGTH), tokens.roll(-1, 1)

        def work(
            model: CausalLM = model, inputs: tuple[torch.Tensor, ...] = (tokens, positions, labels)
        ) -> None:
            model(*inputs).mean().backward()
            for parameter in model.parameters():
                parameter.grad = None

        for kind in ("eager", "compiled"):
            if kind == "compiled":
                for layer in model.layers.values():
                    layer.forward = torch.compile(layer.forward, dynamic=False)
            launched = milliseconds(work)
            print(f"micro-batch {size}, {kind}: {launched:.2f} ms launched by the host", flush=True)
            again = replayed(work)
            print(f"    as one graph: {again if isinstance(again, str) else f'{again:.2f} ms'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A model that every layout of so many processes can hold, for who names none."""

from typing import Any


def default_sizes(processes: int, on_gpu: bool) -> dict[str, Any]:
    """Heads and layers that divide by the processes, and a batch that fills the longest pipeline.

    Small on a CPU, where a sweep should take minutes; about a billion parameters on a GPU.
    """
    heads = _multiple(processes, 16 if on_gpu else 8)
    # Context parallelism cuts a sequence into twice as many parts as there are ranks.
    return {
        "num_layers": _multiple(processes, 16 if on_gpu else 4),
        "num_attention_heads": heads,
        "hidden_size": heads * (128 if on_gpu else 16),
        "seq_length": _multiple(2 * processes, 2048 if on_gpu else 32),
        "vocab_size": 32768 if on_gpu else 1024,
        "micro_batch_size": 1 if on_gpu else 2,
        "global_batch_size": 2 * processes,
        "bf16": on_gpu,
    }


def _multiple(of: int, at_least: int) -> int:
    return -(-at_least // of) * of

"""How much memory this process uses."""

import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from pentatron.text import in_mib


def memory_bytes(device: torch.device) -> int:
    """The peak so far: of the GPU's allocator on a GPU, of the process's resident memory otherwise."""
    if device.type == "cuda":
        # Asked in every step: torch.cuda.max_memory_allocated sorts all statistics by name first.
        return int(torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["peak"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_now(device: torch.device) -> dict[str, int]:
    """Bytes by what they are, at this moment: `allocated` and `reserved` on a GPU, `resident` on the host."""
    found = {"resident": _resident()}
    if device.type == "cuda":
        found |= {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
        }
    return found


def memory_scalars(device: torch.device) -> dict[str, float]:
    """The same under Megatron's names; its count of pieces that are given out is the GPU allocator's."""
    found = {f"mem-{name}-bytes": float(value) for name, value in memory_now(device).items()}
    if device.type == "cuda":
        found["mem-allocated-count"] = float(torch.cuda.memory_stats(device)["allocation.all.current"])
    return found


def _resident() -> int:
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    # Elsewhere the peak is all that the standard library tells.
    return memory_bytes(torch.device("cpu"))


def memory_line(rank: int, steps: int, figures: Mapping[str, int]) -> str:
    """Megatron's line on a rank's memory; on a CPU it is the process's resident memory."""
    parts = " | ".join(f"{name}: {in_mib(value, '.1f')}" for name, value in figures.items())
    return f"[Rank {rank}] (after {steps} iterations) memory (MB) | {parts}"


def memory_figures(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {"resident": _resident(), "max resident": memory_bytes(device)}
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "max allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "max reserved": torch.cuda.max_memory_reserved(device),
    }

"""How much memory this process uses."""

import resource
import sys

import torch


def memory_bytes(device: torch.device) -> int:
    """The peak so far: of the GPU's allocator on a GPU, of the process's resident memory otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

"""Helpers that save, find and load small steps."""

from pathlib import Path

import torch

from pentatron.checkpoint.load import load_tensor
from pentatron.checkpoint.store import Checkpoint, CheckpointStore
from pentatron.parallel.collectives import Group
from pentatron.parallel.sharding import Fragment

DATA = "rank-00000.safetensors"
ALONE = Group(0, 1)


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "weights/a": torch.full((3, 4), float(value)),
        "weights/b": torch.full((5,), value, dtype=torch.bfloat16),
        "exp_avg/a": torch.full((3, 4), -float(value)),
        "scalar": torch.tensor(value, dtype=torch.float64),
        "empty": torch.zeros(0, 7),
    }


def whole(name: str, tensor: torch.Tensor) -> Fragment:
    return Fragment(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def share(group: Group, value: float) -> list[Fragment]:
    """Returns this rank's rows of every tensor; scalars and empty tensors belong to rank 0."""
    found = []
    for name, tensor in tensors(value).items():
        rows = len(tensor) if tensor.dim() else 0
        first, last = (rows * r // group.size for r in (group.rank, group.rank + 1))
        if rows:
            start = (first, *(0 for _ in tensor.shape[1:]))
            found.append(Fragment(name, tuple(tensor.shape), start, tensor[first:last]))
        elif group.rank == 0:
            found.append(whole(name, tensor))
    return found


def save(store: CheckpointStore, step: int, group: Group = ALONE, **own: torch.Tensor) -> Path:
    return store.save(step, share(group, float(step)), own, {"step": step}, {"model": {"n": 1}}, group)


def load(found: Checkpoint, *names: str) -> dict[str, torch.Tensor]:
    return {name: load_tensor(found.folder, found.manifest, name) for name in names}


def newest(store: CheckpointStore, verify: bool = True) -> tuple[int | None, list[str]]:
    found, complaints = store.newest_valid(verify, set_aside=True)
    return (found.manifest.step if found else None), complaints

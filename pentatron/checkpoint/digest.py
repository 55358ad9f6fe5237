"""Whether two checkpoints hold the same state, in one number for each part of it.

Printed losses are no proof: with another number of threads they stay the same to the last digit while weights drift apart. Of
tensors the digest is that of their elements, in the order of memory, whatever pieces they are stored in: a step has the same
one in every layout.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pentatron.checkpoint.load import ROUTERS, WEIGHTS, StepReader
from pentatron.checkpoint.manifest import Manifest
from pentatron.checkpoint.tensor_file import DTYPES, blocks

# What the biases and counts of routers are called: they are the model's as much as its weights are.
# The states of random generators, one of each rank.
RANDOM = "rng/"
# Where data lies, and not what it is (the fingerprint says that); and what the numbers were computed with.
NO_STATE = frozenset({"data_files", "environment"})


@dataclass(frozen=True)
class StateDigest:
    """SHA-256 in hexadecimal. `weights` and `optimizer` say the same of a step in every layout; the states of random
    generators belong to ranks, and the cursor (where the run stands) has numbers that depend on the order of sums."""

    weights: str
    optimizer: str
    random: str
    cursor: str

    @property
    def whole(self) -> str:
        return _sum(f"{name} {value}" for name, value in vars(self).items())

    def parts(self) -> dict[str, str]:
        return {**vars(self), "whole": self.whole}

    def differences(self, other: "StateDigest") -> list[str]:
        """The parts that are not the same."""
        return [name for name, value in vars(self).items() if value != vars(other)[name]]


def state_digest(folder: Path, manifest: Manifest) -> StateDigest:
    """Of a saved step; every byte of it is read, a block at a time."""
    parts: dict[str, list[str]] = {"weights": [], "optimizer": [], "random": []}
    for name, digest in tensor_digests(folder, manifest):
        parts[_part(name)].append(f"{name} {digest}")
    return StateDigest(**{part: _sum(lines) for part, lines in parts.items()}, cursor=_cursor(manifest))


def tensor_digests(
    folder: Path, manifest: Manifest, names: Iterable[str] | None = None
) -> Iterator[tuple[str, str]]:
    """Of each tensor, by name in their order: its type, its shape and its elements."""
    with StepReader(folder, manifest) as reader:
        for name in sorted(manifest.tensors if names is None else names):
            record = manifest.tensors[name]
            digest = hashlib.sha256(f"{record.dtype} {list(record.shape)}\n".encode())
            for start, size in blocks(record.shape, DTYPES[record.dtype].itemsize):
                digest.update(_bytes(reader.read(name, start, size)))
            yield name, digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _part(name: str) -> str:
    if name.startswith((WEIGHTS, ROUTERS)):
        return "weights"
    return "random" if name.startswith(RANDOM) else "optimizer"


def _cursor(manifest: Manifest) -> str:
    state: Mapping[str, Any] = {k: v for k, v in manifest.run_state.items() if k not in NO_STATE}
    return _sum([json.dumps({"step": manifest.step, "state": state}, sort_keys=True)])


def _sum(lines: Iterable[str]) -> str:
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()

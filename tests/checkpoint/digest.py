"""Digests of a saved state, with which tests compare runs.

Equal printed losses do not prove equal states: weights can differ while losses agree in all printed digits.
A tensor's digest covers its elements in memory order, so it does not depend on the layout that saved it.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from pentatron.checkpoint.compare import NO_STATE
from pentatron.checkpoint.format import Manifest
from pentatron.checkpoint.load import ROUTERS, WEIGHTS, StepReader

# Prefix of the states of the random generators, one per rank.
RANDOM = "rng/"


@dataclass(frozen=True)
class StateDigest:
    """SHA-256 digests of the parts of a state, in hexadecimal.

    `weights` and `optimizer` do not depend on the layout. Random generator states belong to ranks, and the
    cursor (position in the run) contains numbers that depend on the order of summation.
    """

    weights: str
    optimizer: str
    random: str
    cursor: str

    @property
    def whole(self) -> str:
        return _digest_lines(f"{name} {value}" for name, value in vars(self).items())

    def parts(self) -> dict[str, str]:
        return {**vars(self), "whole": self.whole}

    def differences(self, other: "StateDigest") -> list[str]:
        """Names of the parts that differ."""
        return [name for name, value in vars(self).items() if value != vars(other)[name]]


def state_digest(folder: Path, manifest: Manifest) -> StateDigest:
    """Digests a saved step. Reads every byte, one block at a time."""
    parts: dict[str, list[str]] = {"weights": [], "optimizer": [], "random": []}
    with StepReader(folder, manifest) as reader:
        for name, record in sorted(manifest.tensors.items()):
            digest = hashlib.sha256(f"{record.dtype} {list(record.shape)}\n".encode())
            for _, values in reader.read_blocks(name):
                digest.update(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            is_weight = name.startswith((WEIGHTS, ROUTERS))
            part = "weights" if is_weight else "random" if name.startswith(RANDOM) else "optimizer"
            parts[part].append(f"{name} {digest.hexdigest()}")
    state = {key: value for key, value in manifest.run_state.items() if key not in NO_STATE}
    cursor = _digest_lines([json.dumps({"step": manifest.step, "state": state}, sort_keys=True)])
    return StateDigest(**{part: _digest_lines(lines) for part, lines in parts.items()}, cursor=cursor)


def _digest_lines(lines: Iterable[str]) -> str:
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()

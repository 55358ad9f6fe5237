"""The states of random generators: attention dropout draws from torch's, a program of the user's from any; all else is drawn from names."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pentatron.checkpoint.load import load_tensor
from pentatron.checkpoint.store import Found
from pentatron.parallel.world import World

# The generator behind NumPy's plain functions, which are what programs of users draw from.
_NUMPY: Any = np.random.mtrand
_TWISTER = "MT19937"


def seed_generators(seed: int) -> None:
    """Those of this process."""
    torch.manual_seed(seed)
    random.seed(seed)
    _NUMPY.seed(seed % 2**32)


def random_state(world: World) -> dict[str, Tensor]:
    """What a checkpoint keeps for this rank."""
    state = {
        _name("torch_cpu", world): torch.get_rng_state(),
        _name("python", world): _of_python(),
        _name("numpy", world): _of_numpy(),
    }
    if world.device.type == "cuda":
        state[_name("torch_cuda", world)] = torch.cuda.get_rng_state(world.device)
    return state


def restore_random_state(found: Found, world: World) -> None:
    """A rank the saving run did not have keeps the state it was started with."""
    stored: Mapping[str, object] = found.manifest.tensors

    def kept(generator: str) -> Tensor | None:
        name = _name(generator, world)
        return load_tensor(found.folder, found.manifest, name) if name in stored else None

    if (state := kept("torch_cpu")) is not None:
        torch.set_rng_state(state)
    if world.device.type == "cuda" and (state := kept("torch_cuda")) is not None:
        torch.cuda.set_rng_state(state, world.device)
    if (state := kept("python")) is not None:
        version, *words = state[:-1].tolist()
        gauss = state[-1:].view(torch.float64).item()
        random.setstate((version, tuple(words), None if np.isnan(gauss) else gauss))
    if (state := kept("numpy")) is not None:
        twisted, (position, has_gauss) = state[:-3].numpy().astype(np.uint32), state[-3:-1].tolist()
        gauss = state[-1:].view(torch.float64).item()
        _NUMPY.set_state((_TWISTER, twisted, position, has_gauss, gauss))


def _of_python() -> Tensor:
    version, words, gauss = random.getstate()
    return torch.cat((torch.tensor([version, *words]), _bits(float("nan") if gauss is None else gauss)))


def _of_numpy() -> Tensor:
    _, words, position, has_gauss, gauss = _NUMPY.get_state(legacy=True)
    return torch.cat(
        (torch.from_numpy(words.astype(np.int64)), torch.tensor([position, has_gauss]), _bits(gauss))
    )


def _bits(number: float) -> Tensor:
    """A number as a whole one of the same bits, as a state has one type."""
    return torch.tensor([number], dtype=torch.float64).view(torch.int64)


def _name(generator: str, world: World) -> str:
    return f"rng/{generator}/rank-{world.everyone.rank:05d}"

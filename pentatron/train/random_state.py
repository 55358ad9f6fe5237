"""The state of torch's generators, which attention dropout draws from; everything else is drawn from names."""

import torch
from torch import Tensor

from pentatron.checkpoint.load import load_tensor
from pentatron.checkpoint.store import Found
from pentatron.parallel.world import World


def random_state(world: World) -> dict[str, Tensor]:
    """What a checkpoint keeps for this rank."""
    state = {_name("cpu", world): torch.get_rng_state()}
    if world.device.type == "cuda":
        state[_name("cuda", world)] = torch.cuda.get_rng_state(world.device)
    return state


def restore_random_state(found: Found, world: World) -> None:
    """A rank the saving run did not have keeps the state it was started with."""
    if (name := _name("cpu", world)) in found.manifest.tensors:
        torch.set_rng_state(load_tensor(found.folder, found.manifest, name))
    if world.device.type == "cuda" and (name := _name("cuda", world)) in found.manifest.tensors:
        torch.cuda.set_rng_state(load_tensor(found.folder, found.manifest, name), world.device)


def _name(device: str, world: World) -> str:
    return f"rng/torch_{device}/rank-{world.everyone.rank:05d}"

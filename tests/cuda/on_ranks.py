"""Functions of ranks that share a GPU; a separate module keeps their imports few."""

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from pentatron.cli.environment import set_cublas_workspace
from pentatron.compare.trial import Trajectory
from pentatron.parallel.world import create_groups, single_process
from pentatron.train.session import run_training
from tests.parity.trajectory import run
from tests.support import resolved


def several(commands: Sequence[str], device: str) -> list[Trajectory]:
    """Runs layouts one after the other, because a process takes seconds to open a GPU."""
    return [run(words, dist.get_world_size(), device) for words in commands]


def train(words: str, device: str, compiled_into: str) -> None:
    """Trains a whole run as the command does; `compiled_into` is the cache of the compiler."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled_into
    chosen = resolved(words, dist.get_world_size())
    if chosen.config.precision.deterministic_mode:
        # The command does this for --deterministic-mode.
        set_cublas_workspace()
        torch.use_deterministic_algorithms(True)
    # The device has its index, as in a run of the command.
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    world = create_groups(chosen.config.grid, dist.get_rank(), dist.get_rank(), place)
    run_training(chosen, world if world.all_ranks.size > 1 else single_process(place), True)

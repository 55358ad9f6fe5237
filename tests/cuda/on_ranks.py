"""What ranks run that share a GPU. They import this module and need nothing of what compares them."""

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
    """One layout after the other, as a process takes seconds to open a GPU."""
    return [run(words, dist.get_world_size(), device) for words in commands]


def train(words: str, device: str, compiled_into: str) -> None:
    """A whole run, as the command makes it; what the compiler makes is kept in that folder."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled_into
    chosen = resolved(words, dist.get_world_size())
    if chosen.config.precision.deterministic_mode:
        # As the command does.
        set_cublas_workspace()
        torch.use_deterministic_algorithms(True)
    # With its number, as a run has it.
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    world = create_groups(chosen.config.grid, dist.get_rank(), dist.get_rank(), place)
    run_training(chosen, world if world.everyone.size > 1 else single_process(place), True)

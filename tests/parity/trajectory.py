"""Creates the world of a test's ranks, and runs a trial of a layout on them."""

import torch
import torch.distributed as dist

from pentatron.compare.trial import Trajectory, run_trial
from pentatron.parallel.world import World, create_groups, single_process
from pentatron.settings.run_config import RunConfig
from tests.parity.bugs import plant
from tests.support import resolved


def here(config: RunConfig, device: str = "cpu") -> World:
    """Returns the world of this rank; on a GPU all ranks share one."""
    if config.grid.world_size == 1:
        return single_process(torch.device(device))
    return create_groups(config.grid, dist.get_rank(), dist.get_rank(), torch.device(device))


def on_a_rank(words: str, bug: str = "", device: str = "cpu") -> Trajectory:
    """Runs a trial on one of several ranks, with a planted bug if one is named."""
    plant(bug)
    return run(words, dist.get_world_size(), device)


def run(words: str, world_size: int, device: str = "cpu") -> Trajectory:
    config = resolved(words, world_size).config
    return run_trial(config, here(config, device))

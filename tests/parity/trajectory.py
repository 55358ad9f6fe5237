"""Five training steps on one rank of a layout, and everything they computed."""

import torch
import torch.distributed as dist

from pentatron.config.run import RunConfig
from pentatron.parallel.world import World, connect, single_process
from pentatron.train.comparison import Sent, Trajectory
from pentatron.train.trial import follow, keep_gradients, micro_batches, reveal, run_trial, sent
from tests.parity.bugs import plant
from tests.support import resolved

__all__ = [
    "Sent",
    "Trajectory",
    "follow",
    "here",
    "keep_gradients",
    "micro_batches",
    "on_a_rank",
    "reveal",
    "run",
    "sent",
]


def here(config: RunConfig, device: str = "cpu") -> World:
    """Ranks share a GPU, over gloo."""
    if config.grid.world_size == 1:
        return single_process(torch.device(device))
    return connect(config.grid, dist.get_rank(), dist.get_rank(), torch.device(device))


def on_a_rank(words: str, bug: str = "", device: str = "cpu") -> Trajectory:
    """The body of a distributed run."""
    plant(bug)
    return run(words, dist.get_world_size(), device)


def run(words: str, world_size: int, device: str = "cpu") -> Trajectory:
    config = resolved(words, world_size).config
    return run_trial(config, here(config, device))

"""The processes of a run: who this rank is, which groups it belongs to, and where it computes.

A `World` is passed to whoever needs it; nothing is global.
"""

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pentatron.config.errors import UserError
from pentatron.layout.ranks import Coordinates, Grid
from pentatron.parallel.collectives import Group


@dataclass(frozen=True)
class World:
    grid: Grid
    at: Coordinates
    everyone: Group
    data: Group
    local_rank: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.everyone.rank == 0


def single_process(device: torch.device | None = None) -> World:
    """A world of one, without any process group."""
    alone = Group(0, 1)
    return World(Grid(), Coordinates(0, 0, 0, 0), alone, alone, 0, device or torch.device("cpu"))


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The device of one local rank; several ranks may share a GPU when there are fewer GPUs than ranks."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            "--device cuda: torch sees no GPU here; use --device cpu, or install a CUDA build of torch"
        )
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def _backend(device: torch.device, local_processes: int) -> str:
    """NCCL refuses two ranks on one GPU; gloo serves them, more slowly."""
    if device.type == "cuda" and local_processes <= torch.cuda.device_count():
        return "cpu:gloo,cuda:nccl"
    return "gloo"


@contextmanager
def open_world(
    grid: Grid, rank: int, local_rank: int, local_processes: int, device: torch.device, timeout_minutes: float
) -> Iterator[World]:
    """Joins the process group described by the environment (or none, for a world of one) and leaves it at the end."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if grid.world_size == 1:
        yield connect(grid, rank, local_rank, device)
        return
    _meet(
        _backend(device, local_processes), rank, grid.world_size, datetime.timedelta(minutes=timeout_minutes)
    )
    try:
        yield connect(grid, rank, local_rank, device)
    finally:
        dist.destroy_process_group()


def _meet(backend: str, rank: int, world_size: int, timeout: datetime.timedelta) -> None:
    try:
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout)
    except (dist.DistError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"the {world_size} processes could not meet ({reason}); check that MASTER_ADDR and MASTER_PORT "
            f"name the machine of rank 0 and a free port, that no firewall is in between, and that all {world_size} "
            f"processes were started"
        ) from None


def connect(grid: Grid, rank: int, local_rank: int, device: torch.device) -> World:
    """The world of a process group that exists already."""
    if grid.world_size == 1:
        return single_process(device)
    everyone = Group(rank, grid.world_size, dist.group.WORLD)
    at = grid.coordinates(rank)
    if grid.data == grid.world_size:
        return World(grid, at, everyone, everyone, local_rank, device)
    data = everyone
    # Every rank must take part in the making of every group, its own or not.
    for members in sorted({tuple(grid.data_group(r)) for r in range(grid.world_size)}):
        made = dist.new_group(list(members))
        if rank in members:
            data = Group(members.index(rank), len(members), made)
    return World(grid, at, everyone, data, local_rank, device)

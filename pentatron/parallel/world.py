"""World: this rank's coordinates, process groups and device.

A `World` is passed to everything that communicates; there is no global state.
"""

import datetime
import functools
import hashlib
import json
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from pentatron import __version__
from pentatron.errors import AgreedError, UserError
from pentatron.layout.ranks import Axis, Coordinates, Grid
from pentatron.parallel import collectives
from pentatron.parallel.collectives import Group, WaitTimer
from pentatron.parallel.process_group import destroy_process_group, init_process_group
from pentatron.parallel.rank_status import RankStatus
from pentatron.parallel.rendezvous import Rendezvous

ALONE = Group(0, 1)
_ALL_RANKS = "all ranks"
# The most ranks listed in the name of a group.
_SHOWN_RANKS = 8
_NO_GPU = "--device cuda: torch finds no GPU; use --device cpu, or install a CUDA build of torch"


@dataclass(frozen=True)
class World:
    """The process groups of this rank. `groups` has the axes with more than one rank; other axes are groups
    of one.

    `timeout` is the collective timeout of the groups; None leaves it to torch.
    """

    grid: Grid
    at: Coordinates
    all_ranks: Group
    local_rank: int
    device: torch.device
    groups: Mapping[Axis, Group] = field(default_factory=dict)
    timeout: datetime.timedelta | None = None
    # Measures the time this rank waits for others, in all groups.
    waits: WaitTimer = field(default_factory=WaitTimer, compare=False)

    @functools.cached_property
    def copy_stream(self) -> torch.cuda.Stream:
        """The CUDA stream for host-to-device copies.

        One stream for all of them: the caching allocator keeps freed memory on the stream it was allocated
        for.
        """
        return torch.cuda.Stream(self.device)

    def group(self, axis: Axis) -> Group:
        return self.groups.get(axis, ALONE)

    @property
    def status(self) -> RankStatus:
        """The progress of this rank, read by the hang detection."""
        return self.waits.status

    def set_timeout(self, seconds: float, others: typing.Iterable[typing.Any] = ()) -> None:
        """Sets the timeout of later collectives, and of the additional process groups in `others`."""
        limit = datetime.timedelta(seconds=seconds)
        own = [g.process_group for g in (self.all_ranks, *self.groups.values()) if g.size > 1]
        for process_group in {id(group): group for group in (*own, *others)}.values():
            # Torch has no public way to change a timeout.
            dist.distributed_c10d._set_pg_timeout(limit, process_group)

    @property
    def uses_nccl(self) -> bool:
        """Whether GPUs communicate directly (NCCL) rather than through host memory (gloo)."""
        return self.device.type == "cuda" and self.all_ranks.size > 1 and not self.all_ranks.through_host

    @property
    def tensor(self) -> Group:
        return self.group("tensor")

    @property
    def data(self) -> Group:
        return self.group("data")

    @property
    def pipeline(self) -> Group:
        return self.group("pipeline")

    @property
    def replicas(self) -> Group:
        """The ranks that hold the same weights and process other tokens."""
        return self.group("replicas")

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes the files that exist once per run."""
        return self.all_ranks.rank == 0

    def is_first_of(self, axes: typing.Iterable[Axis]) -> bool:
        """Whether this rank is rank 0 of the group of every one of `axes`."""
        return all(self.group(axis).rank == 0 for axis in axes)


def single_process(device: torch.device | None = None, status: RankStatus | None = None) -> World:
    """Returns a world of one rank, without any process group."""
    device = device or torch.device("cpu")
    return World(Grid(), Coordinates(0, 0, 0, 0), ALONE, 0, device, waits=WaitTimer(status))


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """Returns the device of one local rank; ranks share GPUs if there are fewer GPUs than local ranks."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        # A torch without CUDA fails alike on all ranks of a machine, so local rank 0 alone reports it. With
        # CUDA, CUDA_VISIBLE_DEVICES may hide the GPUs from this rank only, so every rank reports.
        same_everywhere = torch.version.cuda is None and torch.version.hip is None
        raise (AgreedError if same_everywhere and local_rank > 0 else UserError)(_NO_GPU)
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def require_gpu() -> None:
    """Raises in the launcher what every rank would raise. Counts devices without creating a CUDA context."""
    if torch.cuda.device_count() == 0:
        raise UserError(_NO_GPU)


@contextmanager
def open_world(
    grid: Grid,
    rank: int,
    local_rank: int,
    device: torch.device,
    timeout_minutes: float,
    settings: Mapping[str, Any],
    point: Rendezvous | None,
    status: RankStatus | None = None,
) -> Iterator[World]:
    """Joins the process group whose rendezvous is `point`, and leaves it at the end.

    Checks first that all ranks have the same `settings`. A world of one rank needs no process group and no
    `point`.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if grid.world_size == 1:
        yield single_process(device, status)
        return
    timeout = datetime.timedelta(minutes=timeout_minutes)
    assert point is not None, "several ranks need a rendezvous"
    key = init_process_group(device, rank, grid.world_size, timeout, point)
    try:
        all_ranks = Group(rank, grid.world_size, dist.group.WORLD, name=_ALL_RANKS, key=key)
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else ""
        versions = {"pentatron": __version__, "torch": str(torch.__version__), "NCCL": nccl}
        require_same_settings(settings, versions, all_ranks)
        yield create_groups(grid, rank, local_rank, device, timeout, status, key)
    except BaseException:
        destroy_process_group(failed=True)
        raise
    destroy_process_group(failed=False)


def require_same_settings(settings: Mapping[str, Any], versions: Mapping[str, str], group: Group) -> None:
    """Raises on all ranks if their settings or library versions differ: they would train wrongly or hang.

    `settings` maps flags to plain values, `versions` maps libraries to versions. Ranks exchange a digest, and
    the values only if the digests differ.
    """
    digest = hashlib.sha256(json.dumps([settings, versions], sort_keys=True).encode()).hexdigest()
    if len(set(collectives.gather_objects(digest, group))) == 1:
        return
    first, first_versions = collectives.broadcast_object((dict(settings), dict(versions)), group)
    other = next((name for name, version in versions.items() if first_versions.get(name) != version), None)
    problem = None
    if other is not None:
        problem = (
            f"rank {group.rank} runs {other} {versions[other]}, rank 0 runs {other} {first_versions.get(other)}; "
            f"install the same versions on every machine"
        )
    collectives.raise_on_all_ranks(problem, group)
    different = [flag for flag, value in settings.items() if first.get(flag) != value]
    problem = None
    if different:
        flag = different[0]
        more = f" (and {len(different) - 1} other settings)" if len(different) > 1 else ""
        problem = (
            f"rank {group.rank} was started with {flag} {settings[flag]}, rank 0 with {flag} {first.get(flag)}{more}; "
            f"start every process with the same command"
        )
    collectives.raise_on_all_ranks(problem, group)


def create_groups(
    grid: Grid,
    rank: int,
    local_rank: int,
    device: torch.device,
    timeout: datetime.timedelta | None = None,
    status: RankStatus | None = None,
    key: bytes | None = None,
) -> World:
    """Creates the process groups of all axes inside the initialized default process group.

    New groups do not inherit the `timeout` of the default group. `key` is the one that `init_process_group`
    returned.
    """
    if grid.world_size == 1:
        return single_process(device, status)
    through_host = device.type == "cuda" and dist.get_backend() == "gloo"
    waits = WaitTimer(status)
    all_ranks = Group(rank, grid.world_size, dist.group.WORLD, through_host, waits, _ALL_RANKS, key)
    # Axes often have the same members (data and replicas, say); such axes share one process group.
    created: dict[tuple[tuple[int, ...], ...], Group | None] = {(tuple(range(grid.world_size)),): all_ranks}
    groups: dict[Axis, Group] = {}
    for axis in typing.get_args(Axis):
        partition = tuple(sorted(members for members in grid.groups(axis) if len(members) > 1))
        if partition and partition not in created:
            created[partition] = _new_groups(axis, partition, all_ranks, timeout)
        if (group := created.get(partition)) is not None:
            groups[axis] = group
    return World(grid, grid.coordinates(rank), all_ranks, local_rank, device, groups, timeout, waits)


def _new_groups(
    axis: Axis, partition: tuple[tuple[int, ...], ...], all_ranks: Group, timeout: datetime.timedelta | None
) -> Group | None:
    """Creates a process group for each part of the ranks and returns this rank's group, or None.

    `new_group` is a collective: every rank must take part in the creation of every group.
    """
    own = None
    for members in partition:
        process_group = dist.new_group(list(members), timeout=timeout)
        if all_ranks.rank in members:
            # All ranks of the group derive the same name for error messages.
            long = len(members) > _SHOWN_RANKS
            shown = (*members[: _SHOWN_RANKS - 1], "…", members[-1]) if long else members
            name = f"the {axis} ranks {', '.join(map(str, shown))}"
            rank, size = members.index(all_ranks.rank), len(members)
            own = replace(all_ranks, rank=rank, size=size, process_group=process_group, name=name)
    return own

"""The processes of a run: who this rank is, which groups it belongs to, and where it computes.

A `World` is passed to whoever needs it; nothing is global.
"""

import datetime
import functools
import hashlib
import json
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from pentatron import __version__
from pentatron.errors import AgreedError, UserError
from pentatron.layout.ranks import Axis, Coordinates, Grid
from pentatron.parallel.collectives import Group, Waits, broadcast_object, gather_objects, raise_together
from pentatron.parallel.process_group import join, leave
from pentatron.parallel.rank_status import Whereabouts
from pentatron.parallel.rendezvous import MeetingPoint

# Whether all ranks were told the same.


def require_same_settings(settings: Mapping[str, Any], versions: Mapping[str, str], group: Group) -> None:
    """Refuses to go on where ranks were started with different settings, which would train to wrong results or hang.

    `settings` are plain values by the flag that sets them, `versions` those of the libraries, by name. What travels is a
    digest, unless something is wrong.
    """
    digest = hashlib.sha256(json.dumps([settings, versions], sort_keys=True).encode()).hexdigest()
    if len(set(gather_objects(digest, group))) == 1:
        return
    first, first_versions = broadcast_object((dict(settings), dict(versions)), group)
    other = [name for name, version in versions.items() if first_versions.get(name) != version]
    raise_together(
        f"rank {group.rank} runs {other[0]} {versions[other[0]]}, rank 0 runs {other[0]} {first_versions.get(other[0])}; "
        f"install the same versions on every machine"
        if other
        else None,
        group,
    )
    different = [flag for flag, value in settings.items() if first.get(flag) != value]
    problem = None
    if different:
        flag = different[0]
        more = f" (and {len(different) - 1} other settings)" if len(different) > 1 else ""
        problem = (
            f"rank {group.rank} was started with {flag} {settings[flag]}, rank 0 with {flag} {first.get(flag)}{more}; "
            f"start every process with the same command"
        )
    raise_together(problem, group)


ALONE = Group(0, 1)
_EVERYONE = "all ranks"
# In the name of a group.
_SHOWN_RANKS = 8


@dataclass(frozen=True)
class World:
    """`groups` holds the axes along which this rank has company; on any other axis it is alone.

    `timeout` is how long the groups wait for their slowest rank; None leaves it to torch.
    """

    grid: Grid
    at: Coordinates
    everyone: Group
    local_rank: int
    device: torch.device
    groups: Mapping[Axis, Group] = field(default_factory=dict)
    timeout: datetime.timedelta | None = None
    # Counts, in all groups, the time this rank stands still for others.
    waits: Waits = field(default_factory=Waits, compare=False)

    @functools.cached_property
    def copies(self) -> torch.cuda.Stream:
        """Where what is read comes to this rank's GPU, beside the computation. One for all: memory stays with the stream it was taken for."""
        return torch.cuda.Stream(self.device)

    def group(self, axis: Axis) -> Group:
        return self.groups.get(axis, ALONE)

    @property
    def whereabouts(self) -> Whereabouts:
        """Where in the run this rank is, for those who watch that it gets on."""
        return self.waits.whereabouts

    def wait_at_most(self, seconds: float, others: typing.Iterable[typing.Any] = ()) -> None:
        """Collectives from now on, and messages in `others`, process groups of their own; torch has no public way to change it."""
        limit = datetime.timedelta(seconds=seconds)
        joined = [g.process_group for g in (self.everyone, *self.groups.values()) if g.size > 1]
        for process_group in {id(found): found for found in (*joined, *others)}.values():
            dist.distributed_c10d._set_pg_timeout(limit, process_group)

    @property
    def uses_nccl(self) -> bool:
        """Whether GPUs talk to each other, and not the host for them."""
        return self.device.type == "cuda" and self.everyone.size > 1 and not self.everyone.through_host

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
        """The ranks that hold the same weights and see other tokens."""
        return self.group("replicas")

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.everyone.rank == 0

    def is_first_of(self, axes: typing.Iterable[Axis]) -> bool:
        """Whether this rank speaks for those that differ from it along `axes` alone."""
        return all(self.group(axis).rank == 0 for axis in axes)


def single_process(device: torch.device | None = None, whereabouts: Whereabouts | None = None) -> World:
    """A world of one, without any process group."""
    where = whereabouts or Whereabouts()
    return World(Grid(), Coordinates(0, 0, 0, 0), ALONE, 0, device or torch.device("cpu"), waits=Waits(where))


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The device of one local rank; several ranks may share a GPU when there are fewer GPUs than ranks."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        # Without CUDA in torch those of one machine would all say the same, and the first of them says it; else a launcher may have shown
        # this one no GPU, and the others theirs.
        alike = torch.version.cuda is None and torch.version.hip is None
        raise _without_gpu(AgreedError if alike and local_rank > 0 else UserError)
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def require_gpu() -> None:
    """For who starts the ranks: refuses what they would all refuse. Devices are counted, and none of them is opened."""
    if torch.cuda.device_count() == 0:
        raise _without_gpu(UserError)


def _without_gpu(kind: type[UserError]) -> UserError:
    return kind("--device cuda: torch sees no GPU here; use --device cpu, or install a CUDA build of torch")


@contextmanager
def open_world(
    grid: Grid,
    rank: int,
    local_rank: int,
    device: torch.device,
    timeout_minutes: float,
    settings: Mapping[str, Any],
    point: MeetingPoint | None,
    whereabouts: Whereabouts | None = None,
) -> Iterator[World]:
    """Joins the process group that meets at `point` (or none, for a world of one) and leaves it at the end.

    All ranks must have the same `settings`; that is checked before anything depends on them.
    """
    where = whereabouts or Whereabouts()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if grid.world_size == 1:
        yield connect(grid, rank, local_rank, device, whereabouts=where)
        return
    timeout = datetime.timedelta(minutes=timeout_minutes)
    assert point is not None, "several ranks meet somewhere"
    key = join(device, rank, grid.world_size, timeout, point)
    try:
        everyone = Group(rank, grid.world_size, dist.group.WORLD, name=_EVERYONE, key=key)
        require_same_settings(settings, _versions(device), everyone)
        yield connect(grid, rank, local_rank, device, timeout, where, key)
    except BaseException:
        leave(failed=True)
        raise
    leave(failed=False)


def _versions(device: torch.device) -> dict[str, str]:
    """Of what must be the same on every machine."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else ""
    return {"pentatron": __version__, "torch": str(torch.__version__), "NCCL": nccl}


def connect(
    grid: Grid,
    rank: int,
    local_rank: int,
    device: torch.device,
    timeout: datetime.timedelta | None = None,
    whereabouts: Whereabouts | None = None,
    key: bytes | None = None,
) -> World:
    """The world of a process group that exists already. Groups do not inherit its timeout, so it is said again.

    `key` is that of `join`.
    """
    where = whereabouts or Whereabouts()
    if grid.world_size == 1:
        return single_process(device, where)
    through_host = device.type == "cuda" and dist.get_backend() == "gloo"
    waits = Waits(where)
    everyone = Group(rank, grid.world_size, dist.group.WORLD, through_host, waits, _EVERYONE, key)
    # Axes often have the same members (data and replicas, say); such axes share one process group.
    made: dict[tuple[tuple[int, ...], ...], Group | None] = {
        (tuple(range(grid.world_size)),): everyone,
    }
    groups: dict[Axis, Group] = {}
    for axis in typing.get_args(Axis):
        divided = tuple(sorted(m for m in grid.groups(axis) if len(m) > 1))
        if divided and divided not in made:
            made[divided] = _make(axis, divided, everyone, timeout)
        own = made[divided] if divided else None
        if own is not None:
            groups[axis] = own
    return World(grid, grid.coordinates(rank), everyone, local_rank, device, groups, timeout, waits)


def _make(
    axis: Axis,
    divided: tuple[tuple[int, ...], ...],
    everyone: Group,
    timeout: datetime.timedelta | None,
) -> Group | None:
    """Every rank must take part in the making of every group, its own or not."""
    own = None
    for members in divided:
        process_group = dist.new_group(list(members), timeout=timeout)
        if everyone.rank in members:
            own = replace(
                everyone,
                rank=members.index(everyone.rank),
                size=len(members),
                process_group=process_group,
                name=_name(axis, members),
            )
    return own


def _name(axis: Axis, members: Sequence[int]) -> str:
    """For people, of which group this is: all its ranks write the same."""
    ranks = members if len(members) <= _SHOWN_RANKS else (*members[: _SHOWN_RANKS - 1], "…", members[-1])
    return f"the {axis} ranks {', '.join(map(str, ranks))}"

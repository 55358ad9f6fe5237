"""Every collective the package uses, in one place.

A group of one returns at once, so that the callers have one code path. Where torch's names differ between versions,
it is to be settled here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pentatron.config.errors import AgreedError, UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """Some ranks that talk to each other, and this rank's place among them."""

    rank: int
    size: int
    process_group: Any = None


def all_reduce_(tensor: Tensor, group: Group) -> Tensor:
    """Sums in place over the group."""
    if group.size > 1:
        dist.all_reduce(tensor, group=group.process_group)
    return tensor


def all_reduce_max_(tensor: Tensor, group: Group) -> Tensor:
    """Takes the maximum in place over the group."""
    if group.size > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group.process_group)
    return tensor


def largest(number: int, group: Group, device: torch.device) -> int:
    """The largest of the ranks' numbers. Every rank must ask."""
    if group.size == 1:
        return number
    return int(all_reduce_max_(torch.tensor(number, device=device), group).item())


def broadcast_object(value: Any, group: Group) -> Any:
    """Rank 0's small Python value on every rank."""
    if group.size == 1:
        return value
    box = [value]
    source = dist.get_global_rank(group.process_group, 0)
    dist.broadcast_object_list(box, src=source, group=group.process_group)
    return box[0]


def gather_objects(value: Any, group: Group) -> Sequence[Any]:
    """Every rank's small Python value, in rank order, on every rank."""
    if group.size == 1:
        return [value]
    found: list[Any] = [None] * group.size
    dist.all_gather_object(found, value, group=group.process_group)
    return found


def on_some_ranks(chosen: bool, action: Callable[[], T], group: Group) -> T | None:
    """Runs `action` where chosen. An error the user can mend is raised on every rank, so that none is left waiting."""
    value, problem = None, None
    if chosen:
        try:
            value = action()
        except UserError as error:
            problem = str(error)
        except OSError as error:
            problem = f"{error.filename or 'a file'}: {error.strerror or error}"
    raise_together(problem, group)
    return value


def raise_together(problem: str | None, group: Group) -> None:
    """Raises the first rank's problem on all ranks, if any rank has one."""
    problems = [p for p in gather_objects(problem, group) if p is not None]
    if problems:
        raise AgreedError(problems[0])

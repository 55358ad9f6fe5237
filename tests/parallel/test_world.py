import datetime
import errno
import os
import time

import pytest
import torch
import torch.distributed as dist

from pentatron.errors import AgreedError, UserError
from pentatron.layout.ranks import Grid
from pentatron.parallel.collectives import (
    all_reduce_,
    broadcast_object,
    gather_objects,
    largest,
    run_on_all_ranks,
    run_on_some_ranks,
)
from pentatron.parallel.world import World, choose_device, create_groups, single_process
from tests.harness import RanksFailed, distributed, run_distributed

CPU = torch.device("cpu")


def here(grid: Grid) -> World:
    return create_groups(grid, dist.get_rank(), dist.get_rank(), CPU)


@distributed(world=4)
def test_data_group_sums_over_its_own_ranks_only() -> None:
    world = here(Grid(tensor=2, data=2))
    mine = torch.tensor([float(world.all_ranks.rank)])
    total = all_reduce_(mine.clone(), world.data)
    assert total.item() == {0: 0 + 2, 1: 1 + 3, 2: 0 + 2, 3: 1 + 3}[world.all_ranks.rank]
    assert (world.data.rank, world.data.size) == (world.all_ranks.rank // 2, 2)


@distributed(world=2)
def test_every_rank_hears_the_largest() -> None:
    world = here(Grid(data=2))
    assert largest(world.all_ranks.rank * 7, world.all_ranks) == 7
    assert largest(0, world.all_ranks) == 0


@distributed(world=2)
def test_waits_can_be_shortened() -> None:
    world = here(Grid(data=2))
    world.set_timeout(0.5)
    if world.all_ranks.rank == 0:
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="Timed out"):
            all_reduce_(torch.ones(1), world.all_ranks)
        assert time.monotonic() - began < 20
    else:
        time.sleep(2)


@distributed(world=2)
def test_objects_travel() -> None:
    world = here(Grid(data=2))
    rank = world.all_ranks.rank
    assert broadcast_object({"from": rank}, world.all_ranks) == {"from": 0}
    assert gather_objects(rank * 10, world.all_ranks) == [0, 10]


@distributed(world=2)
def test_an_error_on_one_rank_is_raised_on_all() -> None:
    world = here(Grid(data=2))

    def fails() -> None:
        raise UserError("no space left")

    with pytest.raises(UserError, match="no space left"):
        run_on_some_ranks(world.all_ranks.rank == 1, fails, world.all_ranks)


def wait_for_an_absent_rank(seconds: float | None) -> None:
    """The first stage starts an all-reduce on the pipeline axis; the last one never does."""
    timeout = None if seconds is None else datetime.timedelta(seconds=seconds)
    world = create_groups(Grid(tensor=2, pipeline=2), dist.get_rank(), 0, CPU, timeout)
    if world.at.pipeline == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            all_reduce_(torch.zeros(1), world.pipeline)
    dist.barrier()


def test_groups_wait_no_longer_than_their_timeout() -> None:
    run_distributed(wait_for_an_absent_rank, 4, seconds=0.3)
    with pytest.raises(RanksFailed, match="had not finished"):
        run_distributed(wait_for_an_absent_rank, 4, timeout=2.0, seconds=None)


def test_a_world_of_one_needs_no_process_group() -> None:
    world = single_process()
    assert world.is_first
    assert largest(3, world.all_ranks) == 3
    assert run_on_all_ranks(lambda: 7, world.all_ranks) == 7


def test_full_disk_error_without_a_file_has_advice() -> None:
    def fails() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\); make room"):
        run_on_all_ranks(fails, single_process().all_ranks)


def test_cuda_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="--device cpu") as of_first:
        choose_device("cuda", 0)
    assert not isinstance(of_first.value, AgreedError)
    # Without CUDA in torch all local ranks fail alike, and only local rank 0 reports it.
    with pytest.raises(AgreedError):
        choose_device("cuda", 1)
    assert choose_device("auto", 3) == CPU

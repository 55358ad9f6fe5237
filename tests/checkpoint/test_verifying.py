"""Tests verification by all ranks: each reads a share of the files, and all get one verdict."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import pentatron.checkpoint.format as manifest_module
from pentatron.checkpoint.format import read_manifest, verify_files
from pentatron.checkpoint.store import Checkpoint, CheckpointStore
from pentatron.checkpoint.verify import Check, files_of_rank, search_on_all_ranks
from pentatron.errors import UserError
from pentatron.parallel.collectives import Group
from tests.checkpoint.steps import save
from tests.checkpoint.test_damage import flip_bit, rewrite
from tests.harness import distributed

SHARDS = [f"rank-{rank:05d}.safetensors" for rank in range(4)]


def find(folder: Path, group: Group, set_aside: bool = True) -> tuple[Checkpoint | None, list[str]]:
    def search(check: Check) -> tuple[Checkpoint | None, list[str]]:
        return CheckpointStore(folder, keep=None).newest_valid(True, set_aside, check)

    return search_on_all_ranks(search, group)


@distributed(world=4)
def test_damage_that_another_rank_finds_sends_all_to_the_step_before(tmp_path: Path) -> None:
    group = Group(dist.get_rank(), 4, dist.group.WORLD)
    store = CheckpointStore(tmp_path, keep=None)
    for step in (1, 2, 3):
        save(store, step, group)
    if group.rank == 0:
        flip_bit(tmp_path / "step-00000003" / SHARDS[1], -1)
        shutil.copy(tmp_path / "step-00000001" / SHARDS[3], tmp_path / "step-00000002" / SHARDS[3])
    dist.barrier()
    hashed: list[str] = []
    honest = manifest_module.digest_of_file

    def noting(path: Path, *how: Any) -> str:
        hashed.append(path.name)
        return honest(path, *how)

    manifest_module.digest_of_file = noting  # type: ignore[assignment]
    found, complaints = find(tmp_path, group)
    assert found is not None and found.manifest.step == 1, "every rank goes on from the same step"
    assert len(complaints) == 2
    assert (
        f"step-00000003/{SHARDS[1]}: sha256 is" in complaints[0]
        and "weights/b[1:2] is damaged" in complaints[0]
    )
    assert (
        f"step-00000002/{SHARDS[3]}: sha256 is" in complaints[1]
        and "exp_avg/a[2:3,0:4] and 2 more are" in complaints[1]
    )
    assert hashed == [SHARDS[group.rank]] * 3, "each reads its own"


@distributed(world=2)
def test_a_rank_that_sees_a_copy_checks_that_one(tmp_path: Path) -> None:
    """Imitates machines without a shared folder: each rank verifies the step on its own disk."""
    group = Group(dist.get_rank(), 2, dist.group.WORLD)
    save(CheckpointStore(tmp_path / "disk-0", keep=None), 1, group)
    dist.barrier()
    if group.rank == 0:
        shutil.copytree(tmp_path / "disk-0", tmp_path / "disk-1")
        flip_bit(tmp_path / "disk-1" / "step-00000001" / SHARDS[0], -3)
    dist.barrier()
    steps = CheckpointStore.steps
    mine = tmp_path / f"disk-{group.rank}" / "step-00000001"
    # Rank 0 sends a path, behind which each rank has its own disk.
    import pentatron.checkpoint.verify as module

    honest = module.verify_rank_share
    module._identity = lambda folder: (group.rank, 0, 0)
    module.verify_rank_share = lambda folder, *rest: honest(mine, *rest)
    found, complaints = find(tmp_path / "disk-0", group, set_aside=False)
    assert found is None and len(complaints) == 1
    assert f"disk-1/step-00000001/{SHARDS[0]}: sha256 is" in complaints[0]
    assert steps(CheckpointStore(tmp_path / "disk-0", keep=None)), "nothing is renamed for a reader"


@distributed(world=2)
def test_a_rank_that_does_not_see_the_folder_is_named(tmp_path: Path) -> None:
    import pentatron.checkpoint.verify as module

    group = Group(dist.get_rank(), 2, dist.group.WORLD)
    save(CheckpointStore(tmp_path, keep=None), 1, group)
    if group.rank == 1:
        module._identity = lambda folder: None
    with pytest.raises(
        UserError, match=r"^rank 1: .*step-00000001 does not exist for this rank; put the checkpoint"
    ):
        find(tmp_path, group)
    assert len(CheckpointStore(tmp_path, keep=None).steps()) == 1, "that is no damage: nothing is set aside"


def test_the_files_are_divided() -> None:
    for files in (1, 2, 5, 8):
        for ranks in (1, 2, 3, 8):
            names = [f"rank-{i:05d}" for i in range(files)]
            shares = [files_of_rank(names, rank, ranks) for rank in range(ranks)]
            assert sorted(name for share in shares for name in share) == names
            assert max(map(len, shares)) <= -(-files // ranks)


def damaged(folder: Path) -> str:
    found, complaints = CheckpointStore(folder, keep=None).newest_valid(verify=True, set_aside=False)
    assert found is None and len(complaints) == 1
    return complaints[0]


def test_the_tensor_that_is_damaged_is_named(tmp_path: Path) -> None:
    step = save(CheckpointStore(tmp_path, keep=None), 1)
    shard = step / SHARDS[0]
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    flip_bit(shard, 8 + length + 8 + 40)
    assert "of its 5 tensors exp_avg/a is damaged" in damaged(tmp_path)
    flip_bit(shard, -1)
    assert "of its 5 tensors exp_avg/a and 1 more are damaged" in damaged(tmp_path)
    shard.write_bytes(content.replace(b"F32", b"I32", 1))
    assert "its header is damaged, and none of its 5 tensors" in damaged(tmp_path)
    shard.write_bytes(content)
    flip_bit(shard, 9)
    assert "its header is damaged" in damaged(tmp_path) and "with it all 5 tensors" in damaged(tmp_path)


def test_steps_without_sums_of_tensors_are_read_and_their_damage_found(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    steps = [save(store, 1), save(store, 2)]
    for step in steps:

        def drop(manifest: dict[str, dict[str, dict[str, list[dict[str, str]]]]]) -> None:
            for record in manifest["tensors"].values():
                record["pieces"][0].pop("crc32")

        rewrite(step, drop)
        verify_files(step, read_manifest(step))
        flip_bit(step / SHARDS[0], -3)
    found, complaints = store.newest_valid(verify=True, set_aside=False)
    assert found is None and all("it holds 5 tensors, from " in complaint for complaint in complaints)


def test_a_shard_too_many_is_refused(tmp_path: Path) -> None:
    step = save(CheckpointStore(tmp_path, keep=None), 1)
    shutil.copy(step / SHARDS[0], step / SHARDS[1])
    assert f"{SHARDS[1]} is not listed in manifest.json" in damaged(tmp_path)

"""Tests state digests: equal for any sharding, different for any other bit."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pentatron.checkpoint.format import read_manifest
from pentatron.checkpoint.store import CheckpointStore
from pentatron.parallel.collectives import Group
from tests.checkpoint.digest import StateDigest, state_digest
from tests.checkpoint.steps import ALONE, save, share, whole
from tests.harness import run_distributed


def digest(folder: Path) -> StateDigest:
    return state_digest(folder, read_manifest(folder))


def save_on_a_rank(folder: Path) -> None:

    rank = dist.get_rank()
    save(CheckpointStore(folder, None), 7, Group(rank, 3, dist.group.WORLD))


def test_pieces_do_not_matter(tmp_path: Path) -> None:
    run_distributed(save_on_a_rank, 3, folder=tmp_path / "three")
    one = digest(save(CheckpointStore(tmp_path / "one", None), 7))
    assert digest(tmp_path / "three" / "step-00000007") == one
    assert one.whole not in vars(one).values() and len({*vars(one).values()}) == 4


@pytest.mark.parametrize(
    ("name", "values", "part"),
    [
        ("weights/a", torch.full((3, 4), 7.0).index_fill_(0, torch.tensor(2), 7.0000005), "weights"),
        ("weights/a", torch.full((4, 3), 7.0), "weights"),
        ("weights/a", torch.full((3, 4), 7.0, dtype=torch.float64), "weights"),
        ("exp_avg/a", -torch.full((3, 4), 7.0000005), "optimizer"),
        ("rng/torch_cpu/rank-00000", torch.zeros(3, dtype=torch.uint8), "random"),
    ],
)
def test_one_bit_or_another_type_or_shape_is_seen_in_its_part(
    tmp_path: Path, name: str, values: torch.Tensor, part: str
) -> None:
    before = digest(save(CheckpointStore(tmp_path / "before", None), 7))
    changed = {f.tensor: f for f in share(ALONE, 7.0)} | {name: whole(name, values)}
    store = CheckpointStore(tmp_path / "after", None)
    after = digest(store.save(7, changed.values(), {}, {"step": 7}, {"model": {"n": 1}}, ALONE))
    assert before.differences(after) == [part] and before.whole != after.whole


def test_the_cursor_is_where_the_run_stands_and_not_where_its_data_lies(tmp_path: Path) -> None:
    folder = save(CheckpointStore(tmp_path, None), 7)
    manifest = read_manifest(folder)

    def at(**state: object) -> StateDigest:
        return state_digest(folder, dataclasses.replace(manifest, run_state=state))

    here = at(consumed_samples=8, data_files=["a"])
    assert here == at(data_files=["b"], consumed_samples=8)
    assert here.differences(at(consumed_samples=9)) == ["cursor"]

import pytest
import torch.distributed as dist

from pentatron.errors import AgreedError
from pentatron.parallel.collectives import Group
from pentatron.parallel.world import require_same_settings
from tests.harness import distributed


def all_ranks() -> Group:
    return Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


@distributed(world=4)
def test_equal_settings_pass() -> None:
    require_same_settings({"--lr": 0.1, "--data-path": ["a", "b"]}, {"torch": "2"}, all_ranks())


@distributed(world=4)
def test_every_rank_hears_which_setting_differs_where() -> None:
    group = all_ranks()
    settings = {"--seed": 1, "--lr": 0.1 if group.rank < 2 else 0.2, "--tp-size": 1 if group.rank < 2 else 2}
    with pytest.raises(
        AgreedError, match=r"rank 2 was started with --lr 0\.2, rank 0 with --lr 0\.1 \(and 1 other"
    ):
        require_same_settings(settings, {"torch": "2"}, group)


@distributed(world=2)
def test_other_versions_are_named_before_settings() -> None:
    group = all_ranks()
    versions = {"torch": "2.13.0", "NCCL": "2.27" if group.rank == 0 else "2.21"}
    with pytest.raises(
        AgreedError, match=r"^rank 1 runs NCCL 2\.21, rank 0 runs NCCL 2\.27; install the same"
    ):
        require_same_settings({"--lr": group.rank}, versions, group)

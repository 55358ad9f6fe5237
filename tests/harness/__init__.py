"""Runs distributed tests in tenths of a second: ranks are forked from a process with all imports done.

    @distributed(world=4)
    def test_sum() -> None:
        ones = torch.ones(3)
        dist.all_reduce(ones)
        assert ones.tolist() == [4, 4, 4]

The processes:

    test process   api.py, client.py, report.py     sends a `Job`, returns the results or raises the failure
      zygote       zygote.py, supervisor.py         imports once, forks, watches and reaps the ranks of a job
        ranks      rank.py                          fresh process group, one call of the function, one report
"""

from tests.harness.api import GLOO, NCCL, distributed, run_distributed
from tests.harness.report import RanksFailed

__all__ = ["GLOO", "NCCL", "RanksFailed", "distributed", "run_distributed"]

"""Distributed tests that cost tenths of a second: ranks are forked from a process that has imported
everything.

    @distributed(world=4)
    def test_sum() -> None:
        ones = torch.ones(3)
        dist.all_reduce(ones)
        assert ones.tolist() == [4, 4, 4]

Who does what:

    test process   api.py, client.py, report.py     sends a `Job`, turns what came of it into results or a failure
      zygote       zygote.py, supervisor.py         imports once, forks the ranks of each job, watches and buries them
        ranks      rank.py                          one fresh process group, one call of the test function, one report
"""

from tests.harness.api import GLOO, NCCL, distributed, run_distributed
from tests.harness.report import RanksFailed

__all__ = ["GLOO", "NCCL", "RanksFailed", "distributed", "run_distributed"]

"""Memory that is kept: whoever asks for it again does not wait for its pages."""

import resource

import pytest
import torch

from pentatron.kernels.host_memory import keep_freed_memory
from tests.harness import run_distributed

_ROUNDS = 5


def pages_waited_for(keeps: bool) -> int:
    """By a process that asks for four blocks, writes to them and frees them, again and again."""
    if keeps and not keep_freed_memory():
        return -1
    before = 0
    for number in range(_ROUNDS + 2):
        if number == 2:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [torch.ones(6 * 2**20) for _ in range(4)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_pages_are_there_the_next_time() -> None:
    [plain], [kept] = (
        run_distributed(pages_waited_for, 1, process_group=False, keeps=keeps) for keeps in (False, True)
    )
    if kept < 0:
        pytest.skip("there is no glibc here")
    assert kept < plain / 5

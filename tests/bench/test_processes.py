"""Tests processes that end well, fail, are killed or hang."""

import os
import signal
import time

import pytest

# Every process imports this module, so it has no large imports.
from pentatron.bench.fork_server import ForkServer, RankExits


def behave(rank: int, way: str) -> None:
    if rank == 1 and way == "fails":
        os._exit(3)
    if rank == 1 and way == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way in ("hangs", "fails", "is killed"):
        time.sleep(60)


@pytest.mark.parametrize(
    ("codes", "first", "killed", "perhaps"),
    [
        ([1, -9], [1], "rank 1 was killed by SIGKILL (the system does that when memory runs out)", None),
        ([1, -9], [0, 1], "rank 1 was killed by SIGKILL (the system does that when memory runs out)", None),
        ([2, -6], [0], None, None),
        ([2, -6], [0, 1], None, "rank 1 was killed by SIGABRT"),
        ([1, -11], [1], "rank 1 was killed by SIGSEGV", None),
    ],
)
def test_only_a_signal_that_came_first_is_the_reason(
    codes: list[int], first: list[int], killed: str | None, perhaps: str | None
) -> None:
    ended = RankExits(codes, first=first)
    assert ended.killed_message() == killed
    assert ended.killed_message(or_aborted=True) == (killed or perhaps)


def test_every_way_to_end_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pentatron.bench.fork_server._GRACE_SECONDS", 0.2)
    starter = ForkServer([])
    ticks: list[int] = []

    def run(way: str, timeout: float = 30.0) -> RankExits:
        return starter.run(behave, lambda rank: (rank, way), 2, timeout, lambda: ticks.append(1))

    assert run("ends").is_good
    failed = run("fails")
    assert not failed.is_good and list(failed.exit_codes) == [0, 3] and failed.killed_message() is None
    assert (
        run("is killed").killed_message()
        == "rank 1 was killed by SIGKILL (the system does that when memory runs out)"
    )
    late = run("hangs", timeout=0.5)
    assert late.timed_out and not late.is_good and late.killed_message() is None
    assert ticks

"""Tests that the culprit of a hang is found from heartbeats alone, without processes."""

from dataclasses import replace

import pytest

from pentatron.parallel.rank_status import PendingCall
from pentatron.supervise.hang import Hang, HangDetector, HangLimits
from pentatron.supervise.heartbeat import Heartbeat

EVERYONE = "all ranks"
USUAL = HangLimits(20.0, 600.0)


def beat(
    rank: int, calls: int = 50, waits: bool = True, what: str = "all-reduce", step: int = 7
) -> Heartbeat:
    call = PendingCall(what, EVERYONE, calls, 2) if waits else None
    return Heartbeat(
        rank=rank,
        pid=1000 + rank,
        host="a",
        pulse=1,
        step=step,
        phase="step",
        calls=calls,
        counts={EVERYONE: calls},
        waits_in=call,
        opened=True,
        first_step=2.0,
        longest_step=1.0,
    )


def watch_for(seconds: float, beats: list[Heartbeat], limits: HangLimits = USUAL) -> Hang | None:
    """Repeats the heartbeats once a second with new pulses; returns the hang, if any."""
    watch, ranks = HangDetector(limits), [b.rank for b in beats]
    for now in range(int(seconds) + 2):
        hang = watch.check([replace(b, pulse=now) for b in beats], float(now), ranks)
        if hang is not None:
            assert now >= seconds
            return hang
    return None


def test_a_rank_that_computes_while_the_others_wait() -> None:
    hang = watch_for(20, [beat(0), beat(1), beat(2, 49, waits=False)])
    assert hang is not None and hang.culprits == [2]
    assert hang.sentence({}, 3) == (
        "after step 7 rank 2 of 3 hangs: for 21 seconds it computes in step 8, and ranks 0, 1 wait in the all-reduce #50 of all ranks "
        "(2 elements)"
    )
    assert watch_for(18, [beat(0), beat(2, 49, waits=False)]) is None, "not yet"


def test_a_rank_that_left_a_collective_out() -> None:
    hang = watch_for(20, [beat(0), beat(1, 49), beat(2)])
    assert hang is not None and hang.culprits == [1], "it has begun fewer than the others"
    hang = watch_for(20, [beat(0), beat(1, what="broadcast"), beat(2)])
    assert hang is not None and hang.culprits == [1], "as many, but another one"
    hang = watch_for(20, [beat(0), beat(1, what="broadcast", step=8)])
    assert hang is not None and hang.culprits == [1], "of two, who has come further"
    assert "rank 1 of 2 waits in a different collective than the other ranks" in hang.sentence({}, 2)


def test_hang_without_evidence_names_no_culprit() -> None:
    hang = watch_for(20, [beat(0, what="broadcast"), beat(1)])
    assert hang is not None and hang.culprits == []
    assert "no single rank is the cause: rank 0 waits in the broadcast #50" in hang.sentence({}, 2)


def test_rank_without_heartbeat_is_a_hang_in_any_phase() -> None:
    watch, silent = HangDetector(USUAL), replace(beat(1, waits=False), phase="saving")
    looks = [watch.check([replace(beat(0, 50 + n), pulse=n), silent], float(n), [0, 1]) for n in range(23)]
    assert looks[20] is None
    hang = looks[-1]
    assert hang is not None and hang.culprits == [1]
    assert "rank 1 of 2 is frozen (stopped): no heartbeat for 22 seconds" in hang.sentence({1: "stopped"}, 2)


def test_a_long_load_may_hold_the_interpreter() -> None:
    loading = replace(beat(0), phase="building the model")
    assert HangLimits(None, 600.0).silence_timeout(loading) == 5 * HangLimits(None, 600.0).silence_timeout(
        beat(0)
    )
    assert HangLimits(20.0, 600.0).silence_timeout(loading) == 20, "unless the user says how long"
    compiling = replace(beat(0), first_step=0.0)
    assert HangLimits(None, 600.0).silence_timeout(compiling) == HangLimits(None, 600.0).silence_timeout(
        loading
    )


@pytest.mark.parametrize(
    "change",
    [{"phase": "saving"}, {"phase": "evaluating"}, {"phase": "building the model"}, {"first_step": 0.0}],
)
def test_long_phases_are_no_hang(change: dict[str, object]) -> None:
    """Saves, evaluations, starts and the first step, which compiles, end only at the collective timeout."""
    beats = [beat(0), replace(beat(1, waits=False), **change)]
    assert watch_for(300, beats) is None
    assert watch_for(100, beats, HangLimits(20.0, 100.0)) is not None


def test_steps_that_take_long_are_given_long() -> None:
    slow = [replace(beat(rank, waits=False), longest_step=40.0) for rank in (0, 1)]
    assert watch_for(300, slow, HangLimits(None, 600.0)) is None, "ten times the longest"
    assert watch_for(61, [beat(0), beat(1, waits=False)], HangLimits(None, 600.0)) is not None, (
        "a minute at least"
    )
    compiled = [replace(beat(rank, waits=False), first_step=100.0) for rank in (0, 1)]
    assert watch_for(190, compiled, HangLimits(None, 600.0)) is None, (
        "a shape that comes late is compiled too"
    )
    assert watch_for(201, compiled, HangLimits(None, 600.0)) is not None
    assert watch_for(300, [beat(0), beat(1, waits=False)], HangLimits(0.0, 100.0)) is None, "0 is never"


def test_ranks_that_have_ended_and_a_launcher_that_slept_are_no_hang() -> None:
    watch = HangDetector(USUAL)
    for now in range(40):
        # Rank 1 has ended; rank 0 still writes its results.
        own = [replace(beat(0, 50 + now), pulse=now), *([beat(1)] if now < 2 else [])]
        assert watch.check(own, float(now), [0, 1] if now < 2 else [0]) is None
    assert watch.check([beat(0)], 1000.0, [0]) is None, "the launcher itself was suspended"

"""Split-backward schedules are sound, within the memory of their papers, and almost without bubbles."""

import pytest

from pentatron.layout import schedules
from pentatron.layout.actions import Kind
from pentatron.layout.check import ScheduleProperties, check
from pentatron.layout.schedules import (
    FOLDED,
    Computation,
    forward_schedule,
    greedy_orders,
    group_sizes,
    looped_placement,
    placement_for,
    schedule_problem,
    training_schedule,
    v_placement,
)

RANKS = range(1, 9)
MICRO_BATCHES = (*range(1, 13), 16, 17, 24)


def alive_by_formula(kind: str, ranks: int, virtual: int, micro_batches: int) -> int:
    """Returns the most micro-batches alive at once, which is equal on all ranks."""
    if kind == "zero-bubble" and virtual == 1:
        most = ranks
    elif kind == "zero-bubble":
        most = 2 * (ranks - 1) + (virtual - 1) * group_sizes(micro_batches, ranks)[0] + 1
    else:
        most = 2 * ranks + (kind == "dualpipev")
    return min(virtual * micro_batches, most)


def assert_promises(
    checked: ScheduleProperties, kind: str, ranks: int, virtual: int, micro_batches: int
) -> None:
    assert checked.in_flight == (alive_by_formula(kind, ranks, virtual, micro_batches),) * ranks
    if micro_batches < ranks:
        return
    # The last rank starts `ranks - 1` later; no rank idles otherwise.
    shortest = 3 * virtual * micro_batches + ranks - 1
    # The greedy order is not always optimal: with many ranks it loses a few time steps.
    slack = max(0, ranks - 4) if kind == "zbv" else 0
    assert shortest <= checked.time <= shortest + slack


CASES = [("zero-bubble", 1), ("zero-bubble", 2), ("zero-bubble", 3), ("zbv", 2), ("dualpipev", 2)]


@pytest.mark.parametrize(("kind", "virtual"), CASES)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_schedule_is_sound_and_keeps_its_promises(kind: str, virtual: int, ranks: int) -> None:
    for micro_batches in MICRO_BATCHES:
        if schedule_problem(kind, ranks, virtual, micro_batches) is None:
            checked = check(training_schedule(kind, ranks, virtual, micro_batches))
            assert_promises(checked, kind, ranks, virtual, micro_batches)


def test_no_more_memory_than_the_schedules_they_come_from_and_less_waiting() -> None:
    for ranks in (2, 4, 8):
        whole, split = (check(training_schedule(kind, ranks, 1, 16)) for kind in ("1f1b", "zero-bubble"))
        assert max(split.in_flight) == max(whole.in_flight)
        assert (whole.time - 3 * 16, split.time - 3 * 16) == (3 * (ranks - 1), ranks - 1)
        # ZB-V has stages of half the size, so twice as many micro-batches take the same memory.
        assert max(check(training_schedule("zbv", ranks, 2, 16)).in_flight) == 2 * max(whole.in_flight)
        whole, split = (
            check(training_schedule(kind, ranks, 2, 16)) for kind in ("interleaved", "zero-bubble")
        )
        assert max(split.in_flight) == max(whole.in_flight) and split.time < whole.time


def test_groups_reach_the_zero_bubble_schedule() -> None:
    """Two ranks, two stages each: 2·(2 − 1) + (2 − 1)·4 + 1 with groups of four."""
    assert check(training_schedule("zero-bubble", 2, 2, 8, 4)).in_flight == (7, 7)
    assert check(training_schedule("zero-bubble", 2, 2, 8)).in_flight == (5, 5)


def test_v_placement() -> None:
    assert v_placement(1).rank_of == (0, 0)
    assert v_placement(3).rank_of == (0, 1, 2, 2, 1, 0)
    assert v_placement(3).stages_of(1) == (1, 4)
    for kind in schedules.KINDS:
        folded = placement_for(kind, 2, 2).rank_of == (0, 1, 1, 0)
        assert folded == (kind in FOLDED)
    assert placement_for("zero-bubble", 3, 1) == looped_placement(3, 1)


@pytest.mark.parametrize("ranks", RANKS)
def test_an_evaluation_of_a_folded_pipeline_is_sound(ranks: int) -> None:
    for micro_batches in (1, 3, 8, 13):
        assert check(forward_schedule(v_placement(ranks), micro_batches)).in_flight == (0,) * ranks


def computations(kind: str, ranks: int, virtual: int, micro_batches: int, rank: int) -> str:
    actions = training_schedule(kind, ranks, virtual, micro_batches).actions[rank]
    return " ".join(str(a) for a in actions if a.peer is None)


def test_written_down_by_hand() -> None:
    assert computations("zero-bubble", 2, 1, 3, 1) == "F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2 R1"
    assert computations("zbv", 2, 2, 1, 1) == "F1.0 F2.0 I2.0 I1.0 W2.0 R2 W1.0 R1"
    # Forwards fill the pipeline, then forwards alternate with backwards of the other stage, then it drains.
    assert computations("dualpipev", 2, 2, 4, 0) == (
        "F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 F0.3 B3.1 F3.2 B0.0 B3.2 F3.3 B0.1 B3.3 R3 I0.2 W0.2 I0.3 W0.3 R0"
    )


def test_the_turn_sends_nothing() -> None:
    last = training_schedule("zbv", 2, 2, 3).actions[1]
    assert not any(a.kind is Kind.SEND_ACTIVATION and a.stage == 1 for a in last)
    assert not any(a.kind is Kind.RECEIVE_GRADIENT and a.stage == 2 for a in last)
    assert {a.peer for a in last if a.peer is not None} == {0}


def test_new_micro_batches_first_would_never_end() -> None:
    """Control: if new micro-batches go first, they fill rank 0 and no backward can run."""

    def lanes(rank: int, downward_first: bool) -> list[list[Computation]]:
        down, back = v_placement(4).stages_of(rank)
        forwards = (down, back) if downward_first else (back, down)
        wishes = [(Kind.INPUT, down), (Kind.INPUT, back), *((Kind.FORWARD, stage) for stage in forwards)]
        return [[(kind, stage, m) for m in range(12)] for kind, stage in wishes]

    greedy_orders(v_placement(4), [lanes(rank, False) for rank in range(4)], 8)
    with pytest.raises(AssertionError, match="ranks wait for each other"):
        greedy_orders(v_placement(4), [lanes(rank, True) for rank in range(4)], 8)


def test_many_ranks() -> None:
    for kind, virtual in CASES:
        check(training_schedule(kind, 16, virtual, 40))


def test_a_limit_that_is_not_kept_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: with room for one more micro-batch the memory bound is broken."""
    monkeypatch.setattr(
        schedules, "greedy_orders", lambda p, lanes, limit: greedy_orders(p, lanes, limit + 1)
    )
    for kind, virtual in (("zero-bubble", 1), ("zbv", 2)):
        with pytest.raises(AssertionError):
            checked = check(training_schedule.__wrapped__(kind, 4, virtual, 8))
            assert_promises(checked, kind, 4, virtual, 8)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("zbv", 2, 1, 4), "zbv runs 2 stages per rank, not 1; use 2, or another schedule"),
        (("dualpipev", 2, 3, 4), "dualpipev runs 2 stages per rank, not 3; use 2, or another schedule"),
        (("dualpipev", 4, 2, 7),
         "dualpipev needs 2 × 4 (pipeline ranks) = 8 or more micro-batches, not 7; use 8 or more, or the schedule zbv"),
        (("zero-bubble", 4, 1, 8, 4),
         "zero-bubble does not group micro-batches, so a group of 4 means nothing; leave it out"),
        (("zero-bubble", 4, 2, 8, 3),
         "a group of 3 micro-batches does not fit 8 micro-batches; use a number from 4 (pipeline ranks) to 8 "
         "(micro-batches)"),
        (("zbv", 4, 2, 8, 4), "zbv does not group micro-batches, so a group of 4 means nothing; leave it out"),
    ],
)  # fmt: skip
def test_schedules_that_do_not_exist(words: tuple[str, int, int, int], sentence: str) -> None:
    assert schedule_problem(*words) == sentence
    with pytest.raises(ValueError, match="^" + sentence[:10]):
        training_schedule(*words)

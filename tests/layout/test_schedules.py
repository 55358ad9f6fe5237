"""Every schedule of every size is sound, keeps its memory bound, and idles no longer than necessary."""

import pytest

from pentatron.layout import schedules
from pentatron.layout.actions import RECEIVES, Action, Kind, Placement
from pentatron.layout.check import ScheduleError, ScheduleProperties, check
from pentatron.layout.schedules import (
    FOLDED,
    KINDS,
    add_communication,
    forward_schedule,
    group_sizes,
    looped_placement,
    schedule_problem,
    training_schedule,
)
from tests.layout.one_ahead import one_ahead

RANKS = range(1, 9)
MICRO_BATCHES = range(1, 25)


def kinds_for(virtual: int) -> tuple[str, ...]:
    return ("gpipe", "1f1b") if virtual == 1 else ("interleaved",)


def written(actions: tuple[Action, ...]) -> str:
    return " ".join(map(str, actions))


def assert_promises(
    checked: ScheduleProperties, kind: str, ranks: int, virtual: int, micro_batches: int, group: int | None
) -> None:
    largest = -(-micro_batches // max(1, micro_batches // (group or ranks)))
    in_flight = {
        "gpipe": [micro_batches] * ranks,
        "1f1b": [min(micro_batches, ranks - rank) for rank in range(ranks)],
        "interleaved": [
            min(micro_batches * virtual, 2 * (ranks - rank - 1) + (virtual - 1) * largest + 1)
            for rank in range(ranks)
        ],
    }[kind]
    assert list(checked.in_flight) == in_flight
    if micro_batches >= ranks:
        # The pipeline fills and drains once; no rank idles in between.
        assert checked.time == 3 * (virtual * micro_batches + ranks - 1)
        assert checked.bubble == pytest.approx((ranks - 1) / (virtual * micro_batches + ranks - 1))


@pytest.mark.parametrize("virtual", range(1, 5))
@pytest.mark.parametrize("ranks", RANKS)
def test_every_training_schedule_is_sound(ranks: int, virtual: int) -> None:
    for kind in kinds_for(virtual):
        for micro_batches in MICRO_BATCHES:
            checked = check(training_schedule(kind, ranks, virtual, micro_batches))
            assert_promises(checked, kind, ranks, virtual, micro_batches, None)


@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_every_group_that_is_allowed_is_sound(ranks: int) -> None:
    for virtual in (2, 3):
        for micro_batches in (1, ranks, ranks + 1, 2 * ranks + 3):
            for group in range(1, micro_batches + 2):
                if schedule_problem("interleaved", ranks, virtual, micro_batches, group) is None:
                    checked = check(training_schedule("interleaved", ranks, virtual, micro_batches, group))
                    assert_promises(checked, "interleaved", ranks, virtual, micro_batches, group)


@pytest.mark.parametrize("virtual", range(1, 5))
@pytest.mark.parametrize("ranks", RANKS)
def test_every_evaluation_is_sound_and_keeps_nothing(ranks: int, virtual: int) -> None:
    for micro_batches in (1, 3, 8, 13):
        checked = check(forward_schedule(looped_placement(ranks, virtual), micro_batches))
        assert checked.in_flight == (0,) * ranks
        if micro_batches >= ranks:
            assert checked.time == virtual * micro_batches + ranks - 1


@pytest.mark.parametrize("rank_of", [(0, 1, 1, 0), (0, 1, 2, 2, 1, 0), (0, 0, 1, 1), (1, 0), (0, 2, 1)])
def test_an_evaluation_is_sound_wherever_the_stages_sit(rank_of: tuple[int, ...]) -> None:
    for micro_batches in (1, 2, 5):
        check(forward_schedule(Placement(rank_of), micro_batches))


# Written down by hand.
def test_one_stage() -> None:
    for kind in ("1f1b", "gpipe"):
        assert training_schedule(kind, 1, 1, 1).actions == training_schedule("1f1b", 1, 1, 1).actions
    assert written(training_schedule("1f1b", 1, 1, 3).actions[0]) == "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 R0"
    assert written(forward_schedule(looped_placement(1, 1), 2).actions[0]) == "F0.0 F0.1"


def test_two_ranks() -> None:
    first, last = training_schedule("1f1b", 2, 1, 3).actions
    assert written(first) == "F0.0 SF0.0 F0.1 SF0.1 RB1.0 B0.0 RB1.1 F0.2 SF0.2 B0.1 RB1.2 B0.2 R0"
    assert written(last) == "RF0.0 RF0.1 F1.0 B1.0 SB1.0 F1.1 B1.1 SB1.1 RF0.2 F1.2 B1.2 SB1.2 R1"
    assert {a.peer for a in first if a.peer is not None} == {1}
    assert {a.peer for a in last if a.peer is not None} == {0}
    first, last = training_schedule("gpipe", 2, 1, 2).actions
    assert written(first) == "F0.0 SF0.0 F0.1 SF0.1 RB1.0 RB1.1 B0.0 B0.1 R0"
    assert written(last) == "RF0.0 RF0.1 F1.0 F1.1 B1.0 SB1.0 B1.1 SB1.1 R1"


def computations(actions: tuple[Action, ...]) -> str:
    return " ".join(str(a) for a in actions if a.kind in (Kind.FORWARD, Kind.BACKWARD))


def test_the_first_rank_of_an_interleaved_pipeline() -> None:
    """Two ranks, two stages each, four micro-batches: 2·(2 − 0 − 1) + (2 − 1)·2 = 4 warm-up forwards."""
    order = computations(training_schedule("interleaved", 2, 2, 4).actions[0])
    assert order == ("F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3")


def test_stages_of_one_rank_send_nothing() -> None:
    alone = training_schedule("interleaved", 1, 3, 4).actions[0]
    assert {a.kind for a in alone} == {Kind.FORWARD, Kind.BACKWARD, Kind.REDUCE}
    neighbours = add_communication(
        Placement((0, 0, 1)),
        1,
        [
            [(Kind.FORWARD, 0, 0), (Kind.FORWARD, 1, 0), (Kind.BACKWARD, 1, 0), (Kind.BACKWARD, 0, 0)],
            [(Kind.FORWARD, 2, 0), (Kind.BACKWARD, 2, 0)],
        ],
    )
    assert written(neighbours.actions[0]) == "F0.0 F1.0 SF1.0 RB2.0 B1.0 R1 B0.0 R0"
    assert written(neighbours.actions[1]) == "RF1.0 F2.0 B2.0 SB2.0 R2"
    check(neighbours)


def test_every_stage_is_reduced_right_after_its_last_backward() -> None:
    for kind, ranks, virtual in (("gpipe", 3, 1), ("1f1b", 4, 1), ("interleaved", 3, 2)):
        for actions in training_schedule(kind, ranks, virtual, 5).actions:
            for i, action in enumerate(actions):
                if action.kind is Kind.REDUCE:
                    before = [a for a in actions[:i] if a.kind is not Kind.SEND_GRADIENT]
                    assert before[-1].kind is Kind.BACKWARD and before[-1].stage == action.stage


def test_most_receives_are_posted_ahead_and_sends_follow_at_once() -> None:
    """Most messages overlap at least one computation of their receiver.

    The others are needed as soon as the computation that produces them ends.
    """
    for actions in training_schedule("interleaved", 4, 2, 32).actions:
        computed, ahead = 0, 0
        posted: dict[tuple[Kind, int, int], int] = {}
        for i, action in enumerate(actions):
            if action.kind in RECEIVES:
                posted[action.kind, action.stage, action.micro_batch] = computed
            elif action.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT):
                before = actions[i - 1]
                assert (before.stage, before.micro_batch) == (action.stage, action.micro_batch)
            elif action.kind in (Kind.FORWARD, Kind.BACKWARD):
                forward = action.kind is Kind.FORWARD
                kind = Kind.RECEIVE_ACTIVATION if forward else Kind.RECEIVE_GRADIENT
                message = (kind, action.stage + (-1 if forward else 1), action.micro_batch)
                ahead += posted.get(message, computed) < computed
                computed += 1
        assert ahead > 0.6 * len(posted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_receive_whose_sender_waits_for_this_rank_is_seen(kind: str) -> None:
    """Control: with every receive one computation early, a launch that synchronises the device deadlocks."""
    schedule = training_schedule(kind, 4, 2 if kind in ("interleaved", *FOLDED) else 1, 8)
    check(schedule)
    if kind == "gpipe":
        # With gpipe all forwards precede the backwards of the peers, so an early receive does harm only
        # before the first backward.
        schedule = training_schedule(kind, 4, 1, 1)
    with pytest.raises(ScheduleError, match="deadlocks if its launch synchronises the device"):
        check(one_ahead(schedule))


@pytest.mark.parametrize("kind", ["interleaved", "zero-bubble"])
@pytest.mark.parametrize(("micro_batches", "group"), [(16, 16), (16, 6), (17, 5)])
def test_messages_of_large_groups_are_received_early(kind: str, micro_batches: int, group: int) -> None:
    """Receives of large groups are posted earlier than one computation ahead.

    Otherwise sends without a posted receive would block each other on a GPU with one queue.
    """
    schedule = training_schedule(kind, 3, 2, micro_batches, group)
    check(schedule)
    with pytest.raises(ScheduleError, match="deadlocks where a GPU has one queue for all its work"):
        check(one_ahead(schedule))


@pytest.mark.parametrize("micro_batches", range(1, 30))
@pytest.mark.parametrize("group", range(1, 9))
def test_groups(micro_batches: int, group: int) -> None:
    sizes = group_sizes(micro_batches, group)
    assert sum(sizes) == micro_batches and sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert min(sizes) >= min(group, micro_batches)
    if micro_batches % group == 0:
        assert sizes == [group] * (micro_batches // group)


def test_a_small_last_group_would_mix_up_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: with groups of four and one on four ranks, messages are not sent in the order of their use."""
    monkeypatch.setattr(schedules, "group_sizes", lambda micro_batches, group: [group, micro_batches - group])
    with pytest.raises(ScheduleError, match="which rank 1 sends first"):
        check(training_schedule.__wrapped__("interleaved", 4, 3, 5))


@pytest.mark.parametrize("kind", ["1f1b", "interleaved"])
def test_too_few_forwards_ahead_would_be_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without warm-up forwards the ranks deadlock, or idle much longer."""
    monkeypatch.setattr(schedules, "warmup_forwards", lambda *sizes: 0)
    virtual = 1 if kind == "1f1b" else 2
    hasty = training_schedule.__wrapped__(kind, 4, virtual, 8)
    with pytest.raises((ScheduleError, AssertionError)):
        assert_promises(check(hasty), kind, 4, virtual, 8, None)


def test_all_schedules_run_the_backwards_of_a_stage_in_the_same_order() -> None:
    """All schedules accumulate gradients in the same order, and so to the same bits."""
    for kind in KINDS:
        for virtual in (1, 2):
            if schedule_problem(kind, 3, virtual, 7) is None:
                for actions in training_schedule(kind, 3, virtual, 7).actions:
                    # A whole backward, or both of its halves, computes gradients.
                    for kinds in ((Kind.BACKWARD, Kind.INPUT), (Kind.BACKWARD, Kind.WEIGHT)):
                        for stage in {a.stage for a in actions if a.kind in kinds}:
                            order = [a.micro_batch for a in actions if a.kind in kinds and a.stage == stage]
                            assert order == list(range(7)), f"{kind} {kinds} of stage {stage}"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("zigzag", 2, 1, 4), "there is no pipeline schedule zigzag; use 1f1b, gpipe, interleaved, "
         "zero-bubble, zbv or dualpipev"),
        (("1f1b", 2, 1, 0), "a schedule needs 1 or more ranks, virtual stages and micro-batches, not 2, 1 and 0"),
        (("gpipe", 2, 2, 4),
         "gpipe runs one stage per rank, not 2; use the schedule interleaved, or 1 stage per rank"),
        (("1f1b", 2, 1, 4, 2), "1f1b does not group micro-batches, so a group of 2 means nothing; leave it out"),
        (("interleaved", 2, 1, 4),
         "interleaved needs 2 or more virtual stages per rank, not 1; use more, or the schedule 1f1b"),
        (("interleaved", 4, 2, 8, 3),
         "a group of 3 micro-batches does not fit 8 micro-batches; use a number from 4 (pipeline ranks) to 8 "
         "(micro-batches)"),
        (("interleaved", 4, 2, 8, 9),
         "a group of 9 micro-batches does not fit 8 micro-batches; use a number from 4 (pipeline ranks) to 8 "
         "(micro-batches)"),
        (("interleaved", 4, 2, 3, 2),
         "a group of 2 micro-batches does not fit 3 micro-batches; use 3, all of them, as there are no more than the 4 "
         "pipeline ranks"),
    ],
)  # fmt: skip
def test_schedules_that_do_not_exist(words: tuple[str, int, int, int], sentence: str) -> None:
    assert schedule_problem(*words) == sentence
    with pytest.raises(ValueError) as error:
        training_schedule(*words)
    assert str(error.value) == sentence

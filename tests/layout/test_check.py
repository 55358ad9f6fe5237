"""The checker accepts sound schedules and refuses others, naming the rank and the action.

test_schedules.py has more sound schedules.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from pentatron.layout.actions import Action, Kind, Placement, Schedule
from pentatron.layout.check import ScheduleError, check
from pentatron.layout.schedules import forward_schedule, looped_placement, training_schedule

Lists = list[list[Action]]


def action(text: str, peer: int | None = None) -> Action:
    """Parses an action: `F0.1` is the forward of stage 0, micro-batch 1."""
    kind = text.rstrip("0123456789.")
    stage, _, micro_batch = text.removeprefix(kind).partition(".")
    return Action(Kind(kind), int(stage), int(micro_batch or 0), peer)


def place(actions: list[Action], text: str) -> int:
    return next(i for i, a in enumerate(actions) if str(a) == text)


def drop(rank: int, text: str) -> Callable[[Lists], None]:
    return lambda lists: lists[rank].pop(place(lists[rank], text)) and None


def twice(rank: int, text: str) -> Callable[[Lists], None]:
    return lambda lists: lists[rank].append(lists[rank][place(lists[rank], text)])


def swap(rank: int, one: str, other: str) -> Callable[[Lists], None]:
    def change(lists: Lists) -> None:
        i, j = place(lists[rank], one), place(lists[rank], other)
        lists[rank][i], lists[rank][j] = lists[rank][j], lists[rank][i]

    return change


def move(rank: int, text: str, to: int) -> Callable[[Lists], None]:
    return lambda lists: lists[rank].insert(to, lists[rank].pop(place(lists[rank], text)))


def other_peer(rank: int, text: str, peer: int) -> Callable[[Lists], None]:
    def change(lists: Lists) -> None:
        i = place(lists[rank], text)
        lists[rank][i] = replace(lists[rank][i], peer=peer)

    return change


def add(rank: int, added: Action) -> Callable[[Lists], None]:
    return lambda lists: lists[rank].append(added)


def to_other_rank(text: str, source: int, target: int) -> Callable[[Lists], None]:
    return lambda lists: lists[target].append(lists[source].pop(place(lists[source], text)))


def send_later(lists: Lists) -> None:
    """Sends the activation of micro-batch 0 after that of micro-batch 1; both are computed by then."""
    late = lists[3].pop(place(lists[3], "SF3.0"))
    lists[3].insert(place(lists[3], "SF3.1") + 1, late)


def swap_both_receives(lists: Lists) -> None:
    """Swaps two receives and the forwards that need them, so that each list is in order by itself."""
    swap(1, "RF0.0", "RF0.1")(lists)
    swap(1, "F1.0", "F1.1")(lists)


# Name of a sound schedule, how it is broken, part of the error message.
MUTATIONS: dict[str, tuple[str, Callable[[Lists], None], str]] = {
    "a forward is dropped": (
        "1f1b", drop(1, "F1.2"), "rank 1: the forward of stage 1, micro-batch 2 (F1.2) is missing"),
    "a backward is dropped": (
        "1f1b", drop(0, "B0.3"), "rank 0: the backward of stage 0, micro-batch 3 (B0.3) is missing"),
    "a send is dropped": (
        "1f1b", drop(0, "SF0.1"),
        "rank 0: sending the activation of stage 0, micro-batch 1 to rank 1 (SF0.1) is missing"),
    "a receive is dropped": (
        "1f1b", drop(0, "RB1.1"),
        "rank 0: receiving the gradient of stage 1, micro-batch 1 from rank 1 (RB1.1) is missing"),
    "a reduction is dropped": ("1f1b", drop(1, "R1"), "rank 1: the reduction of stage 1 (R1) is missing"),
    "a forward runs twice": (
        "1f1b", twice(0, "F0.0"), "rank 0: the forward of stage 0, micro-batch 0 (F0.0) appears 2 times"),
    "a message is sent twice": (
        "1f1b", twice(1, "SB1.0"),
        "rank 1: sending the gradient of stage 1, micro-batch 0 to rank 0 (SB1.0) appears 2 times"),
    "a stage is reduced twice": ("gpipe", twice(0, "R0"), "rank 0: the reduction of stage 0 (R0) appears 2 times"),
    "a message goes to the wrong rank": (
        "three", other_peer(0, "SF0.0", 2),
        "rank 0: sending the activation of stage 0, micro-batch 0 to rank 2 (SF0.0) does not belong there"),
    "a message is awaited from the wrong rank": (
        "three", other_peer(2, "RF1.0", 0),
        "rank 2: receiving the activation of stage 1, micro-batch 0 from rank 0 (RF1.0) does not belong there"),
    "a stage runs on another rank": (
        "three", to_other_rank("F1.0", 1, 2),
        "rank 1: the forward of stage 1, micro-batch 0 (F1.0) is missing"),
    "a micro-batch that is not there": (
        "1f1b", add(0, action("F0.9")), "rank 0: the forward of stage 0, micro-batch 9 (F0.9) does not belong there"),
    "the first stage sends a gradient": (
        "1f1b", add(0, action("SB0.0", 1)),
        "rank 0: sending the gradient of stage 0, micro-batch 0 to rank 1 (SB0.0) does not belong there"),
    "a message within a rank": (
        "interleaved on one rank", add(0, action("SF0.0", 0)),
        "rank 0: sending the activation of stage 0, micro-batch 0 to rank 0 (SF0.0) does not belong there"),
    "backward before forward": (
        "1f1b", swap(1, "F1.0", "B1.0"),
        "rank 1: the backward of stage 1, micro-batch 0 (B1.0) comes before the forward of stage 1, micro-batch 0 (F1.0)"),
    "forward before its input is received": (
        "1f1b", swap(1, "RF0.0", "F1.0"),
        "rank 1: the forward of stage 1, micro-batch 0 (F1.0) comes before receiving the activation of stage 0"),
    "backward before its gradient is received": (
        "1f1b", move(0, "RB1.3", 999),
        "rank 0: the backward of stage 0, micro-batch 3 (B0.3) comes before receiving the gradient of stage 1"),
    "sent before it is computed": (
        "1f1b", move(0, "SF0.2", 0),
        "rank 0: sending the activation of stage 0, micro-batch 2 to rank 1 (SF0.2) comes before the forward of stage 0"),
    "local stages in the wrong order": (
        "interleaved on one rank", swap(0, "F0.1", "F1.1"),
        "rank 0: the forward of stage 1, micro-batch 1 (F1.1) comes before the forward of stage 0, micro-batch 1 (F0.1)"),
    "reduced too early": (
        "1f1b", move(0, "R0", 5), "rank 0: the reduction of stage 0 (R0) comes before the backward of stage 0"),
    "received in another order than sent": (
        "gpipe", swap(1, "RF0.0", "RF0.1"),
        "rank 1: receiving the activation of stage 0, micro-batch 1 from rank 0 (RF0.1) would get the activation of "
        "stage 0, micro-batch 0, which rank 0 sends first"),
    "received and computed in another order than sent": (
        "gpipe", swap_both_receives,
        "rank 1: receiving the activation of stage 0, micro-batch 1 from rank 0 (RF0.1) would get the activation of "
        "stage 0, micro-batch 0, which rank 0 sends first"),
    "sent in another order than received": (
        "interleaved", send_later, "which rank 3 sends first"),
    "an input gradient is dropped": (
        "zero-bubble", drop(1, "I1.2"), "rank 1: the input gradient of stage 1, micro-batch 2 (I1.2) is missing"),
    "a weight gradient is dropped": (
        "zero-bubble", drop(0, "W0.3"), "rank 0: the weight gradient of stage 0, micro-batch 3 (W0.3) is missing"),
    "a weight gradient runs twice": (
        "zbv", twice(0, "W3.1"), "rank 0: the weight gradient of stage 3, micro-batch 1 (W3.1) appears 2 times"),
    "a whole backward beside its halves": (
        "zero-bubble", add(0, action("B0.1")),
        "rank 0: the backward of stage 0, micro-batch 1 (B0.1) does not belong there"),
    "half of a whole backward": (
        "1f1b", add(0, action("W0.1")), "rank 0: the backward of stage 0, micro-batch 1 (B0.1) does not belong there"),
    "weights before the input": (
        "zero-bubble", swap(1, "I1.0", "W1.0"),
        "rank 1: the weight gradient of stage 1, micro-batch 0 (W1.0) comes before the input gradient of stage 1, "
        "micro-batch 0 (I1.0)"),
    "reduced before the last weight gradient": (
        "zero-bubble", swap(0, "W0.3", "R0"),
        "rank 0: the reduction of stage 0 (R0) comes before the weight gradient of stage 0, micro-batch 3 (W0.3)"),
    "sent before the input gradient is computed": (
        "zero-bubble", move(1, "SB1.3", 0),
        "rank 1: sending the gradient of stage 1, micro-batch 3 to rank 0 (SB1.3) comes before the input gradient of"),
    "the turn of a folded pipeline in the wrong order": (
        "zbv", swap(1, "F1.0", "F2.0"),
        "rank 1: the forward of stage 2, micro-batch 0 (F2.0) comes before the forward of stage 1, micro-batch 0 (F1.0)"),
    "a message at the turn": (
        "zbv", add(1, action("SF1.0", 1)),
        "rank 1: sending the activation of stage 1, micro-batch 0 to rank 1 (SF1.0) does not belong there"),
    "an evaluation without one forward": (
        "evaluation", drop(1, "F1.1"), "rank 1: the forward of stage 1, micro-batch 1 (F1.1) is missing"),
    "an evaluation that reduces": (
        "evaluation", add(0, action("R0")), "rank 0: the backward of stage 0, micro-batch 0 (B0.0) is missing"),
}  # fmt: skip

SOUND: dict[str, Schedule] = {
    "1f1b": training_schedule("1f1b", 2, 1, 4),
    "gpipe": training_schedule("gpipe", 2, 1, 4),
    "three": training_schedule("1f1b", 3, 1, 4),
    "interleaved": training_schedule("interleaved", 4, 2, 8),
    "interleaved on one rank": training_schedule("interleaved", 1, 2, 4),
    "zero-bubble": training_schedule("zero-bubble", 2, 1, 4),
    "zbv": training_schedule("zbv", 2, 2, 4),
    "dualpipev": training_schedule("dualpipev", 2, 2, 5),
    "evaluation": forward_schedule(looped_placement(2, 1), 3),
}


def changed(schedule: Schedule, change: Callable[[Lists], None]) -> Schedule:
    lists = [list(actions) for actions in schedule.actions]
    change(lists)
    return replace(schedule, actions=tuple(map(tuple, lists)))


@pytest.mark.parametrize("name", SOUND)
def test_unchanged_schedules_are_accepted(name: str) -> None:
    check(SOUND[name])
    check(changed(SOUND[name], lambda lists: None))


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_refused(name: str) -> None:
    schedule, change, complaint = MUTATIONS[name]
    with pytest.raises(ScheduleError) as error:
        check(changed(SOUND[schedule], change))
    assert complaint in str(error.value)


def test_ranks_that_wait_for_each_other() -> None:
    """Each list is in order by itself, but together the ranks deadlock.

    Rank 0 waits for a gradient that rank 1 computes after a forward whose activation rank 0 has not sent yet.
    """
    placement = Placement((0, 1))
    texts = (
        ["F0.0", "SF0.0 1", "RB1.0 1", "B0.0", "F0.1", "SF0.1 1", "RB1.1 1", "B0.1", "R0"],
        ["RF0.0 0", "RF0.1 0", "F1.0", "F1.1", "B1.0", "SB1.0 0", "B1.1", "SB1.1 0", "R1"],
    )
    lists = tuple(
        tuple(
            action(text.split()[0], int(text.split()[1]) if " " in text else None) for text in texts_of_rank
        )
        for texts_of_rank in texts
    )
    with pytest.raises(ScheduleError) as error:
        check(Schedule(placement, 2, lists))
    assert str(error.value) == (
        "rank 0: the backward of stage 0, micro-batch 0 (B0.0) deadlocks as ranks wait for each other in a circle"
    )


def test_a_list_for_every_rank() -> None:
    schedule = training_schedule("1f1b", 2, 1, 2)
    with pytest.raises(ScheduleError, match="1 lists of actions do not fit 2 pipeline ranks"):
        check(replace(schedule, actions=schedule.actions[:1]))


def test_times_of_two_ranks() -> None:
    """Compares with a drawing (F = 1, B = 2): rank 0 `F F . . B B . B B`, rank 1 `. F B B F B B`."""
    checked = check(training_schedule("1f1b", 2, 1, 2))
    first = [(slot.start, slot.end, str(slot.action)) for slot in checked.timeline[0]]
    last = [(slot.start, slot.end, str(slot.action)) for slot in checked.timeline[1]]
    assert first == [(0, 1, "F0.0"), (1, 2, "F0.1"), (4, 6, "B0.0"), (7, 9, "B0.1")]
    assert last == [(1, 2, "F1.0"), (2, 4, "B1.0"), (4, 5, "F1.1"), (5, 7, "B1.1")]
    assert checked.time == 9
    assert checked.bubble == pytest.approx(1 / 3)
    assert checked.in_flight == (2, 1)


def test_times_and_memory_of_halves() -> None:
    """Compares with a drawing (F = I = W = 1): rank 0 `F F . I W I W`, rank 1 `. F I F I W W`."""
    checked = check(training_schedule("zero-bubble", 2, 1, 2))
    first = [(slot.start, slot.end, str(slot.action)) for slot in checked.timeline[0]]
    last = [(slot.start, slot.end, str(slot.action)) for slot in checked.timeline[1]]
    assert first == [
        (0, 1, "F0.0"), (1, 2, "F0.1"), (3, 4, "I0.0"), (4, 5, "W0.0"), (5, 6, "I0.1"), (6, 7, "W0.1"),
    ]  # fmt: skip
    assert last == [
        (1, 2, "F1.0"), (2, 3, "I1.0"), (3, 4, "F1.1"), (4, 5, "I1.1"), (5, 6, "W1.0"), (6, 7, "W1.1"),
    ]  # fmt: skip
    assert (checked.time, checked.in_flight, checked.deferred) == (7, (2, 2), (1, 2))
    assert checked.bubble == pytest.approx(2 / 14)
    assert check(training_schedule("1f1b", 2, 1, 2)).deferred == (0, 0)


def test_nothing_waits_without_a_pipeline() -> None:
    checked = check(training_schedule("1f1b", 1, 1, 4))
    assert (checked.bubble, checked.time, checked.in_flight) == (0, 12, (1,))

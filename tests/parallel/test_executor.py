"""Every schedule computes the losses, gradients and weights of one process, bit for bit."""

from collections import Counter

import pytest
import torch

from pentatron.layout.actions import Kind
from pentatron.layout.schedules import forward_schedule, looped_placement, training_schedule
from pentatron.parallel.world import single_process
from tests.harness import run_distributed
from tests.parallel.planting import plant
from tests.parallel.stage_network import LENGTHS, Found, in_pipeline, one_process, pipeline_world

# Schedule, pipeline ranks, stages on each.
SCHEDULES = [
    ("gpipe", 2, 1),
    ("1f1b", 2, 1),
    ("interleaved", 2, 2),
    ("interleaved", 2, 3),
    ("gpipe", 4, 1),
    ("1f1b", 4, 1),
    ("interleaved", 4, 2),
    ("1f1b", 8, 1),
    ("zero-bubble", 2, 1),
    ("zero-bubble", 2, 3),
    ("zero-bubble", 4, 1),
    ("zbv", 2, 2),
    ("zbv", 4, 2),
]
# Enough micro-batches for DualPipeV on two ranks.
MANY = ((3, 6, 2, 4, 5), (2, 4, 4, 3, 6, 1, 5))


def on_ranks(
    kind: str,
    virtual: int,
    lengths: tuple[tuple[int, ...], ...] = LENGTHS,
    bug: str = "",
    dtype: str = "float32",
    device: str = "cpu",
) -> Found:
    if bug:
        plant(bug)
    world = pipeline_world(torch.device(device))
    ranks = world.pipeline.size
    training = [training_schedule(kind, ranks, virtual, len(now)) for now in lengths]
    evaluation = forward_schedule(training[0].placement, len(lengths[0]))
    return in_pipeline(world, training, evaluation, lengths, getattr(torch, dtype))


def assert_same(found: list[Found], expected: Found) -> None:
    steps = len(expected.losses)
    for step in range(steps):
        assert sum(rank.losses[step] for rank in found) == expected.losses[step], f"loss of step {step}"
        gradients = {n: g for rank in found for n, g in rank.gradients[step].items()}
        assert gradients.keys() == expected.gradients[step].keys()
        for name, gradient in gradients.items():
            assert torch.equal(gradient, expected.gradients[step][name]), f"gradient of {name} in step {step}"
    weights = {n: w for rank in found for n, w in rank.weights.items()}
    assert all(torch.equal(weights[n], w) for n, w in expected.weights.items())
    assert sum(rank.evaluation for rank in found) == pytest.approx(expected.evaluation, rel=1e-12)


def assert_each_once(found: list[Found], stages: int, lengths: tuple[tuple[int, ...], ...] = LENGTHS) -> None:
    """Asserts one forward and one backward per micro-batch and stage, and the calls of the sink."""
    for step, now in enumerate(lengths):
        forwards = Counter(cell for rank in found for cell in rank.forwards[step])
        assert forwards == {(s, m): 1 for s in range(stages) for m in range(len(now))}
        for rank in found:
            for stage in {call[1] for call in rank.calls[step]}:
                calls = [(what, last) for what, s, last in rank.calls[step] if s == stage]
                often = [("begin", False), ("end", False)] * (len(now) - 1)
                assert calls == [*often, ("begin", True), ("end", True), ("reduce", True)]


@pytest.mark.parametrize(("kind", "ranks", "virtual"), SCHEDULES)
def test_every_schedule_computes_what_one_process_does(kind: str, ranks: int, virtual: int) -> None:
    found = run_distributed(on_ranks, ranks, kind=kind, virtual=virtual)
    assert_same(found, one_process(ranks * virtual - 1))
    assert_each_once(found, ranks * virtual)


def test_dualpipev_computes_what_one_process_does() -> None:
    found = run_distributed(on_ranks, 2, kind="dualpipev", virtual=2, lengths=MANY)
    assert_same(found, one_process(3, MANY))
    assert_each_once(found, 4, MANY)


@pytest.mark.parametrize("kind", ["zero-bubble", "zbv"])
def test_halves_on_one_rank(kind: str) -> None:
    found = run_distributed(on_ranks, 1, kind=kind, virtual=2)
    assert_same(found, one_process(1))


@pytest.mark.parametrize("virtual", [1, 3])
def test_one_rank_needs_no_messages(virtual: int) -> None:
    kind = "interleaved" if virtual > 1 else "1f1b"
    training = [training_schedule(kind, 1, virtual, len(now)) for now in LENGTHS]
    assert not any(action.peer is not None for schedule in training for action in schedule.actions[0])
    found = in_pipeline(
        single_process(), training, forward_schedule(looped_placement(1, virtual), len(LENGTHS[0]))
    )
    assert_same([found], one_process(virtual - 1))
    assert_each_once([found], virtual)


@pytest.mark.parametrize(("kind", "virtual"), [("1f1b", 1), ("zbv", 2)])
def test_bfloat16_activations(kind: str, virtual: int) -> None:
    found = run_distributed(on_ranks, 2, kind=kind, virtual=virtual, dtype="bfloat16")
    assert found[0].gradients[0]["0.0.weight"].dtype is torch.bfloat16
    assert_same(found, one_process(2 * virtual - 1, dtype=torch.bfloat16))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_that_share_a_gpu(dtype: str) -> None:
    """The reference runs in a rank too, so that the test process does not open the GPU."""
    (expected,) = run_distributed(alone_on_a_gpu, 1, dtype=dtype)
    assert_same(
        run_distributed(on_ranks, 2, kind="interleaved", virtual=2, dtype=dtype, device="cuda:0"), expected
    )


def alone_on_a_gpu(dtype: str) -> Found:
    return one_process(3, dtype=getattr(torch, dtype), device=torch.device("cuda:0"))


EVEN = ((3, 3, 3, 3),)


@pytest.mark.parametrize(
    ("bug", "kind", "virtual"),
    [
        ("a micro-batch is dropped", "1f1b", 1),
        ("gradients of two micro-batches are swapped", "gpipe", 1),
        ("the gradient of the input is lost", "1f1b", 1),
        ("the loss is taken twice", "1f1b", 1),
        ("a deferred weight gradient is lost", "zero-bubble", 1),
        ("the weight gradient of another micro-batch", "zero-bubble", 1),
        ("the weight gradient of another micro-batch", "zbv", 2),
    ],
)
def test_planted_bugs_change_the_numbers(bug: str, kind: str, virtual: int) -> None:
    expected = one_process(2 * virtual - 1, EVEN)
    assert_same(run_distributed(on_ranks, 2, kind=kind, virtual=virtual, lengths=EVEN), expected)
    with pytest.raises(AssertionError, match=r"loss of|gradient of"):
        assert_same(run_distributed(on_ranks, 2, kind=kind, virtual=virtual, lengths=EVEN, bug=bug), expected)


@pytest.mark.parametrize("bug", ["the gradient of the input is lost", "the hand-over is not detached"])
def test_planted_bugs_in_the_local_hand_over_are_caught(bug: str) -> None:
    """Runs two stages on one forked rank, so that the bug does not stay in the test process."""
    assert_same(run_distributed(on_ranks, 1, kind="interleaved", virtual=2), one_process(1))
    with pytest.raises(Exception, match=r"gradient of|backward through the graph a second time"):
        assert_same(run_distributed(on_ranks, 1, kind="interleaved", virtual=2, bug=bug), one_process(1))


def test_a_wrong_last_flag_is_caught() -> None:
    found = run_distributed(on_ranks, 2, kind="1f1b", virtual=1, bug="the last flag comes early")
    assert_same(found, one_process(1))
    with pytest.raises(AssertionError):
        assert_each_once(found, 2)


def test_schedules_under_test_have_messages_of_all_kinds() -> None:
    actions = training_schedule("interleaved", 2, 2, 5).actions
    assert {action.kind for rank in actions for action in rank} == set(Kind) - {Kind.INPUT, Kind.WEIGHT}
    actions = training_schedule("dualpipev", 2, 2, 5).actions
    assert {action.kind for rank in actions for action in rank} == set(Kind)

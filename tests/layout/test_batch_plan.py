"""Batch-size schedules, against the ramp of the 175B script and Megatron's calculator."""

import random

import pytest

from pentatron.layout.batch import BatchSizeSchedule, constant, linear_ramp, parse_batch_steps

GPT3 = linear_ramp(16, 16, 5859375, 1536)


def walked(plan: BatchSizeSchedule, steps: int) -> list[int]:
    """Returns the samples consumed before each step, computed step by step."""
    found = [0]
    for _ in range(steps):
        found.append(found[-1] + plan.size_at(found[-1]))
    return found


def test_the_ramp_of_the_175b_script() -> None:
    begins = [(phase.first_step, phase.size) for phase in GPT3.phases]
    assert begins[:4] == [(0, 16), (3855, 32), (5783, 48), (7068, 64)]
    assert begins[-1] == (19802, 1536) and [size for _, size in begins] == list(range(16, 1537, 16))
    assert GPT3.samples_after(19802) == 5_859_424
    assert GPT3.samples_after(500_000) == 5_859_424 + (500_000 - 19802) * 1536
    consumed = walked(GPT3, 19803)
    assert [GPT3.size_at(consumed[step]) for step in (3854, 3855, 19801, 19802)] == [16, 32, 1520, 1536]


def test_ramps_are_megatrons() -> None:
    """Compares random ramps with Megatron's calculator.

    In some ramps a step jumps over sizes, or rounded shares would be off by a sample.
    """
    judge = pytest.importorskip("megatron.core.num_microbatches_calculator")
    draw = random.Random(5)
    for _ in range(60):
        start, increment, count = draw.randint(1, 30), draw.randint(1, 20), draw.randint(1, 40)
        full, samples = start + increment * count, draw.randint(1, draw.choice([20, 1000]))
        plan = linear_ramp(start, increment, samples, full)
        theirs = judge.RampupBatchsizeNumMicroBatchesCalculator(
            full, 1, 1, False, 1, start, increment, samples
        )
        for consumed in range(samples + full):
            theirs.update(consumed, False)
            assert plan.size_at(consumed) == theirs.get_current_global_batch_size(), (
                start,
                increment,
                samples,
            )


@pytest.mark.parametrize(
    "plan",
    [
        constant(6),
        linear_ramp(2, 2, 50, 12),
        linear_ramp(3, 4, 11, 99),
        BatchSizeSchedule(((0, 5), (7, 40), (20, 3), (100, 9))),
    ],
)
def test_steps_and_samples_agree_with_a_walk(plan: BatchSizeSchedule) -> None:
    consumed = walked(plan, 80)
    for step, samples in enumerate(consumed):
        assert plan.samples_after(step) == samples
        assert plan.advance(samples, 5) == walked(plan, step + 5)[-1]
        size = plan.size_at(samples)
        assert plan.steps_within(samples) == plan.steps_within(samples + size - 1) == step
    # Also from a number of samples at which no step begins, as after a change of the schedule.
    assert plan.advance(1, 2) == 1 + plan.size_at(1) + plan.size_at(1 + plan.size_at(1))


def test_ramp_from_full_size_is_constant() -> None:
    assert linear_ramp(16, 16, 1000, 16) == constant(16)


def test_impossible_ramp() -> None:
    with pytest.raises(
        ValueError,
        match=r"global batch size interval \(1536 - 16 = 1520\) to be divisible by global batch size increment \(100\)",
    ):
        linear_ramp(16, 100, 1000, 1536)


def test_written_steps_count_tokens() -> None:
    plan = parse_batch_steps(["0:768 250B:1536", "0.5T:3072"], sequence=8192)
    assert plan.changes == ((0, 768), (250 * 10**9 // 8192, 1536), (500 * 10**9 // 8192, 3072))
    assert parse_batch_steps(["0:4,2k:8"], sequence=10).changes == ((0, 4), (200, 8))

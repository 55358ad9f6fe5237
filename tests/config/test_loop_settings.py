"""Settings of the loop: when they have nothing to act on, and what is refused."""

import pytest

from pentatron.config.draft import Facts
from pentatron.config.loop_rules import IDLE_OF_THE_LOOP
from tests.config.builders import LEAST, about, problems

# setting, words it is idle with, words it acts with
CASES: list[tuple[str, str, str]] = [
    (
        "eval_global_batch_size",
        f"{LEAST} --eval-global-batch-size 2 --eval-interval 0",
        f"{LEAST} --eval-global-batch-size 2 --eval-interval 0 --skip-train",
    ),
    (
        "eval_micro_batch_size",
        f"{LEAST} --eval-micro-batch-size 1 --eval-iters 0",
        f"{LEAST} --eval-micro-batch-size 1",
    ),
    ("exit_signal", f"{LEAST} --exit-signal SIGUSR1", f"{LEAST} --exit-signal SIGUSR1 --exit-signal-handler"),
    (
        "check_for_nan_in_loss_and_grad",
        f"{LEAST} --fp16 --no-check-for-nan-in-loss-and-grad",
        f"{LEAST} --no-check-for-nan-in-loss-and-grad",
    ),
    (
        "rerun_mode",
        f"{LEAST} --rerun-mode disabled --no-check-for-nan-in-loss-and-grad",
        f"{LEAST} --rerun-mode disabled",
    ),
    ("iterations_to_skip", f"{LEAST} --iterations-to-skip 11 12", f"{LEAST} --iterations-to-skip 10 12"),
    ("eval_interval", f"{LEAST} --eval-interval 5 --skip-train", f"{LEAST} --eval-interval 5"),
    (
        "eval_iters",
        f"{LEAST} --eval-iters 5 --eval-interval 0",
        f"{LEAST} --eval-iters 5 --eval-interval 0 --skip-train",
    ),
]


@pytest.mark.parametrize(("name", "idle", "acting"), CASES)
def test_idle(name: str, idle: str, acting: str) -> None:
    (line,) = about(name, idle, Facts(1))
    assert line.split(": ", 1)[0] in idle
    assert about(name, acting, Facts(1)) == []


def test_every_idle_reason_has_a_case() -> None:
    assert set(IDLE_OF_THE_LOOP) <= {case[0] for case in CASES}


def test_an_evaluation_batch_that_cannot_be_divided_is_refused() -> None:
    words = "--eval-global-batch-size 6 --eval-micro-batch-size 4"
    (problem,) = problems(words)
    assert "--eval-global-batch-size" in problem and "(6) is not divisible by micro batch size (4)" in problem
    assert problems("--eval-global-batch-size 8 --eval-micro-batch-size 4") == []

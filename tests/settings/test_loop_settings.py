"""Tests settings of the training loop: when they have no effect, and what is refused."""

import pytest

from pentatron.settings.settings import ProcessFacts
from tests.settings.builders import LEAST, about, problems

# Setting, words with which it has no effect, words with which it has one
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
    *(
        (name, f"{LEAST} {words}", f"{LEAST} --profile {words}")
        for name, words in (
            ("profile_step_start", "--profile-step-start 4"),
            ("profile_step_end", "--profile-step-end 16"),
            ("profile_ranks", "--profile-ranks 0"),
            ("use_pytorch_profiler", "--use-pytorch-profiler"),
        )
    ),
    (
        "profile_ranks",
        f"{LEAST} --train-iters 11 --profile --profile-ranks 1",
        f"{LEAST} --train-iters 11 --profile --profile-ranks 0 1",
    ),
    ("profile", f"{LEAST} --profile", f"{LEAST} --profile --train-iters 11"),
    *(
        (name, f"{LEAST} {words}", f"{LEAST} --load a {words}")
        for name, words in (
            ("ckpt_step", "--ckpt-step 5"),
            ("exit_on_missing_checkpoint", "--exit-on-missing-checkpoint"),
        )
    ),
    *(
        (name, f"{LEAST} {words}", f"{LEAST} --manual-gc {words}")
        for name, words in (
            ("manual_gc_interval", "--manual-gc-interval 5"),
            ("manual_gc_eval", "--no-manual-gc-eval"),
        )
    ),
    (
        "memory_snapshot_path",
        f"{LEAST} --memory-snapshot-path a",
        f"{LEAST} --memory-snapshot-path a --record-memory-history",
    ),
    ("eval_interval", f"{LEAST} --eval-interval 5 --skip-train", f"{LEAST} --eval-interval 5"),
    (
        "eval_iters",
        f"{LEAST} --eval-iters 5 --eval-interval 0",
        f"{LEAST} --eval-iters 5 --eval-interval 0 --skip-train",
    ),
]


@pytest.mark.parametrize(("name", "idle", "acting"), CASES)
def test_idle(name: str, idle: str, acting: str) -> None:
    (line,) = about(name, idle, ProcessFacts(1))
    assert line.split(": ", 1)[0] in idle
    assert about(name, acting, ProcessFacts(1)) == []


def test_one_process_has_no_replicas() -> None:
    name, words = (
        "check_weight_hash_across_dp_replicas_interval",
        "--check-weight-hash-across-dp-replicas-interval 5",
    )
    assert len(about(name, f"{LEAST} {words}", ProcessFacts(1))) == 1
    assert about(name, f"{LEAST} {words}", ProcessFacts(2, 2)) == []


def test_a_profile_ends_after_it_begins() -> None:
    (problem,) = problems("--profile --profile-step-start 5 --profile-step-end 5")
    assert problem.startswith("--profile-step-start 5 must be smaller than --profile-step-end 5")


def test_an_evaluation_batch_that_cannot_be_divided_is_refused() -> None:
    words = "--eval-global-batch-size 6 --eval-micro-batch-size 4"
    (problem,) = problems(words)
    assert "--eval-global-batch-size" in problem and "(6) is not divisible by micro batch size (4)" in problem
    assert problems("--eval-global-batch-size 8 --eval-micro-batch-size 4") == []


def test_local_checkpoints_are_refused_in_a_sentence() -> None:
    (problem,) = problems("--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir a")
    assert problem == (
        "--non-persistent-ckpt-type local, --non-persistent-local-ckpt-dir a need non-persistent checkpoints, which this version does "
        "not have yet; leave them out"
    )

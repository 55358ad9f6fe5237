"""Tests batch ramp-up: equal numbers in every layout, resume in the middle, early refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pentatron.checkpoint.state import TrainState
from pentatron.errors import UserError
from pentatron.layout.batch import linear_ramp
from pentatron.layout.check import check
from pentatron.parallel.world import create_groups, single_process
from pentatron.settings.entry_points import PRETRAIN_GPT
from pentatron.settings.resolve import Resolved, gather, resolve
from pentatron.settings.run_config import remaining_batch_sizes_problem, size_problem
from pentatron.settings.settings import ProcessFacts
from pentatron.train.lr_schedule import update_schedule
from pentatron.train.session import run_training
from tests.harness import distributed
from tests.support import LLAMA, REVEALING, TINY
from tests.train.test_session import final_state, losses

# Steps of 4, 8, 12 and 16 samples: 1 to 4 micro-batches of 2 on two ranks, 2 to 8 in a pipeline.
RAMP = "--rampup-batch-size 4 4 40 --global-batch-size 16 --train-iters 9"
SIZES = [4, 4, 4, 4, 8, 8, 12, 16, 16]
RUN = (
    f"{LLAMA} --num-layers 4 --micro-batch-size 2 --save-interval 5 --keep-checkpoints 99 --eval-interval 9 "
    f"--eval-iters 1 --lr-warmup-iters 3 --lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-wsd-decay-style minus_sqrt "
    f"--hidden-dropout 0.1 --start-weight-decay 0.1 --end-weight-decay 0.4 --weight-decay-incr-style cosine"
)


def settings(folder: Path, words: str = "", world_size: int = 1, plan: str = RAMP) -> Resolved:
    said = f"{TINY} {REVEALING} {RUN} {plan} --save-checkpoints --run-dir {folder} {words}".split()
    return resolve(gather(said, PRETRAIN_GPT), ProcessFacts(world_size, world_size, 1))


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run_alone(folder: Path, words: str = "", plan: str = RAMP) -> None:
    run_training(settings(folder, words, plan=plan), single_process(), True)


def run_spread(folder: Path, words: str, world: int, plan: str = RAMP) -> None:
    chosen = settings(folder, words, world, plan)
    here = create_groups(chosen.config.grid, dist.get_rank(), dist.get_rank(), torch.device("cpu"))
    run_training(chosen, here, True)
    dist.barrier()


def cut(whole: Path, folder: Path, step: int) -> None:
    """Copies a run as if it had been killed after it had saved `step`."""
    shutil.copytree(whole, folder)
    for later in (folder / "checkpoints").glob("step-*"):
        if int(later.name[5:]) > step:
            shutil.rmtree(later)
    (folder / "checkpoints" / "latest").unlink()


def test_a_ramp_is_reported_and_counted(tmp_path: Path) -> None:
    run_alone(tmp_path / "a")
    assert [row["global_batch_size"] for row in rows(tmp_path / "a")] == SIZES
    consumed = [row["consumed_samples"] for row in rows(tmp_path / "a")]
    assert consumed == [sum(SIZES[: step + 1]) for step in range(9)]
    plan = linear_ramp(4, 4, 40, 16)
    assert consumed == [plan.samples_after(step) for step in range(1, 10)]
    log = (tmp_path / "a" / "train.log").read_text()
    assert "4 to 16 × 16 tokens a step" in log and " | global batch size:     4 | " in log
    assert "  the global batch size changes from 4 to 8 after iteration 4\n" in log
    rates = [row["learning_rate"] for row in rows(tmp_path / "a")]
    assert rates[0] == 0 and rates[3:7] == [1e-2] * 4 and rates[7] < 1e-2, (
        "3 steps up, 3 down, whatever their size"
    )
    control = linear_ramp(4, 4, 30, 16)
    assert consumed != [control.samples_after(step) for step in range(1, 10)]


INTERLEAVED = "--pp_size 2 --virtual-pipeline-model-parallel-size 2 --microbatch-group-size-per-virtual-pipeline-stage 3"


@distributed(world=4)
def test_layouts_compute_the_numbers_of_one_process(tmp_path: Path) -> None:
    """Compares losses with one process; the second layout resumes its checkpoint within the ramp."""
    first = dist.get_rank() == 0
    if first:
        run_alone(tmp_path / "alone")
    dist.barrier()
    expected = [(step, pytest.approx(loss, rel=2e-5)) for step, loss in losses(tmp_path / "alone")]
    words = "--tp_size 2 --sequence-parallel --pp_size 2 --pipeline-schedule zero-bubble"
    run_spread(tmp_path / "spread", words, 4)
    assert losses(tmp_path / "spread") == expected
    if first:
        cut(tmp_path / "alone", tmp_path / "grown", 5)
    dist.barrier()
    run_spread(tmp_path / "grown", "--pp_size 2 --pipeline-schedule 1f1b", 4)
    assert losses(tmp_path / "grown") == expected
    assert [row["global_batch_size"] for row in rows(tmp_path / "grown")] == SIZES


@distributed(world=2)
def test_small_counts_under_every_schedule(tmp_path: Path) -> None:
    first = dist.get_rank() == 0
    if first:
        run_alone(tmp_path / "alone")
    dist.barrier()
    expected = [(step, pytest.approx(loss, rel=2e-5)) for step, loss in losses(tmp_path / "alone")]
    for number, words in enumerate(("--zero-stage 1", INTERLEAVED, "--pp_size 2 --pipeline-schedule zbv")):
        run_spread(tmp_path / str(number), words, 2)
        assert losses(tmp_path / str(number)) == expected, words
    # A resume in the same layout is bit-exact.
    if first:
        cut(tmp_path / "1", tmp_path / "resumed", 5)
    dist.barrier()
    run_spread(tmp_path / "resumed", INTERLEAVED, 2)
    assert losses(tmp_path / "resumed") == losses(tmp_path / "1")
    assert final_state(tmp_path / "resumed") == final_state(tmp_path / "1")


def test_written_steps_may_also_go_down(tmp_path: Path) -> None:
    """Thresholds count tokens (sequences of 16); --train-samples sets the length of the run."""
    plan = "--step-batch-size-schedule 0:2,64:8,512:4 --train-samples 43"
    config = settings(tmp_path / "a", plan=plan).config
    assert config.schedule_lengths.total == 43, "what the order of samples is made for, as Megatron's"
    assert config.train.global_batch_size == 4, "that of validation is the last one"
    run_alone(tmp_path / "a", plan=plan)
    assert [row["global_batch_size"] for row in rows(tmp_path / "a")] == [2, 2, 8, 8, 8, 8, 4]
    assert rows(tmp_path / "a")[-1]["consumed_samples"] == 40, "3 samples are too few for another step"


# --- refused batch sizes ---


def test_every_size_on_the_way_must_fit(tmp_path: Path) -> None:
    """Refuses before anything is built, with the equation; sizes that no step uses do not matter."""
    plan = "--rampup-batch-size 6 6 36 --global-batch-size 24 --train-iters 9"
    with pytest.raises(UserError) as refusal:
        run_alone(tmp_path / "a", f"--micro-batch-size 4 --save {tmp_path}/b --load {tmp_path}/b", plan)
    assert str(refusal.value) == (
        "the batch of 6 samples at step 1 does not fit: 6 is not divisible by micro batch size (4) times data parallel size "
        "(1) = 4; use batch sizes that are multiples of 4, or --micro-batch-size 1, 2, 3 or 6"
    )
    assert not (tmp_path / "a" / "config.yaml").exists()
    # After 4 samples the batch is 24; the sizes between are never used.
    run_alone(
        tmp_path / "b",
        "--micro-batch-size 4",
        "--rampup-batch-size 4 5 4 --global-batch-size 24 --train-iters 2 --lr-decay-iters 9",
    )
    assert [row["global_batch_size"] for row in rows(tmp_path / "b")] == [4, 24]


@pytest.mark.parametrize(
    "words",
    [
        "--pipeline-schedule gpipe",
        "--pipeline-schedule 1f1b",
        "--pipeline-schedule interleaved --virtual-pipeline-model-parallel-size 2",
        "--pipeline-schedule interleaved --virtual-pipeline-model-parallel-size 2 "
        "--microbatch-group-size-per-virtual-pipeline-stage 5",
        "--pipeline-schedule zero-bubble",
        "--pipeline-schedule zero-bubble --virtual-pipeline-model-parallel-size 2 "
        "--microbatch-group-size-per-virtual-pipeline-stage 7",
        "--pipeline-schedule zbv",
        "--pipeline-schedule dualpipev",
    ],
)
def test_a_layout_has_a_sound_schedule_for_every_size_it_takes(tmp_path: Path, words: str) -> None:
    plan = "--rampup-batch-size 1 1 40 --global-batch-size 10 --train-iters 30 --micro-batch-size 1"
    config = settings(tmp_path, f"--pp_size 3 --num-layers 6 {words}", 3, plan).config
    taken = [size for size in range(1, 11) if size_problem(config, size) is None]
    assert taken == list(range(6 if "dualpipev" in words else 1, 11))
    for size in taken:
        assert check(config.schedule(config.accumulation_of(size))).time > 0


def test_too_few_micro_batches_for_a_schedule(tmp_path: Path) -> None:
    config = settings(tmp_path, "--pp_size 2 --pipeline-schedule dualpipev", 2).config
    assert remaining_batch_sizes_problem(config, 0, 0) == (
        "the batch of 4 samples at step 1 does not fit: dualpipev needs 2 × 2 (pipeline ranks) = 4 or more micro-batches, not "
        "2; use 4 or more, or the schedule zbv; begin with larger batches, or use another --pipeline-schedule"
    )
    assert remaining_batch_sizes_problem(config, consumed_samples=16, steps_taken=4) is None, (
        "what is behind a run does not matter"
    )


# --- schedule of the checkpoint or of the command ---


def test_changed_schedule_is_reported_and_the_saved_one_can_be_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_alone(tmp_path / "whole")
    for name in ("noted", "kept", "taken"):
        cut(tmp_path / "whole", tmp_path / name, 5)

    def said(name: str, words: str) -> str:
        capsys.readouterr()
        run_alone(tmp_path / name, f"--lr 3e-3 {words}")
        return capsys.readouterr().out

    note = (
        "the learning rate continues at 3.000e-03, not 1.000e-02 (--use-checkpoint-opt-param-scheduler keeps"
    )
    assert note in said("noted", "")
    kept = said("kept", "--use-checkpoint-opt-param-scheduler --save-interval 7")
    assert "the checkpoint's schedule is kept; --lr: 0.01 (this command: 0.003)" in kept
    assert "--lr 0.003 (was" not in kept and note not in kept
    taken = said("taken", "--override-opt-param-scheduler")
    assert "--lr 0.003 (was 0.01)" in taken and note not in taken
    assert losses(tmp_path / "kept") == losses(tmp_path / "whole")
    assert losses(tmp_path / "taken") == losses(tmp_path / "noted") != losses(tmp_path / "whole")
    # The kept schedule is saved, so the next start resumes it whatever its flags are.
    cut(tmp_path / "kept", tmp_path / "again", 7)
    said("again", "--use-checkpoint-opt-param-scheduler")
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")


def test_nothing_to_keep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_alone(tmp_path / "a", "--use-checkpoint-opt-param-scheduler --lr-decay-iters 9 --train-iters 1")
    shown = capsys.readouterr().out
    assert "--use-checkpoint-opt-param-scheduler: no schedule is loaded, so this has no effect" in shown


def test_a_rate_that_is_the_same_for_now_is_not_called_another(tmp_path: Path) -> None:
    """Both rates are 0 at the first warm-up step; the note names the flags that will differ later."""
    state = TrainState()
    for rate in ("1e-2", "2e-2"):
        words = f"{TINY} {RAMP} --lr-warmup-iters 5 --lr {rate} --run-dir {tmp_path}".split()
        (*_, note) = [
            "",
            *update_schedule(resolve(gather(words, PRETRAIN_GPT), ProcessFacts(1, 1, 1)).config, state),
        ]
    assert "continues at 0.000e+00, as before; different are --lr: 0.01 (this command: 0.02) (" in note


@pytest.mark.parametrize(("style", "notes"), [("constant", 0), ("cosine", 1)])
def test_only_a_schedule_with_effect_is_reported(tmp_path: Path, style: str, notes: int) -> None:
    """A longer run changes the decay only if the learning rate decays."""
    words, state = f"--lr-decay-style {style} --weight-decay-incr-style constant", TrainState()
    plan = RAMP.replace("--train-iters 9", "--train-iters 30")
    for length in (RAMP, plan):
        said = f"{TINY} {length} {words} --run-dir {tmp_path}".split()
        found = update_schedule(resolve(gather(said, PRETRAIN_GPT), ProcessFacts(1, 1, 1)).config, state)
    assert len(found) == notes


def test_a_weight_decay_that_changes_acts(tmp_path: Path) -> None:
    """Compares the weight decay of the step: 0.4 to 0.4 equals 0.4, and 0.1 to 0.4 does not."""
    least = f"{LLAMA} --train-iters 3 --global-batch-size 4 --save-interval 3 --lr-decay-style constant"
    for name, words in (
        ("constant", "--weight-decay 0.4"),
        ("from it to it", "--start-weight-decay 0.4 --end-weight-decay 0.4 --weight-decay-incr-style linear"),
        ("growing", "--start-weight-decay 0.1 --end-weight-decay 0.4 --weight-decay-incr-style linear"),
    ):
        said = f"{TINY} {REVEALING} {least} {words} --save-checkpoints".split()
        said += ["--run-dir", str(tmp_path / name)]
        run_training(resolve(gather(said, PRETRAIN_GPT), ProcessFacts(1, 1, 1)), single_process(), True)
    assert final_state(tmp_path / "constant") == final_state(tmp_path / "from it to it")
    assert final_state(tmp_path / "constant") != final_state(tmp_path / "growing")

"""A run from beginning to end: folder, resume, interruption, refusals."""

import dataclasses
import json
import os
import select
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

import pentatron.train.session as session_module
import pentatron.train.trainer as trainer_module
from pentatron.checkpoint.lock import lock_folder
from pentatron.checkpoint.store import TRACKER, CheckpointStore
from pentatron.data.gpt_dataset import SyntheticDataset
from pentatron.errors import AgreedError, UserError
from pentatron.layout.ranks import Grid
from pentatron.parallel.world import World, create_groups, single_process
from pentatron.settings.entry_points import PRETRAIN_GPT
from pentatron.settings.resolve import Resolved, gather, resolve
from pentatron.settings.settings import ProcessFacts
from pentatron.supervise.signals import StoppedEarly
from pentatron.train.model import Program
from pentatron.train.session import RunOutcome, run_training
from pentatron.train.step import StepResult
from tests.harness import distributed
from tests.support import LLAMA, resolved

CPU = torch.device("cpu")
RUN = f"{LLAMA} --train-iters 6 --save-interval 2 --keep-checkpoints 9 --eval-interval 3 --eval-iters 1 --log-interval 2"


def settings(folder: Path, words: str = "", world_size: int = 1) -> Resolved:
    return resolved(f"{RUN} --run-dir {folder} {words}", world_size)


def run(folder: Path, words: str = "", resumes: bool = True) -> RunOutcome:
    return run_training(settings(folder, words), single_process(), resumes)


def losses(folder: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


def final_state(folder: Path) -> dict[str, str]:
    """Checksums of everything in the newest checkpoint."""
    found, _ = CheckpointStore(folder / "checkpoints", keep=None).newest_valid(verify=True, set_aside=True)
    assert found is not None
    return {name: record.sha256 for name, record in found.manifest.files.items()}


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch, number: signal.Signals = signal.SIGINT) -> None:
    original = trainer_module.train_step
    calls = {"made": 0}

    def interrupted(*args: Any) -> StepResult:
        calls["made"] += 1
        if calls["made"] == step:
            os.kill(os.getpid(), number)
        return original(*args)

    monkeypatch.setattr(trainer_module, "train_step", interrupted)


def test_the_run_folder_holds_everything(tmp_path: Path) -> None:
    assert run(tmp_path / "a").ending is None
    names = {p.name for p in (tmp_path / "a").iterdir()} - {".lock"}
    assert names == {
        "config.yaml",
        "train.log",
        "metrics.jsonl",
        "checkpoints",
        "loss.svg",
        "app_metrics.json",
        "job.json",
    }
    rows = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "validation_loss" in row] == [3, 6]
    assert rows[0]["tokens"] == 8 * 16 and rows[-1]["consumed_samples"] == 48
    steps = sorted(p.name for p in (tmp_path / "a" / "checkpoints").iterdir())
    assert steps == [".lock", "latest", TRACKER, "step-00000002", "step-00000004", "step-00000006"]
    log = (tmp_path / "a" / "train.log").read_text()
    assert " iteration        6/       6 | consumed samples:           48 |" in log
    assert " validation loss at iteration 3 | lm loss value: " in log


def test_two_runs_with_one_seed_are_equal_to_the_last_digit(tmp_path: Path) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b")
    run(tmp_path / "c", "--seed 5")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert final_state(tmp_path / "a") == final_state(tmp_path / "b")
    assert losses(tmp_path / "a") != losses(tmp_path / "c")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_resumes_to_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    run(tmp_path / "whole")
    with monkeypatch.context() as patched:
        interrupt_at(3, patched, number)
        assert run(tmp_path / "cut").ending.signal == number
    assert [step for step, _ in losses(tmp_path / "cut")] == [1, 2, 3], (
        "the step under way is finished and kept"
    )
    assert run(tmp_path / "cut").ending is None
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert final_state(tmp_path / "cut") == final_state(tmp_path / "whole")


def test_killed_run_resumes_from_its_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "whole")

    class Killed(BaseException):
        pass

    def die(*_: Any) -> StepResult:
        raise Killed

    with monkeypatch.context() as patched:
        original = trainer_module.train_step
        made = iter(range(100))
        patched.setattr(trainer_module, "train_step", lambda *a: original(*a) if next(made) < 3 else die())
        with pytest.raises(Killed):
            run(tmp_path / "cut")
    assert len(losses(tmp_path / "cut")) == 3
    run(tmp_path / "cut")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole"), (
        "step 3 was computed again, not listed twice"
    )


def damage(step: Path) -> None:
    shard = step / "rank-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 4
    shard.write_bytes(content)


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "whole")
    run(tmp_path / "hurt", "--train-iters 4")
    damage(tmp_path / "hurt" / "checkpoints" / "step-00000004")
    capsys.readouterr()
    run(tmp_path / "hurt", "--lr-decay-iters 6")
    shown = capsys.readouterr().out
    assert "step-00000004/rank-00000.safetensors: sha256 is" in shown and "resuming at step 2 of 6" in shown


def test_a_damaged_checkpoint_is_renamed_in_the_own_folder_only(tmp_path: Path) -> None:
    run(tmp_path / "other", "--train-iters 4")
    step = tmp_path / "other" / "checkpoints" / "step-00000004"
    damage(step)
    run(tmp_path / "a", f"--load {step.parent} --train-iters 4")
    assert [at for at, _ in losses(tmp_path / "a")] == [3, 4], "gone on from the step before"
    assert step.is_dir(), "the other run may still be using its folder"
    run(tmp_path / "other", "--train-iters 4")
    assert step.with_name("step-00000004.damaged").is_dir()


def test_a_finished_run_says_so_and_trains_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "a")
    before = final_state(tmp_path / "a")
    capsys.readouterr()
    run(tmp_path / "a")
    assert "this run has finished its 6 steps: nothing is left to train" in capsys.readouterr().out
    assert len(losses(tmp_path / "a")) == 6 and final_state(tmp_path / "a") == before


def test_fresh_moves_the_earlier_run_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "a")
    run(tmp_path / "a", "--fresh --train-iters 2")
    assert len(losses(tmp_path / "a")) == 2 and len(losses(tmp_path / "a.1")) == 6
    run(tmp_path / "a", "--train-iters 2", resumes=False)
    assert (tmp_path / "a.2").is_dir() and f"moved to {tmp_path / 'a.2'}" in capsys.readouterr().out


def test_another_model_is_refused_with_the_difference(tmp_path: Path) -> None:
    run(tmp_path / "a", "--train-iters 2")
    with pytest.raises(UserError, match=r"num_layers was 2, is 3.*--fresh"):
        run(tmp_path / "a", "--num-layers 3")


def test_changed_settings_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "a", "--train-iters 2")
    run(tmp_path / "a", "--lr 0.5 --clip-grad 2 --log-interval 3")
    shown, log = capsys.readouterr().out, (tmp_path / "a" / "train.log").read_text()
    line = "note: settings differ from the checkpoint's: --train-iters 6 (was 2), --lr 0.5 (was 0.01), --lr-decay-iters 6 (was 2), --clip-grad 2.0 (was 0.5)\n"
    assert line in shown and line in log
    assert (
        "\nchanged since the checkpoint, without an effect on its numbers: --log-interval 3 (was 2)\n" in log
    )


def test_a_guide_script_starts_afresh_also_with_checkpoints_elsewhere(tmp_path: Path) -> None:
    words = f"--save {tmp_path / 'saved'} --train-iters 4"
    run(tmp_path / "a", words, resumes=False)
    run(tmp_path / "a", words, resumes=False)
    assert len(losses(tmp_path / "a")) == len(losses(tmp_path / "a.1")) == 4
    assert (tmp_path / "saved.1" / "step-00000004").is_dir() and (
        tmp_path / "saved" / "step-00000004"
    ).is_dir()
    run(tmp_path / "b", f"--load {tmp_path / 'saved'} --train-iters 6", resumes=False)
    assert [step for step, _ in losses(tmp_path / "b")] == [5, 6], "a named checkpoint is gone on from"


def test_checkpoints_beside_the_log_resume_only_with_their_save_folder(
    tmp_path: Path,
) -> None:
    run(tmp_path / "a", f"--save {tmp_path / 'a'} --train-iters 2")
    with pytest.raises(
        UserError, match=r"a contains checkpoints itself, of a run with --save .*to resume it"
    ):
        run(tmp_path / "a", "--train-iters 4")
    run(tmp_path / "a", f"--save {tmp_path / 'a'} --train-iters 4")
    assert [step for step, _ in losses(tmp_path / "a")] == [1, 2, 3, 4]


def test_damaged_load_folder_does_not_suggest_fresh(tmp_path: Path) -> None:
    run(tmp_path / "a", "--train-iters 2")
    (tmp_path / "a" / "checkpoints" / "step-00000002" / "manifest.json").unlink()
    with pytest.raises(UserError, match="restore an intact step, or name another folder") as refused:
        run(tmp_path / "b", f"--load {tmp_path / 'a'}")
    assert "--fresh" not in str(refused.value)


def test_run_with_only_damaged_steps_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "a", "--train-iters 2")
    (tmp_path / "a" / "checkpoints" / "step-00000002" / "manifest.json").unlink()
    for _ in range(2):
        with pytest.raises(UserError, match=r"no checkpoint in .* is usable .*--fresh"):
            run(tmp_path / "a")
    assert len(losses(tmp_path / "a")) == 2, "what is known of the run is kept"


def test_changed_data_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "a", "--train-iters 2")
    with pytest.raises(UserError, match="the data is not what"):
        run(tmp_path / "a", "--dataset-size 65")


def test_changed_seed_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "a", "--train-iters 2")
    run(tmp_path / "a", "--seed 7")
    shown = capsys.readouterr().out
    assert "--seed 7 (was 1234)" in shown
    assert "; --seed changes the sample order from here on" in shown
    run(tmp_path / "a", "--lr 0.5 --seed 8 --seq-length 8")
    assert "; --seed and --seq-length change the sample order" in capsys.readouterr().out, "--lr does not"


def test_a_named_checkpoint_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--load .*nowhere does not exist"):
        run(tmp_path / "a", f"--load {tmp_path / 'nowhere'}")
    run(tmp_path / "b", f"--load {tmp_path / 'b' / 'checkpoints'} --train-iters 2")


def test_a_signal_during_the_start_ends_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends a blocked start too: Python resumes a blocked call after a handler that only sets a flag."""

    def blocked(*args: Any) -> Any:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        select.select([], [], [], 20)
        raise AssertionError("the signal had no effect")

    before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGHUP))
    try:
        monkeypatch.setattr(session_module, "build_parallel_model", blocked)
        with pytest.raises(StoppedEarly) as stopped:
            run(tmp_path / "a")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert stopped.value.number == signal.SIGHUP
    told = "stopped by SIGHUP before the first step; nothing was trained yet"
    assert str(stopped.value) == (tmp_path / "a" / "train.log").read_text().strip() == told
    monkeypatch.undo()
    assert run(tmp_path / "a").ending is None, "and nothing is left that a second start would meet"


def test_a_longer_sequence_may_go_on_where_positions_are_not_learned(tmp_path: Path) -> None:
    run(tmp_path / "a", "--train-iters 2")
    run(tmp_path / "a", "--seq-length 32")
    assert len(losses(tmp_path / "a")) == 6


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    with lock_folder(folder), pytest.raises(UserError, match="another job is using"):
        run(folder)


def test_an_unwritable_folder_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be written.*--run-dir"):
        run(tmp_path / "file" / "run")


def test_bad_numbers_stop_the_run_before_the_update(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"step 2: the loss is .*reproduces it, and begins with .*checkpoint of step 1 has"
    ):
        run(tmp_path / "a", "--lr 1e30 --clip-grad 0 --save-interval 5")


def test_the_saved_configuration_can_be_used_again(tmp_path: Path) -> None:
    run(tmp_path / "a", "--train-iters 2")
    saved = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())
    assert saved["model"]["num_layers"] == 2 and "data_parallel_size" not in saved["parallel"]
    draft = gather(["--config", str(tmp_path / "a" / "config.yaml")], PRETRAIN_GPT)
    again = resolve(draft, ProcessFacts(2, 2, 1)).config
    assert again.parallel.data_parallel_size == 2 and again.train.train_iters == 2


def test_validation_on_synthetic_data_is_of_the_same_kind(tmp_path: Path) -> None:
    run(tmp_path / "a", "--train-iters 60 --eval-interval 30 --lr 3e-2 --dataset-size 400")
    rows = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < 0.6 * rows[0]["loss"]
    assert rows[-1]["validation_loss"] < 0.6 * rows[0]["loss"], "unseen samples follow the same rule"


def test_bf16_follows_fp32_and_resumes_bit_exactly(tmp_path: Path) -> None:
    run(tmp_path / "fp32")
    run(tmp_path / "bf16", "--bf16")
    run(tmp_path / "cut", "--bf16 --train-iters 3 --lr-decay-iters 6")
    run(tmp_path / "cut", "--bf16 --lr-decay-iters 6")
    exact, rounded = losses(tmp_path / "fp32"), losses(tmp_path / "bf16")
    assert rounded != exact and rounded == [(step, pytest.approx(loss, rel=2e-2)) for step, loss in exact]
    assert losses(tmp_path / "cut") == rounded and final_state(tmp_path / "cut") == final_state(
        tmp_path / "bf16"
    )


def world_here() -> World:
    rank = dist.get_rank()
    return create_groups(Grid(data=dist.get_world_size()), rank, rank, CPU)


@distributed(world=2)
def test_two_ranks_write_one_folder_and_resume(tmp_path: Path) -> None:
    words = "--micro-batch-size 2"
    run_training(settings(tmp_path / "whole", words, 2), world_here(), True)
    run_training(
        settings(tmp_path / "cut", f"{words} --train-iters 3 --lr-decay-iters 6", 2), world_here(), True
    )
    run_training(settings(tmp_path / "cut", f"{words} --lr-decay-iters 6", 2), world_here(), True)
    dist.barrier()
    assert losses(tmp_path / "whole") == losses(tmp_path / "cut")
    assert final_state(tmp_path / "whole") == final_state(tmp_path / "cut")
    assert len(final_state(tmp_path / "whole")) == 2


@distributed(world=2)
def test_a_signal_to_one_rank_stops_both_at_the_same_step(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 1:
            interrupt_at(2, patched)
        outcome = run_training(settings(tmp_path / "a", "--micro-batch-size 4", 2), world_here(), True)
    assert outcome.ending is not None and outcome.ending.signal == signal.SIGINT, "on both ranks"
    found, _ = CheckpointStore(tmp_path / "a" / "checkpoints", keep=None).newest_valid(
        verify=True, set_aside=True
    )
    assert found is not None and found.manifest.step == 2


@distributed(world=2)
def test_bad_data_on_one_rank_is_one_sentence_on_both(tmp_path: Path) -> None:
    def damaged(self: SyntheticDataset, i: int) -> Any:
        raise UserError(f"sample {i} is damaged")

    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 1:
            patched.setattr(SyntheticDataset, "__getitem__", damaged)
        with pytest.raises(AgreedError, match="is damaged"):
            run_training(settings(tmp_path / "a", "--micro-batch-size 4", 2), world_here(), True)


class OtherData(Program):
    def open_data(self, *arguments: Any) -> Any:
        opened = super().open_data(*arguments)
        identity = dataclasses.replace(opened.identity, fingerprint="other data")
        return dataclasses.replace(opened, identity=identity)


@distributed(world=2)
def test_other_data_on_one_rank_is_one_sentence_on_both(tmp_path: Path) -> None:
    run_training(settings(tmp_path / "a", "--train-iters 2", 2), world_here(), True)
    program = OtherData() if dist.get_rank() == 1 else Program()
    with pytest.raises(AgreedError, match="the data is not what"):
        run_training(settings(tmp_path / "a", "", 2), world_here(), True, program=program)


@distributed(world=2)
def test_more_ranks_continue_what_one_began(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        run_training(settings(tmp_path / "one"), single_process(), True)
        run_training(
            settings(tmp_path / "grown", "--train-iters 3 --lr-decay-iters 6"), single_process(), True
        )
    dist.barrier()
    run_training(settings(tmp_path / "grown", "--lr-decay-iters 6", 2), world_here(), True)
    dist.barrier()
    expected, found = losses(tmp_path / "one"), losses(tmp_path / "grown")
    assert found == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in expected]

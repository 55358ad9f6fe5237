"""Tests evaluation during, after and instead of training: samples, printed lines and metrics."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import pentatron.train.evaluation as evaluation_module
from pentatron.checkpoint.store import CheckpointStore
from pentatron.errors import AgreedError, UserError
from pentatron.parallel.world import single_process
from pentatron.train.session import RunOutcome, run_training
from tests.harness import run_distributed
from tests.support import LLAMA, resolved
from tests.train.test_data_order import write_corpora
from tests.train.test_session import world_here

RUN = f"{LLAMA} --train-iters 5 --save-interval 4 --eval-interval 2 --eval-iters 2 --log-interval 1"


def run(folder: Path, words: str = "", resumes: bool = True) -> RunOutcome:
    return run_training(resolved(f"{RUN} --run-dir {folder} {words}"), single_process(), resumes)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def log(folder: Path) -> list[str]:
    return (folder / "train.log").read_text().splitlines()


def evaluations(folder: Path) -> dict[str, float]:
    """Returns the losses of all evaluations in the log by place (such as `iteration 2`)."""
    form = r" validation loss at (.+?) \| lm loss value: (\d\.\d{6}E[+-]\d\d) \| lm loss PPL: (\d\.\d{6}E[+-]\d\d) \| "
    found = {}
    lines = log(folder)
    for before, line, after in zip(lines, lines[1:], lines[2:]):
        if match := re.fullmatch(form, line):
            assert before == after == "-" * (len(line) + 1)
            assert float(match[3]) == pytest.approx(math.exp(float(match[2])), rel=1e-5)
            found[match[1]] = float(match[2])
    return found


def watch(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """Records the samples that each evaluation reads."""
    seen: list[list[list[int]]] = []
    original = evaluation_module.evaluate

    def watched(model: Any, batches: Any, at_once: int) -> Any:
        read: list[list[int]] = []
        seen.append(read)

        def noting() -> Any:
            for batch in batches:
                read.extend(batch.tokens.tolist())
                yield batch

        return original(model, noting(), at_once)

    monkeypatch.setattr(evaluation_module, "evaluate", watched)
    return seen


def test_the_set_is_evaluated_in_the_middle_and_once_more_after_the_last_save(tmp_path: Path) -> None:
    run(tmp_path / "a")
    found = evaluations(tmp_path / "a")
    assert list(found)[:3] == ["iteration 2", "iteration 4", "iteration 5 on validation set"]
    lines = "\n".join(log(tmp_path / "a"))
    assert lines.index("saved checkpoint from iteration       5") < lines.index(
        "iteration 5 on validation set"
    )
    by_step = {
        row["step"]: row["validation_loss"] for row in rows(tmp_path / "a") if "validation_loss" in row
    }
    assert by_step == {
        2: pytest.approx(found["iteration 2"], rel=1e-6),
        4: pytest.approx(found["iteration 4"], rel=1e-6),
        5: pytest.approx(found["iteration 5 on validation set"], rel=1e-6),
    }
    assert [row["step"] for row in rows(tmp_path / "a")] == [1, 2, 3, 4, 5]


def test_a_resumed_run_validates_on_the_samples_the_whole_one_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch(monkeypatch)
    run(tmp_path / "whole")
    whole = list(seen)
    seen.clear()
    run(tmp_path / "cut", "--exit-interval 4")
    run(tmp_path / "cut")
    assert seen == whole and evaluations(tmp_path / "cut") == evaluations(tmp_path / "whole")
    found, _ = CheckpointStore(tmp_path / "cut" / "checkpoints", keep=None).newest_valid(True, False)
    assert found is not None and found.manifest.run_state["consumed_valid_samples"] == 2 * 2 * 8


def test_an_evaluation_step_may_have_a_size_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch(monkeypatch)
    run(tmp_path / "a", "--eval-global-batch-size 6 --eval-micro-batch-size 3 --micro-batch-size 4")
    assert {len(read) for read in seen} == {12}
    run(tmp_path / "b", "--eval-global-batch-size 6 --eval-micro-batch-size 2 --micro-batch-size 4")
    assert evaluations(tmp_path / "a") == pytest.approx(evaluations(tmp_path / "b"), rel=1e-6)


def kept(folder: Path) -> dict[Path, bytes]:
    return {
        p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name not in ("train.log", ".lock")
    }


def test_skip_train_evaluates_what_was_trained_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "a")
    before, trained = kept(tmp_path / "a"), evaluations(tmp_path / "a")
    (tmp_path / "a" / "train.log").unlink()
    # Without --skip-train, resumes=False (a guide's script) would move the earlier run aside.
    assert run(tmp_path / "a", "--skip-train", resumes=False).ending is None
    said = capsys.readouterr().out
    assert "skipping training (--skip-train is on) ...\n" in said
    assert "random weights" not in said and "not the checkpoint's" not in said
    assert evaluations(tmp_path / "a") == {k: v for k, v in trained.items() if k.startswith("iteration 5 on")}
    assert kept(tmp_path / "a") == before
    assert not any(" elapsed time per iteration" in line for line in log(tmp_path / "a"))


def test_skip_train_says_where_there_is_nothing_to_evaluate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "a", "--skip-train")
    assert "there is no checkpoint, so random weights are evaluated" in capsys.readouterr().out


def evaluate_here(words: str) -> None:
    run_training(resolved(words, dist.get_world_size()), world_here(), True)


def evaluate_damaged_here(words: str) -> str:
    original = evaluation_module.micro_batches

    def damaged(*arguments: Any) -> Any:
        batches = original(*arguments)
        yield next(batches)
        if dist.get_rank() == 1:
            raise UserError("a file is damaged")
        yield from batches

    with pytest.MonkeyPatch.context() as patched, pytest.raises(AgreedError) as error:
        patched.setattr(evaluation_module, "micro_batches", damaged)
        evaluate_here(words)
    return str(error.value)


def test_validation_samples_that_one_rank_cannot_read_end_all(tmp_path: Path) -> None:
    words = f"{RUN} --run-dir {tmp_path / 'two'} --micro-batch-size 2"
    assert run_distributed(evaluate_damaged_here, world=2, words=words) == ["a file is damaged"] * 2


def test_ranks_evaluate_what_one_process_does(tmp_path: Path) -> None:
    run(tmp_path / "one")
    words = f"{RUN} --run-dir {tmp_path / 'two'} --micro-batch-size 2"
    run_distributed(evaluate_here, world=2, words=words)
    assert evaluations(tmp_path / "two") == pytest.approx(evaluations(tmp_path / "one"), rel=1e-5)


def test_validations_go_on_and_the_test_set_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch(monkeypatch)
    run(tmp_path / "a")
    assert list(evaluations(tmp_path / "a"))[-2:] == [
        "iteration 5 on validation set",
        "iteration 5 on test set",
    ]
    samples = [tuple(sample) for read in seen for sample in read]
    # Short samples may be equal by chance; reading the same ones in every evaluation would leave half of
    # them.
    assert len(seen) == 4 and len(set(samples)) > 0.9 * len(samples) == 0.9 * 4 * 16
    assert rows(tmp_path / "a")[-1]["test_loss"] == pytest.approx(
        evaluations(tmp_path / "a")["iteration 5 on test set"], rel=1e-6
    )


def test_a_longer_run_keeps_the_order_of_its_validations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"{write_corpora(tmp_path)} --lr-decay-iters 9"
    seen = watch(monkeypatch)
    run(tmp_path / "a", words)
    first = seen[:2]
    seen.clear()
    # The validation at step 5 followed the last save and is not counted; the longer run has one at step 6
    # instead.
    run(tmp_path / "a", f"{words} --train-iters 9")
    found, _ = CheckpointStore(tmp_path / "a" / "checkpoints", keep=None).newest_valid(True, False)
    assert found is not None and found.manifest.run_state["valid_ordered_for"] == [3 * 16, 5 * 16]
    assert found.manifest.run_state["consumed_valid_samples"] == 4 * 16
    assert all(read not in first for read in seen)


def test_tensorboard_has_the_last_evaluation_unless_nothing_was_trained(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = f"--tensorboard-dir {tmp_path / 'tb'}"
    run(tmp_path / "a", words)
    found = evaluations(tmp_path / "a")
    files = sorted(p.name for p in (tmp_path / "tb").iterdir())
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [e.step for e in events.Scalars("lm loss validation")] == [2, 4, 5]
    (test,) = events.Scalars("lm loss test")
    assert test.step == 5 and test.value == pytest.approx(found["iteration 5 on test set"], rel=1e-5)
    run(tmp_path / "a", f"{words} --skip-train")
    assert sorted(p.name for p in (tmp_path / "tb").iterdir()) == files

"""A run that lost its folder stops before it writes; files deleted during a run are created again."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import pentatron.train.trainer as trainer_module
from pentatron.checkpoint.lock import LOCK_FILE
from pentatron.errors import AgreedError
from pentatron.parallel.world import single_process
from pentatron.train.session import run_training
from tests.harness import distributed
from tests.support import LLAMA, resolved
from tests.train.test_session import world_here

FOUR_STEPS = f"{LLAMA} --train-iters 4 --save-interval 1 --log-interval 1 --keep-checkpoints none"


def take_over(folder: Path) -> None:
    """Takes the lock, as a job on another machine does that considers this one dead."""
    record = {"host": "elsewhere", "pid": 7, "since": "2026-01-01T00:00:00+00:00", "token": "theirs"}
    (folder / LOCK_FILE).write_text(json.dumps(record))


def replace_lock(folder: Path) -> None:
    (folder / LOCK_FILE).unlink()
    take_over(folder)


def move(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


def move_and_begin_another(folder: Path) -> None:
    move(folder)
    (folder / "checkpoints").mkdir(parents=True)


def after_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[], object]) -> None:
    """Runs `action` at the beginning of the step after `step`."""
    honest = trainer_module.train_step

    def train_step(*given: object, **named: object) -> object:
        if given[4] == step:
            action()
        return honest(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer_module, "train_step", train_step)


def state_of(folder: Path) -> dict[Path, bytes]:
    """Returns the contents of all files except locks, as the run releases a lock that it still holds."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_FILE]
    return {path.relative_to(folder): path.read_bytes() for path in files}


LOSSES = {
    "the record is another's": (take_over, "was taken over by process 7 on elsewhere"),
    "the lock is another's": (replace_lock, r"\.lock was deleted, and .* used by process 7 on elsewhere"),
    "removed": (shutil.rmtree, "was moved or removed while this run wrote to it"),
    "moved": (move, "was moved or removed while this run wrote to it"),
    "moved, and another in its place": (
        move_and_begin_another,
        "is another folder than the one that this run opened",
    ),
}


@pytest.mark.parametrize("of", ["a", "a/checkpoints"])
@pytest.mark.parametrize("kind", LOSSES)
def test_an_owner_that_lost_its_folder_stops_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, of: str
) -> None:
    lose, said = LOSSES[kind]
    left: dict[str, dict[Path, bytes]] = {}

    def happen() -> None:
        lose(tmp_path / of)
        left["then"] = state_of(tmp_path)

    after_step(monkeypatch, 2, happen)
    with pytest.raises(
        AgreedError, match=rf"{said}.*; the run stops without writing there, and deletes nothing"
    ) as lost:
        run_training(resolved(f"{FOUR_STEPS} --run-dir {tmp_path / 'a'}"), single_process(), resumes=True)
    assert lost.value.exit_code == 2
    assert state_of(tmp_path) == left["then"], "nothing was written, nothing deleted"


def test_a_lock_that_was_merely_deleted_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    after_step(monkeypatch, 2, (tmp_path / "a" / "checkpoints" / LOCK_FILE).unlink)
    run_training(resolved(f"{FOUR_STEPS} --run-dir {tmp_path / 'a'}"), single_process(), resumes=True)
    assert (
        capsys.readouterr().out.count("checkpoints/.lock was deleted during the run; it was created again")
        == 1
    )
    assert (tmp_path / "a" / "checkpoints" / "step-00000004").is_dir()
    assert json.loads((tmp_path / "a" / "checkpoints" / LOCK_FILE).read_text())["released"]


def test_deleted_log_and_metrics_are_reported_and_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a"

    def delete() -> None:
        for name in ("train.log", "metrics.jsonl", "config.yaml"):
            (folder / name).unlink()

    after_step(monkeypatch, 2, delete)
    run_training(resolved(f"{FOUR_STEPS} --run-dir {folder}"), single_process(), resumes=True)
    said = capsys.readouterr().out
    for name in ("train.log", "metrics.jsonl"):
        line = f"note: {folder / name} was deleted or replaced during the run; it was created again"
        assert said.count(line) == 1 and line in (folder / "train.log").read_text()
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [
        3,
        4,
    ]
    assert f"run folder: {folder} (train.log, metrics.jsonl, loss.svg)" in said, "only what is there"


@distributed(world=2)
def test_all_ranks_stop_together(tmp_path: Path) -> None:
    world, patch = world_here(), pytest.MonkeyPatch()
    if world.is_first:
        after_step(patch, 2, lambda: move(tmp_path / "a"))
    words = f"{FOUR_STEPS} --micro-batch-size 2 --async-save --run-dir {tmp_path / 'a'}"
    with pytest.raises(AgreedError, match="was moved or removed"):
        run_training(resolved(words, 2), world, True)
    assert not (tmp_path / "a").exists() and (tmp_path / "moved" / "checkpoints" / "step-00000001").is_dir()

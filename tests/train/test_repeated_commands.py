"""Runs Megatron-style commands and restarts one after another in the same folders."""

import json
from pathlib import Path

import pytest

from pentatron.checkpoint.store import CheckpointStore
from pentatron.errors import UserError
from pentatron.parallel.world import single_process
from pentatron.settings.entry_points import PRETRAIN_GPT, TRAIN, EntryPoint
from pentatron.settings.resolve import gather, resolve
from pentatron.settings.settings import ProcessFacts
from pentatron.supervise.attempts import Attempt, LauncherState, identify_attempt
from pentatron.train.session import run_training
from tests.support import LLAMA, TINY

RUN = f"{TINY} {LLAMA} --global-batch-size 4 --eval-interval 0 --lr 1e-2 --log-interval 1 --progress-bar off --save-interval 2"


def train(words: str, attempt: Attempt | None = None, entry: EntryPoint = PRETRAIN_GPT) -> None:
    settings = resolve(gather(f"{RUN} {words}".split(), entry), ProcessFacts(1, 1, 1))
    run_training(settings, single_process(), entry.resumes, attempt=attempt or Attempt())


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def slurm(folder: Path, job: str, restarts: int) -> Attempt:
    return identify_attempt(folder, {"slurm": LauncherState(job, restarts)})


def saved(folder: Path) -> set[str]:
    return {
        path.name for path in folder.iterdir() if path.is_dir() and path.name.startswith(("step-", "iter_"))
    }


def test_without_save_each_run_starts_anew_and_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "runs" / "pretrain_gpt"
    for words, last in (
        ("--train-iters 4", 4),
        ("--hidden-size 64 --train-iters 3", 3),
        ("--train-iters 4", 4),
    ):
        train(words)
        assert steps(place) == list(range(1, last + 1)) and not (place / "checkpoints").exists()
    assert "note: no checkpoint is written, as --save is not given" in capsys.readouterr().out
    assert steps(place.with_name("pretrain_gpt.1")) == [1, 2, 3, 4]
    assert steps(place.with_name("pretrain_gpt.2")) == [1, 2, 3]


def test_with_save_alone_the_earlier_run_is_moved_aside(tmp_path: Path) -> None:
    place = tmp_path / "a"
    train(f"--save {place} --train-iters 4")
    train(f"--save {place} --train-iters 2 --hidden-size 64")
    assert saved(place) == {"step-00000002"} and saved(tmp_path / "a.1") == {"step-00000002", "step-00000004"}
    # A command that loads the folder resumes the run in it.
    train(f"--save {place} --load {place} --train-iters 4 --hidden-size 64")
    assert steps(place) == [1, 2, 3, 4] and not (tmp_path / "a.2").exists()


@pytest.mark.parametrize("kind", ["", "--ckpt-format torch_dist"])
def test_weights_alone_begin_at_step_0_each_time_in_the_folder_itself(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "a"
    train(f"--save {place} --train-iters 4 {kind}")
    words = f"--save {place} --load {place} --finetune {kind}"
    name = (lambda n: f"iter_{n:07d}") if kind else (lambda n: f"step-{n:08d}")
    train(f"{words} --train-iters 4 --lr 1e-3")
    assert steps(place) == [1, 2, 3, 4]
    assert saved(place) == {name(2), name(4), f"{name(2)}.before", f"{name(4)}.before"}
    # Other data and lengths: the run begins from the newest step, although others have a larger number.
    train(f"{words} --train-iters 2 --dataset-size 32")
    train(f"{words} --train-iters 6 --dataset-size 48")
    assert steps(place) == [1, 2, 3, 4, 5, 6]
    origin = json.loads((place / "began-from.json").read_text())["from"]
    assert Path(origin).name == f"{name(2)}.before-3"
    found, _ = CheckpointStore(place, None).newest_valid(verify=True, set_aside=False)
    assert found is not None and found.folder.name == name(6)
    assert not (tmp_path / "a.1").exists()


def test_weights_alone_from_elsewhere_move_the_earlier_run_aside(tmp_path: Path) -> None:
    base, place = tmp_path / "base", tmp_path / "a"
    train(f"--save {base} --train-iters 4")
    for _ in range(2):
        train(f"--load {base} --save {place} --finetune --train-iters 2")
        assert steps(place) == [1, 2]
    assert steps(tmp_path / "a.1") == [1, 2] and steps(base) == [1, 2, 3, 4]


@pytest.mark.parametrize("words", ["", "--load {base} --finetune", "--load {own} --finetune"])
def test_restart_resumes_and_a_repeated_command_starts_anew(tmp_path: Path, words: str) -> None:
    base, place = tmp_path / "base", tmp_path / "a"
    train(f"--save {base} --train-iters 2")
    # An earlier run of another job.
    train(f"--save {place} --train-iters 4", slurm(place, "1", 0))
    said = f"--save {place} {words.format(base=base, own=place)} --lr-decay-iters 6"
    # Job 2 was requeued before it reached this folder, so its restart 1 begins a new run.
    train(f"{said} --train-iters 2", slurm(place, "2", 1))
    assert steps(place) == [1, 2]
    train(f"{said} --train-iters 6", slurm(place, "2", 2))
    assert steps(place) == [1, 2, 3, 4, 5, 6], "the restart goes on"
    before = len(list(tmp_path.glob("a.*")))
    train(f"{said} --train-iters 6", slurm(place, "2", 2))
    assert steps(place) == [1, 2, 3, 4, 5, 6]
    moved = len(list(tmp_path.glob("a.*"))) - before
    in_place = str(place) in said.removeprefix(f"--save {place}")
    assert moved == (0 if in_place else 1), "typed twice within one start of the job"


def test_a_restart_before_the_first_save_begins_with_the_same_weights(tmp_path: Path) -> None:
    place = tmp_path / "a"
    train(f"--save {place} --train-iters 4")
    words = f"--save {place} --load {place} --finetune"
    train(f"{words} --train-iters 2")
    store = CheckpointStore(place, None)
    store.start_new_run()
    found, _ = store.newest_valid(verify=False, set_aside=False)
    assert found is not None and found.manifest.step == 2, (
        "the newest, although step 4 of an earlier run is there"
    )
    assert store.newest_saved_step() is None
    train(f"{words} --train-iters 2", Attempt(restarted=True))
    assert steps(place) == [1, 2] and store.newest_saved_step() == 2


def test_a_load_that_contradicts_the_run_is_refused_with_both_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("x", "y"):
        train(f"--save {tmp_path / name} --train-iters 2")
    place = f"--run-dir {tmp_path / 'a'} --train-iters"
    train(f"--load {tmp_path / 'x'} --finetune {place} 2", entry=TRAIN)
    with pytest.raises(
        UserError, match=rf"began with {tmp_path}/x/step-00000002, and --load names {tmp_path}/y; .*--fresh"
    ):
        train(f"--load {tmp_path / 'y'} --finetune {place} 4", entry=TRAIN)
    capsys.readouterr()
    train(f"--load {tmp_path / 'x'} --finetune {place} 4", entry=TRAIN)
    assert "has no effect: the run resumes from its own step 2" in capsys.readouterr().out
    train(f"--run-dir {tmp_path / 'b'} --train-iters 2", entry=TRAIN)
    with pytest.raises(UserError, match="began with new weights, and --load names"):
        train(f"--load {tmp_path / 'x'} --run-dir {tmp_path / 'b'} --train-iters 4", entry=TRAIN)


def test_another_run_in_a_folder_that_was_not_chosen_comes_first_in_the_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train("--train-iters 2", entry=TRAIN)
    with pytest.raises(
        UserError,
        match=r"^another run is in runs/2l-32h-synthetic; give another --run-dir: the data is not",
    ):
        train("--train-iters 4 --dataset-size 32", entry=TRAIN)
    with pytest.raises(UserError, match=r"^the data is not"):
        train("--train-iters 4 --dataset-size 32 --run-dir runs/2l-32h-synthetic", entry=TRAIN)


def test_input_files_are_not_moved_aside(tmp_path: Path) -> None:
    place = tmp_path / "a"
    train(f"--save {place} --train-iters 2")
    (place / "huggingface").mkdir()
    (place / "huggingface" / "vocab.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"vocab\.json is a file of the earlier run in .*, which would be moved aside"
    ):
        train(f"--save {place} --train-iters 2 --vocab-file {place}/huggingface/vocab.json")
    assert saved(place) == {"step-00000002"}

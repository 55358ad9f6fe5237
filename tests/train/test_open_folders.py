"""Tests what a start does to its folders: it moves only files of a run, and a folder has one writer."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pentatron.checkpoint.lock import lock_folder
from pentatron.errors import UserError
from pentatron.parallel.world import single_process
from pentatron.settings.files import HEADER
from pentatron.train.open_folders import list_contents
from pentatron.train.session import Session, open_session, run_training
from tests.support import LLAMA, resolved

TWO_STEPS = f"{LLAMA} --train-iters 2 --save-interval 1"


@contextlib.contextmanager
def opened(folder: Path, words: str = "", resumes: bool = True) -> Iterator[Session]:
    """Opens a session, which locks its folders, and builds nothing."""
    settings = resolved(f"{LLAMA} --run-dir {folder} {words}")
    with open_session(settings, single_process(), resumes) as session:
        yield session


def train(folder: Path, words: str = "", resumes: bool = True) -> None:
    run_training(resolved(f"{TWO_STEPS} --run-dir {folder} {words}"), single_process(), resumes)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


def test_a_project_with_a_data_folder_is_refused_by_a_script_that_starts_anew(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "data").mkdir(parents=True)
    (project / ".git").mkdir()
    (project / "thesis.tex").write_text("precious")
    with (
        pytest.raises(UserError, match=r"project contains data, which no run created.*--run-dir"),
        opened(project, resumes=False),
    ):
        pass
    assert {path.name for path in project.iterdir()} == {"data", ".git", "thesis.tex"}, "not even a lock"
    assert [path.name for path in tmp_path.iterdir()] == ["project"]
    # A run that moves nothing may write there, and files of others stay in place for good.
    train(project)
    train(project, "--fresh")
    assert {"data", ".git", "thesis.tex"} <= names(project) and names(tmp_path / "project.1").isdisjoint(
        {"data", ".git", "thesis.tex"}
    )
    assert {"checkpoints", "metrics.jsonl", "config.yaml", "train.log"} <= names(tmp_path / "project.1")


@pytest.mark.parametrize("name", ["metrics.jsonl", "sample.txt", "config.yaml", "job.json"])
def test_a_file_that_no_run_made_is_not_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine: too")
    with pytest.raises(UserError, match=rf"{name} is not the file of a run.*--run-dir"), opened(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [name] and (
        tmp_path / name
    ).read_text() == "mine: too"


def test_names_alone_make_no_run(tmp_path: Path) -> None:
    """Steps of Megatron-LM and a user's log with the name of a run's file are not a run."""
    (tmp_path / "iter_0000004").mkdir()
    (tmp_path / "iter_0000004" / "common.pt").write_text("theirs")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    (tmp_path / "train.log").write_text("mine")
    found = list_contents(tmp_path)
    assert not found.holds_run and not found.made and len(found.others) == 3
    with pytest.raises(
        UserError, match=r"contains iter_0000004, latest_checkpointed_iteration\.txt, which no run created"
    ):
        train(tmp_path, f"--save {tmp_path}", resumes=False)


def test_files_of_others_among_those_of_a_run_stay(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    train(folder)
    (folder / "notes.txt").write_text("mine")
    (folder / "data").mkdir()
    (folder / "checkpoints" / "notes.txt").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "rank-0.csv").write_text("mine")
    (folder / "memory").symlink_to(tmp_path / "elsewhere")
    train(folder, "--fresh --seed 5")
    assert (folder / "checkpoints" / "notes.txt").read_text() == (folder / "notes.txt").read_text() == "mine"
    assert (folder / "memory").is_symlink() and (folder / "data").is_dir()
    assert {path.name for path in (tmp_path / "a.1" / "checkpoints").iterdir()} >= {
        "step-00000001",
        "step-00000002",
    }
    first, second = (
        json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0]) for name in ("a.1", "a")
    )
    assert first["step"] == second["step"] == 1 and first["loss"] != second["loss"], "from new weights"


def test_steps_at_any_depth_below_the_run_are_moved_with_it(tmp_path: Path) -> None:
    save = f"--save {tmp_path}/a/deep/er"
    train(tmp_path / "a", save)
    with opened(tmp_path / "a", f"{save} --fresh"):
        assert not list((tmp_path / "a" / "deep" / "er").glob("step-*"))
    assert len(list((tmp_path / "a.1" / "deep" / "er").glob("step-*"))) == 2


def test_a_linked_folder_of_checkpoints_stays_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "disk" / "steps").mkdir(parents=True)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "checkpoints").symlink_to(tmp_path / "disk" / "steps")
    train(tmp_path / "a")
    with opened(tmp_path / "a", "--fresh"):
        assert (tmp_path / "a" / "checkpoints").resolve() == tmp_path / "disk" / "steps"
        assert not list((tmp_path / "disk" / "steps").glob("step-*"))
    assert len(list((tmp_path / "disk" / "steps.1").glob("step-*"))) == 2


@pytest.mark.parametrize("words", [".", "..", "{tmp_path}/link"])
def test_the_current_folder_is_not_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    here = tmp_path / "here"
    train(here)
    (tmp_path / "link").symlink_to(here)
    monkeypatch.chdir(here if words != ".." else here / "checkpoints")
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file() and path.name != ".lock"}
    with (
        pytest.raises(
            UserError, match=r"here is (the|around the) current folder, and the run in it .*--run-dir"
        ),
        opened(Path(words.format(tmp_path=tmp_path)), "--fresh"),
    ):
        pass
    assert before == {path: path.read_bytes() for path in before} and not (tmp_path / "here.1").exists()


def test_the_home_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "users" / "me"))
    (tmp_path / "users" / "me").mkdir(parents=True)
    for place, said in (("users/me", "your home folder"), ("users", "around your home folder")):
        with (
            pytest.raises(UserError, match=rf"is (a folder )?{said}.*--run-dir"),
            opened(tmp_path / place, "--fresh"),
        ):
            pass
        with (
            pytest.raises(UserError, match=said),
            opened(tmp_path / "a", f"--fresh --save {tmp_path / place}"),
        ):
            pass
    assert not (tmp_path / "a").exists() and not list((tmp_path / "users" / "me").iterdir())


def test_failed_move_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "a")
    before = sorted(path.relative_to(tmp_path) for path in (tmp_path / "a").rglob("*"))
    honest = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name == "train.log":
            raise OSError(18, "Invalid cross-device link")
        return honest(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with (
        pytest.raises(UserError, match=r"cannot be moved to .*a\.1 \(Invalid cross-device link\)"),
        opened(tmp_path / "a", "--fresh"),
    ):
        pass
    assert before == sorted(path.relative_to(tmp_path) for path in (tmp_path / "a").rglob("*"))


def test_the_lock_is_held_from_before_the_move_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "a")
    inode = (tmp_path / "a" / ".lock").stat().st_ino
    with opened(tmp_path / "a", "--fresh"):
        assert (tmp_path / "a" / ".lock").stat().st_ino == inode, (
            "another job cannot have locked another file"
        )
        assert not (tmp_path / "a.1" / ".lock").exists()
        with pytest.raises(UserError, match="another job is using"), opened(tmp_path / "a", "--fresh"):
            pass
    assert not (tmp_path / "a.2").exists()


@pytest.mark.parametrize(
    "other",
    [
        "--run-dir {0}/X --save {0}/R/checkpoints",
        "--run-dir {0}/R/checkpoints",
        "--run-dir {0}/R --save {0}/Y",
    ],
)
def test_one_folder_of_checkpoints_has_one_writer(tmp_path: Path, other: str) -> None:
    with (
        opened(tmp_path / "R"),
        pytest.raises(UserError, match=r"another job is using .*/R.* \(process \d+"),
        opened(tmp_path / "unused", other.format(tmp_path)),
    ):
        pass
    with (
        opened(tmp_path / "Z", f"--save {tmp_path}/Z/a/ck"),
        pytest.raises(UserError, match="another job is using"),
        lock_folder(tmp_path / "Z" / "a" / "ck"),
    ):
        pass


def test_a_job_that_is_refused_leaves_no_lock(tmp_path: Path) -> None:
    """It does not replace a deleted lock either: the owner would consider its folder taken over."""
    with opened(tmp_path / "R") as session:
        (tmp_path / "R" / ".lock").unlink()
        with pytest.raises(UserError, match=r"another job is using .*checkpoints"), opened(tmp_path / "R"):
            pass
        assert not (tmp_path / "R" / ".lock").exists()
        session.folders.require()
    assert json.loads((tmp_path / "R" / ".lock").read_text())["released"]


DAMAGE = {
    "empty": lambda text: b"",
    "NULs": lambda text: bytes(len(text)),
    "half of the header": lambda text: text[:20],
    "half": lambda text: text[:-30],
    "a tail of NULs": lambda text: text[:-30] + bytes(30),
    "a flipped bit": lambda text: text[:500] + bytes([text[500] ^ 128]) + text[501:],
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_config_is_set_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    config = tmp_path / "a" / "config.yaml"
    config.parent.mkdir()
    (tmp_path / "a" / "job.json").write_text('{"launchers": {}, "foreign": []}')
    damaged = DAMAGE[kind]((HEADER + "\n\nrun:\n" + "  seed: 1234  # default\n" * 50).encode())
    config.write_bytes(damaged)
    with opened(tmp_path / "a"):
        assert f"note: {config} is damaged (" in capsys.readouterr().out
        assert not config.exists()
    assert (tmp_path / "a" / "config.yaml.damaged-1").read_bytes() == damaged


def test_run_resumes_without_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "a", "--train-iters 1")
    written = (tmp_path / "a" / "config.yaml").read_bytes()
    (tmp_path / "a" / "config.yaml").write_bytes(b"")
    train(tmp_path / "a")
    assert "resuming at step 1 of 2" in capsys.readouterr().out
    assert (tmp_path / "a" / "config.yaml").read_bytes().startswith(written[:100])


def test_an_empty_config_in_a_folder_without_a_run_is_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match="is not the file of a run"), opened(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_config_is_never_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "a", "--train-iters 1")
    before = (tmp_path / "a" / "config.yaml").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with opened(tmp_path / "a", "--seed 7") as session:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            session.folder.write_config(session.resolved)
        monkeypatch.undo()
    assert (tmp_path / "a" / "config.yaml").read_bytes() == before


def test_half_a_file_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    (tmp_path / "config.yaml.7.tmp").write_text("mine")
    with opened(tmp_path):
        (tmp_path / "config.yaml.8.tmp").write_text("half")
    for _ in range(2):
        with opened(tmp_path):
            assert [path.name for path in tmp_path.glob("*.tmp")] == ["config.yaml.7.tmp"], (
                "there before any run"
            )


def test_folders_that_a_run_makes_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pentatron.files as files

    synced: list[Path] = []
    monkeypatch.setattr(files, "fsync_folder", synced.append)
    with opened(tmp_path / "new" / "run"):
        pass
    assert synced[:3] == [tmp_path, tmp_path / "new", tmp_path / "new" / "run"]

"""Tests which steps are kept: the newest, multiples of `retain`, and always a verified one."""

from pathlib import Path

import pytest

import pentatron.checkpoint.store as store_module
from pentatron.checkpoint import format
from pentatron.checkpoint.format import Manifest
from pentatron.checkpoint.save import Saver
from pentatron.checkpoint.store import TRACKER, CheckpointStore
from pentatron.checkpoint.verify import VerificationProblem
from pentatron.errors import UserError
from tests.checkpoint.steps import ALONE, DATA, newest, save, share
from tests.support import resolved


def numbers(store: CheckpointStore) -> list[int]:
    return [int(step.name.removeprefix("step-")) for step in store.steps()]


def test_every_so_many_steps_stay_for_good(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2, retain=20)
    for step in range(10, 80, 10):
        save(store, step)
    assert numbers(store) == [20, 40, 60, 70]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the names of the steps that are verified after a save."""
    found: list[str] = []
    honest = store_module.verify_rank_share

    def counting(
        folder: Path, manifest: Manifest, rank: int, ranks: int, cold: bool
    ) -> VerificationProblem | None:
        found.append(folder.name)
        return honest(folder, manifest, rank, ranks, cold)

    monkeypatch.setattr(store_module, "verify_rank_share", counting)
    return found


def test_step_is_removed_only_if_a_kept_one_was_verified(tmp_path: Path, read: list[str]) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in range(1, 9):
        save(store, step)
    assert read == ["step-00000004", "step-00000007"], "not every step: one in three is always there"
    trusted = CheckpointStore(tmp_path, keep=3)
    trusted.mark_verified(tmp_path / "step-00000008")
    read.clear()
    save(trusted, 9)
    assert read == [], "what a run was resumed from has been read"
    for step in range(10, 13):
        save(CheckpointStore(tmp_path, keep=3, verify=False), step)
    assert read == [] and numbers(store) == [10, 11, 12]


def test_a_new_step_that_is_damaged_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification finds a lost write before the only good step is removed."""
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    honest, rename = CheckpointStore.place, Path.rename

    def full(path: Path, target: Path) -> Path:
        if "damaged" in target.name:
            raise OSError(28, "No space left on device")
        return rename(path, target)

    def place(self: CheckpointStore, temporary: Path, manifest: Manifest) -> Path:
        final = honest(self, temporary, manifest)
        content = bytearray((final / DATA).read_bytes())
        content[-3] ^= 1
        (final / DATA).write_bytes(content)
        return final

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointStore, "place", place)
        with pytest.raises(UserError, match=r"step 2 could not be saved.*sha256 is .*weights/b is damaged"):
            save(store, 2)
    assert newest(store) == (1, []) and [p.name for p in store.damaged()] == ["step-00000002.damaged"]
    assert (tmp_path / "latest").read_text() == "step-00000001\n" and (tmp_path / TRACKER).read_text() == "1"
    with monkeypatch.context() as patched:
        patched.setattr(CheckpointStore, "place", place)
        patched.setattr(Path, "rename", full)
        with pytest.raises(UserError, match=r"step 3 could not be saved.*weights/b is damaged"):
            save(store, 3)
    assert (tmp_path / "step-00000001").is_dir() and newest(store)[0] == 1
    save(store, 4)
    assert numbers(store) == [4], "control"


def test_tracker_files_are_written_and_never_trusted(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    for step in (5, 20):
        save(store, step)
    assert (tmp_path / TRACKER).read_text() == "20"
    for text in ("", "5\n", "step-00000099\n", "release"):
        for name in ("latest", TRACKER):
            (tmp_path / name).write_text(text)
        assert newest(store) == (20, [])
    (tmp_path / "latest").unlink()
    assert newest(store) == (20, [])


def test_partial_save_is_removed_before_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial save may be what fills the disk."""
    store = CheckpointStore(tmp_path, keep=None)
    save(store, 1)
    (tmp_path / ".step-00000002.abcd").mkdir()
    seen: list[list[Path]] = []
    honest = format.write_rank_file
    monkeypatch.setattr(
        format,
        "write_rank_file",
        lambda path, parts: seen.append(list(tmp_path.glob(".step-*"))) or honest(path, parts),
    )
    save(store, 3)
    assert [[path.name.split(".")[1] for path in paths] for paths in seen] == [["step-00000003"]]


def test_steps_that_would_never_be_saved_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"--save-retain-interval 5 is not a multiple of --save-interval 2.* such as 6"
    ):
        resolved("--mock-data --train-iters 10 --save-interval 2 --save-retain-interval 5")


def test_a_step_is_saved_also_where_nothing_can_point_to_it(tmp_path: Path) -> None:
    """`latest` is informational: if it cannot be written, that is reported, and the step is saved."""
    store = CheckpointStore(tmp_path, keep=None)
    (tmp_path / "latest").mkdir(parents=True)
    (tmp_path / "latest" / "in the way").touch()
    saver = Saver(store, ALONE, background=False, say=print)
    saver.begin(7, share(ALONE, 7.0), [], {}, {}, {})
    saved = saver.commit_pending(wait=True)
    assert saved is not None and saved.folder.is_dir() and "`latest` could not be updated" in saved.note
    assert newest(store) == (7, [])


def test_pointers_follow_when_the_newest_step_is_set_aside(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    for step in (1, 2):
        save(store, step)
    (tmp_path / "step-00000002" / DATA).unlink()
    assert newest(store)[0] == 1
    assert (tmp_path / "latest").read_text() == "step-00000001\n" and (tmp_path / TRACKER).read_text() == "1"

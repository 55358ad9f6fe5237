"""Tests saves in the format torch_dist: every rank learns of a failure, and no good step is lost."""

import resource
from pathlib import Path

import pytest
import torch

import pentatron.checkpoint.store as store_module
from pentatron.checkpoint.store import CheckpointStore
from pentatron.errors import UserError
from pentatron.generate.source import ModelLocation
from pentatron.interchange.store import create_store
from pentatron.parallel.sharding import Fragment
from tests.checkpoint.steps import ALONE, newest, whole
from tests.support import resolved

MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 61 --seq-length 16"


def store_in(folder: Path, more: str = "") -> CheckpointStore:
    return create_store(resolved(f"{MODEL} --ckpt-format torch_dist --save {folder} {more}").config)


def parts() -> list[Fragment]:
    return [whole("weights/embedding.word.weight", torch.rand(61, 32)), whole("rng/some", torch.rand(4000))]


def save(store: CheckpointStore, step: int) -> Path:
    config = resolved(MODEL).config.nested()
    return store.save(step, parts(), {}, {"step": step}, config, ALONE)


@pytest.mark.parametrize("room", [0, 3000, 9000])
def test_full_disk_is_reported(tmp_path: Path, room: int) -> None:
    """The disk is full in torch's writer, in what it buffers until the end, or in the file beside it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        wrote = store_in(tmp_path).write_own(tmp_path, 0, parts())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (wrote.failure, wrote.mistake) == ("File too large", "")


def test_folder_missing_on_one_rank_is_reported(tmp_path: Path) -> None:
    wrote = store_in(tmp_path).write_own(tmp_path / "elsewhere", 1, parts())
    assert wrote.failure == "No such file or directory"


@pytest.mark.parametrize("damaged", ["__0_0.distcp", "manifest.json"])
def test_run_with_only_damaged_steps_is_refused(tmp_path: Path, damaged: str) -> None:
    """A second start, with the step set aside, is refused too, since a supervisor starts a run again."""
    (save(store_in(tmp_path), 1) / damaged).unlink()
    source = ModelLocation(tmp_path, is_huggingface=False)
    for _ in range(2):
        with pytest.raises(UserError, match=r"no checkpoint in .* is usable .*iter_0000001.*--fresh"):
            source.newest_step(verify=True, set_aside=True)


def test_a_step_saved_again_takes_the_place_of_the_first_only_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(tmp_path)
    first = save(store, 1)
    content = (first / "__0_0.distcp").read_bytes()

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(store_module, "write_new_synced", full)
        with pytest.raises(UserError, match=r"could not be saved.*earlier checkpoints are intact"):
            save(store, 1)
    assert newest(store) == (1, []) and (first / "__0_0.distcp").read_bytes() == content
    save(store, 1)
    assert newest(store) == (1, []) and (first / "__0_0.distcp").read_bytes() != content, "control"


def test_a_kill_between_two_renames_loses_neither_copy_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill after the first rename leaves no step of that name; the next reader restores the first copy."""
    store = store_in(tmp_path)
    first = save(store, 1)
    content = (first / "__0_0.distcp").read_bytes()
    honest = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.name.startswith(".step-"):
            raise KeyboardInterrupt
        return honest(path, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "rename", killed)
        save(store, 1)
    assert not first.exists()
    assert newest(store) == (1, []) and (first / "__0_0.distcp").read_bytes() == content
    store.remove_leftovers()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [first.name]


def test_unlisted_distcp_file_is_damage(tmp_path: Path) -> None:
    """A folder with files of several steps may also lack files of its own."""
    store = store_in(tmp_path)
    (save(store, 1) / "__9_0.distcp").write_bytes(b"of another step")
    number, (complaint,) = newest(store)
    assert number is None and "__9_0.distcp is not listed in manifest.json" in complaint

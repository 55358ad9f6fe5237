"""Tests async saves: equal files, no failure lost, no partial step."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pentatron.checkpoint.format as parts_module
from pentatron.checkpoint.save import HostCopy, SavedStep, Saver
from pentatron.checkpoint.store import CheckpointStore
from pentatron.errors import UserError
from pentatron.parallel.collectives import Group
from pentatron.parallel.sharding import Fragment
from tests.checkpoint.steps import ALONE, load, newest, save, share, whole
from tests.harness import RanksFailed, distributed, run_distributed


def saver(folder: Path, group: Group = ALONE, say: Callable[[str], None] = print) -> Saver:
    return Saver(CheckpointStore(folder, keep=None), group, background=True, say=say)


def begin(saving: Saver, step: int, parts: list[Fragment] | None = None) -> None:
    held = share(saving.group, float(step)) if parts is None else parts
    own = {f"own/{saving.group.rank}": torch.tensor([step])}
    saving.begin(step, held[1:], held[:1], own, {"step": step}, {"model": {"n": 1}})


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@distributed(world=2)
def test_files_and_manifest_are_those_of_a_save_in_the_foreground(tmp_path: Path) -> None:
    group = Group(dist.get_rank(), 2, dist.group.WORLD)
    saving = saver(tmp_path / "background", group)
    for step in (3, 4):
        begin(saving, step)
        saved = saving.commit_pending(wait=True)
        assert saved == SavedStep(step, tmp_path / "background" / f"step-0000000{step}")
        own = {f"own/{group.rank}": torch.tensor([step])}
        expected = save(CheckpointStore(tmp_path / "now", keep=None), step, group, **own)
        assert content(saved.folder) == content(expected)
    assert saving.commit_pending(wait=True) is None, "there is nothing more to wait for"


def hold_writing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Delays all writes until the returned event is set."""
    go_on, honest = threading.Event(), parts_module.write_tensors

    def late(*arguments: Any) -> Any:
        assert go_on.wait(60)
        return honest(*arguments)

    monkeypatch.setattr(parts_module, "write_tensors", late)
    return go_on


def test_later_changes_do_not_reach_the_saved_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = hold_writing(monkeypatch)
    saving, values = saver(tmp_path), torch.arange(12.0)
    flipped = torch.arange(6.0).view(2, 3).t()
    begin(saving, 1, [whole("a", values[:4]), whole("b", values[4:]), whole("c", flipped)])
    values[:4] = -1
    assert saving.commit_pending(wait=False) is None
    saving.wait_until_copied()
    values.zero_()
    flipped.zero_()
    assert newest(saving.store)[0] is None, "nothing is there before it is complete"
    go_on.set()
    assert saving.commit_pending(wait=True) is not None
    found, _ = saving.store.newest_valid(verify=True, set_aside=False)
    assert found is not None
    loaded = load(found, "a", "b", "c")
    assert loaded["a"].tolist() == [0, 1, 2, 3] and loaded["b"].tolist() == list(range(4, 12))
    assert loaded["c"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_the_buffer_is_used_again() -> None:
    copy, values = HostCopy(), [whole("a", torch.ones(3, 5)), whole("b", torch.ones(7, dtype=torch.bfloat16))]
    first = copy.begin(values, [])()
    again = copy.begin(values[1:], values[:1])()
    assert [f.values.data_ptr() for f in first] == [f.values.data_ptr() for f in again]
    assert all(torch.equal(f.values, v.values) for f, v in zip(again, values, strict=True))


def test_the_next_save_waits_and_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, said = hold_writing(monkeypatch), []
    saving = saver(tmp_path, say=said.append)
    for step in (1, 2, 3):
        go_on.clear()
        begin(saving, step)
        threading.Timer(0.05, go_on.set).start()
        saved = saving.wait_for_previous()
        assert saved is not None and saved.step == step
    assert len(said) == 1 and "the checkpoint of step 1 is still being written" in said[0]


@distributed(world=2)
def test_write_error_of_one_rank_is_raised_on_all_and_keeps_the_older_step(tmp_path: Path) -> None:
    """A limit on the size of files acts as a full disk does: a partial write, then an error."""
    import resource

    group = Group(dist.get_rank(), 2, dist.group.WORLD)
    saving = saver(tmp_path, group)
    begin(saving, 1)
    assert saving.commit_pending(wait=True) is not None
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if group.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    big = [Fragment("weights/big", (8000, 2), (4000 * group.rank, 0), torch.zeros(4000, 2))]
    begin(saving, 2, big)
    with pytest.raises(
        UserError, match=r"step 2 could not be saved to .*\(rank 1: File too large; .* intact"
    ):
        saving.commit_pending(wait=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    dist.barrier()
    assert newest(saving.store) == (1, [])
    assert not list(tmp_path.glob(".step-*"))
    dist.barrier()
    begin(saving, 3, big)
    assert saving.commit_pending(wait=True) is not None, "control: with room, it is saved"


def die_while_writing(folder: Path, moment: str) -> None:
    """Runs on a forked rank, which it kills."""
    honest = parts_module.write_tensors

    def killed(path: Path, tensors: Any) -> Any:
        if moment == "in a shard":
            path.write_bytes(b"half")
        else:
            honest(path, tensors)
        os.kill(os.getpid(), signal.SIGKILL)

    parts_module.write_tensors = killed
    begin(saver(folder), 2)
    time.sleep(60)


@pytest.mark.parametrize("moment", ["in a shard", "before the manifest"])
def test_a_kill_while_the_background_writes_leaves_the_older_step(tmp_path: Path, moment: str) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    save(store, 1)
    with pytest.raises(RanksFailed, match=r"^rank 0 of 1 was killed by SIGKILL"):
        run_distributed(die_while_writing, 1, folder=tmp_path, moment=moment)
    assert list(tmp_path.glob(".step-*")), "control: it was under way"
    assert newest(store) == (1, [])


def test_failed_begin_does_not_block_updates(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    saving = saver(tmp_path / "file")
    with pytest.raises(UserError, match="could not be saved"):
        begin(saving, 1)
    saving.wait_until_copied()
    assert saving.commit_pending(wait=True) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies from a GPU go through a stream of its own")
def test_a_copy_of_a_gpu_is_of_the_moment_it_was_begun() -> None:
    values, changing = torch.randn(1000, 1000, device="cuda"), torch.randn(10, device="cuda")
    expected = values.cpu(), changing.cpu()
    copy = HostCopy()
    parts = [
        Fragment(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in (("a", values), ("b", changing))
    ]
    finish = copy.begin(parts[:1], parts[1:])
    changing.zero_()
    found = {part.tensor: part.values for part in finish()}
    copy.wait()
    assert torch.equal(found["a"], expected[0]) and torch.equal(found["b"], expected[1])


def test_a_thread_copies_on_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread selects its rank's GPU, as every rank would allocate memory on the default one."""
    done: list[tuple[str, Any]] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            done.append(("stream", device.index))

        def wait_event(self, event: Any) -> None: ...
        def synchronize(self) -> None: ...

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(("device", device.index)))
    HostCopy()._copy([], {torch.device("cuda", 3): None})
    assert done == [("device", 3), ("stream", 3)]

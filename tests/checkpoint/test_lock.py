import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

import pytest

import pentatron.checkpoint.lock as lock_module
from pentatron.checkpoint.lock import lock_folder
from pentatron.errors import FolderLost, UserError


def test_a_second_job_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    with (
        lock_folder(tmp_path),
        pytest.raises(UserError, match=rf"process {os.getpid()} on .*--run-dir"),
        lock_folder(tmp_path),
    ):
        pass
    with lock_folder(tmp_path):
        pass


def test_the_lock_of_a_killed_job_is_free(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from pentatron.checkpoint.lock import lock_folder\n"
        "with lock_folder(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert (tmp_path / ".lock").exists()
    with lock_folder(tmp_path):
        pass


def leave_a_record(folder: Path, **said: object) -> None:
    owner = {"host": "another-machine", "pid": 7, "since": "2026-01-01T00:00:00+00:00", "token": "t", **said}
    (folder / ".lock").write_text(json.dumps(owner))


def on_a_shared_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "_file_system", lambda folder: "nfs4")
    monkeypatch.setattr(lock_module, "_STALE_SECONDS", 0.6)
    monkeypatch.setattr(lock_module, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(lock_module, "_BEAT_SECONDS", 0.1)


def test_a_job_that_lives_on_another_machine_is_met_by_its_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between machines flock may not work: nothing holds it here, and only the record shows the owner."""
    on_a_shared_disk(monkeypatch)
    leave_a_record(tmp_path)
    living = threading.Timer(0.3, lambda: os.utime(tmp_path / ".lock"))
    living.start()
    with pytest.raises(UserError, match="process 7 on another-machine"), lock_folder(tmp_path):
        pass
    living.join()


def test_lock_of_a_silent_owner_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_shared_disk(monkeypatch)
    said: list[str] = []
    leave_a_record(tmp_path)
    with lock_folder(tmp_path, said.append):
        assert len(said) == 1 and "process 7 on another-machine" in said[0]
        first = (tmp_path / ".lock").stat().st_mtime
        deadline = time.monotonic() + 20
        while (tmp_path / ".lock").stat().st_mtime == first:
            assert time.monotonic() < deadline, "who holds it says so again and again"
            time.sleep(0.02)
    # An owner that has released the lock, or that this machine's kernel would know, is not waited for.
    with lock_folder(tmp_path, said.append):
        pass
    leave_a_record(tmp_path, host=socket.gethostname())
    with lock_folder(tmp_path, said.append):
        pass
    assert len(said) == 1


def test_the_disk_of_a_folder_is_found_out(tmp_path: Path) -> None:
    assert lock_module._file_system(tmp_path) not in ("", "proc")
    assert lock_module._file_system(Path("/proc/self")) == "proc"


def test_a_lock_file_that_is_replaced_before_it_is_locked_keeps_out_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job replaces the file between open and flock, so that a lock of the old inode is void."""
    (tmp_path / ".lock").touch()
    honest, held = fcntl.flock, contextlib.ExitStack()

    def flock(file: IO[str], how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", honest)
        (tmp_path / ".lock").unlink()
        held.enter_context(lock_folder(tmp_path))
        honest(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with held, pytest.raises(UserError, match="another job is using"), lock_folder(tmp_path):
        pass


def test_an_owner_asks_whether_the_folder_is_still_its_own(tmp_path: Path) -> None:
    said: list[str] = []
    with lock_folder(tmp_path, said.append) as lock:
        lock.require()
        (tmp_path / ".lock").write_text("")
        lock.require()
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid(), (
            "half a record names no owner"
        )
        (tmp_path / ".lock").unlink()
        lock.require(thorough=False)
        assert len(said) == 1 and "it was created again" in said[0]
        with pytest.raises(UserError, match="another job is using"), lock_folder(tmp_path):
            pass
        (tmp_path / ".lock").unlink()
        with lock_folder(tmp_path):
            with pytest.raises(FolderLost, match=rf"was deleted, and .* taken by process {os.getpid()} on"):
                lock.require(thorough=False)
            with pytest.raises(FolderLost, match="taken by"):
                lock.require(thorough=False)


def test_an_owner_that_slept_finds_its_folder_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imitates two machines, between which flock does not work."""
    on_a_shared_disk(monkeypatch)
    monkeypatch.setattr(lock_module, "_BEAT_SECONDS", 60.0)
    monkeypatch.setattr(fcntl, "flock", lambda file, how: None)
    with lock_folder(tmp_path) as first:
        monkeypatch.setattr(socket, "gethostname", lambda: "another-machine")
        with lock_folder(tmp_path) as second:
            with pytest.raises(
                FolderLost, match=f"was taken over by process {os.getpid()} on another-machine"
            ):
                first.require(thorough=False)
            first.renew()
            second.require()


def test_a_file_that_is_no_lock_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("mine")
    with pytest.raises(UserError, match="is not the lock of a job"), lock_folder(tmp_path):
        pass
    assert (tmp_path / ".lock").read_text() == "mine"


@pytest.mark.parametrize("kind", ["FIFO", "device", "folder"])
def test_special_file_is_not_opened_as_a_lock(tmp_path: Path, kind: str) -> None:
    """Opening a FIFO would block, and reading a device would not end."""
    path = tmp_path / ".lock"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/full")
    else:
        path.mkdir()
    with pytest.raises(UserError, match="is not the lock of a job"), lock_folder(tmp_path):
        pass

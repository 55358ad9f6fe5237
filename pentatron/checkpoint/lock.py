"""One run folder, one job.

Two locks, as neither is enough. The kernel's is free as soon as its holder ends, however it ends; but between machines that share a
folder it may not hold, if the file system was mounted so. The record names the owner, who makes it young again while it lives;
on another machine that is all there is to go by.
"""

import contextlib
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from pentatron.config.errors import UserError
from pentatron.config.parsing import parse_json

FILE_NAME = ".lock"
# How often the owner says that it lives, and when a silent one on another machine counts as gone.
_BEAT_SECONDS = 10.0
_STALE_SECONDS = 60.0
_LOOK_SECONDS = 1.0
# File systems of one machine, where the kernel knows every holder of its lock.
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay"})


@dataclass(frozen=True)
class Owner:
    """`token`: of this one holding, as process numbers come again. `released`: it ended in good order."""

    host: str
    pid: int
    since: str
    token: str = ""
    released: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


@contextmanager
def folder_lock(
    folder: Path,
    say: Callable[[str], None] | None = None,
    way_out: str = "stop it, or choose another --run-dir",
) -> Iterator[None]:
    """Holds the folder for this process. `say` tells why it takes a while, if an owner elsewhere may be gone or not.

    `way_out`: what somebody can do who does not want to wait.
    """
    path = folder / FILE_NAME
    with path.open("a+", encoding="utf-8") as file:
        before = _owner(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _refusal(folder, str(before or "its owner is not recorded"), way_out) from None
        if before is not None and not before.released and _may_be_unseen(before, folder):
            _wait_for_silence(path, before, say or (lambda text: None), way_out)
        owner = Owner(
            socket.gethostname(),
            os.getpid(),
            datetime.now().astimezone().isoformat(timespec="seconds"),
            secrets.token_hex(4),
        )
        _record(path, owner)
        with _living(path, owner):
            yield
        # Who comes next, from wherever, need not wait until we seem to be gone.
        with contextlib.suppress(OSError):
            if _owner(path) == owner:
                _record(path, replace(owner, released=True))


def is_in_use(folder: Path) -> bool:
    """Whether a process holds the folder just now, as far as the kernel knows."""
    try:
        with (folder / FILE_NAME).open("r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _may_be_unseen(owner: Owner, folder: Path) -> bool:
    """Whether the owner may live although the kernel's lock is free."""
    return owner.host != socket.gethostname() and _file_system(folder) not in _LOCAL


def _file_system(folder: Path) -> str:
    """Its type, by the mount that the folder is under; empty where the system does not tell."""
    found = ("", "")
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        mounted, kind = line.split(" - ")[0].split()[4], line.split(" - ")[1].split()[0]
        # Of mounts one over the other, the last one counts.
        if folder.resolve().is_relative_to(mounted) and len(mounted) >= len(found[0]):
            found = mounted, kind
    return found[1]


def _wait_for_silence(path: Path, owner: Owner, say: Callable[[str], None], way_out: str) -> None:
    """Refuses as soon as the owner shows that it lives; returns when it has been silent for long enough."""
    seen = path.stat().st_mtime
    if (left := _STALE_SECONDS - _age(path)) > 0:
        say(
            f"{path.parent} belonged to {owner}; its machine is asked for a sign of life, for {left:.0f} s at most ..."
        )
    while _age(path) < _STALE_SECONDS:
        if _owner(path) != owner or path.stat().st_mtime != seen:
            raise _refusal(path.parent, str(owner), way_out)
        time.sleep(_LOOK_SECONDS)


def _refusal(folder: Path, owner: str, way_out: str) -> UserError:
    return UserError(f"another job is using {folder} ({owner}); wait for it, {way_out}")


def _record(path: Path, owner: Owner) -> None:
    # In place: a new file of this name would have a lock of its own.
    path.write_text(json.dumps(asdict(owner)), encoding="utf-8")


def _owner(path: Path) -> Owner | None:
    try:
        return Owner(**parse_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _age(path: Path) -> float:
    """Seconds since the owner last said that it lives, by the clock of the disk, which both machines read."""
    probe = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


@contextmanager
def _living(path: Path, owner: Owner) -> Iterator[None]:
    """Says every now and then that the owner lives, as long as the record is ours."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(_BEAT_SECONDS):
            with contextlib.suppress(OSError):
                if _owner(path) == owner:
                    os.utime(path)

    thread = threading.Thread(target=beat, daemon=True, name="folder-lock")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=1)

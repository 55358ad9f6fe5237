"""One writer per folder: a run's folder, or a folder of checkpoints.

Two locks, as neither is enough. The kernel's (`flock` on `.lock`) is free as soon as its holder ends, however it ends; but between
machines that share a folder it may not hold, if the file system was mounted so. The record inside the file names the owner, who renews
its time while it lives; on another machine that is all there is to go by.

A lock belongs to an inode, and a path may get another one. So the inode is compared after locking, and again whenever the owner is
about to write (`FolderLock.require`): an owner whose folder was moved, removed or taken over stops before it writes.
"""

import contextlib
import errno
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
from typing import NoReturn, TextIO

from pentatron.checkpoint.untrusted import read_json
from pentatron.errors import FolderLost, UserError

FILE_NAME = ".lock"
# How often the owner says that it lives, and when a silent one on another machine counts as gone.
_BEAT_SECONDS = 10.0
_STALE_SECONDS = 60.0
_LOOK_SECONDS = 1.0
# Tries to lock a file that is deleted or replaced each time before the lock is there.
_TRIES = 100
_LONGEST_RECORD = 1 << 16
# File systems of one machine, where the kernel knows every holder of its lock.
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay"})
# What `stat` says of a path that is not there any more, a removed folder of a network file system included.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


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


class FolderLock:
    """A folder that this process holds. `say` gets a line where the lock file had to be made again."""

    def __init__(self, folder: Path, file: TextIO, say: Callable[[str], None]) -> None:
        self.folder, self.path = folder, folder / FILE_NAME
        # Why it is not ours any more.
        self.lost = ""
        self.owner = Owner(
            socket.gethostname(),
            os.getpid(),
            datetime.now().astimezone().isoformat(timespec="seconds"),
            secrets.token_hex(4),
        )
        self._file, self._say = file, say
        self._folder = folder.stat()
        self._is_new = os.fstat(file.fileno()).st_size == 0
        # The thread that renews the record, and the one that asks.
        self._one_at_a_time = threading.Lock()
        self._renewed = 0
        self._record(self.owner)

    def require(self, thorough: bool = True) -> None:
        """Raises `FolderLost` if the folder is not this process's any more; to be called before anything is written.

        Costs one `stat`. The record is read where its time is not the one that this process left, or if `thorough`.
        """
        with self._one_at_a_time:
            if self.lost:
                raise FolderLost(self.lost)
            try:
                there = _stat(self.path)
            except OSError:
                # A disk that does not answer says nothing of owners, and the write that follows meets it as well.
                return
            if there is None or not os.path.samestat(there, os.fstat(self._file.fileno())):
                self._lock_again()
            elif thorough or there.st_mtime_ns != self._renewed:
                self._require_record()

    def renew(self) -> None:
        """Gives the record a new time, as long as it is ours."""
        with self._one_at_a_time, contextlib.suppress(OSError):
            if read_owner(self.path) == self.owner:
                os.utime(self.path)
                self._renewed = self.path.stat().st_mtime_ns

    def release(self) -> None:
        # The next owner, on any machine, need not wait until this one seems to be gone.
        with self._one_at_a_time, contextlib.suppress(OSError):
            if not self.lost and read_owner(self.path) == self.owner:
                self._record(replace(self.owner, released=True))
        self._file.close()

    def withdraw(self) -> None:
        """For a job that is refused after it took the lock: removes the file if this lock made it, as if it had never been there.

        Another job that waits for this inode compares it with the path's, and tries again.
        """
        if self._is_new:
            self.path.unlink(missing_ok=True)

    def _require_record(self) -> None:
        recorded = read_owner(self.path)
        if recorded is None:
            # Cut short or damaged; the kernel's lock on this inode is ours.
            with contextlib.suppress(OSError):
                self._record(self.owner)
        elif recorded.token != self.owner.token:
            self._lose(f"{self.folder} was taken over by {recorded}")
        else:
            self._renewed = self.path.stat().st_mtime_ns

    def _lock_again(self) -> None:
        """`.lock` was deleted or replaced. Locks the file that is there now, unless another job was faster."""
        folder = _stat(self.folder)
        if folder is None:
            self._lose(f"{self.folder} was moved or removed while this run wrote to it")
        if not os.path.samestat(folder, self._folder):
            self._lose(f"{self.folder} is another folder than the one that this run opened")
        try:
            file = _locked(self.path)
        except BlockingIOError:
            owner = read_owner(self.path)
            if owner is not None and owner.token == self.owner.token:
                # The file is the one that this process holds: some network file systems change inode numbers.
                return
            self._lose(f"{self.path} was deleted, and {self.folder} taken by {owner or 'another job'}")
        except OSError as error:
            self._lose(f"{self.path} was deleted, and cannot be made again ({error.strerror or error})")
        owner = read_owner(self.path)
        if owner is not None and owner.token != self.owner.token:
            file.close()
            self._lose(f"{self.path} was deleted, and {self.folder} used by {owner}")
        self._file.close()
        self._file = file
        with contextlib.suppress(OSError):
            # A full disk; the kernel's lock is there.
            self._record(self.owner)
        self._say(
            f"note: {self.path} was deleted during the run; it was made again, as no other job uses the folder"
        )

    def _lose(self, how: str) -> NoReturn:
        self.lost = f"{how}; the run stops without writing there, and deletes nothing"
        raise FolderLost(self.lost)

    def _record(self, owner: Owner) -> None:
        # In place: a new file of this name would have a lock of its own.
        self.path.write_text(json.dumps(asdict(owner)), encoding="utf-8")
        self._renewed = self.path.stat().st_mtime_ns


@contextmanager
def folder_lock(
    folder: Path,
    say: Callable[[str], None] | None = None,
    way_out: str = "stop it, or choose another --run-dir",
) -> Iterator[FolderLock]:
    """Holds the folder for this process. `say` tells why it takes a while, if an owner elsewhere may be gone or not.

    `way_out`: what somebody can do who does not want to wait.
    """
    say = say or (lambda text: None)
    path = folder / FILE_NAME
    _require_lock_file(path)
    try:
        file = _locked(path)
    except BlockingIOError:
        raise _refusal(folder, str(read_owner(path) or "its owner is not recorded"), way_out) from None
    try:
        before = read_owner(path)
        if before is not None and not before.released and _may_be_unseen(before, folder):
            _wait_for_silence(path, before, say, way_out)
        lock = FolderLock(folder, file, say)
    except BaseException:
        file.close()
        raise
    with _living(lock):
        try:
            yield lock
        finally:
            lock.release()


def _require_lock_file(path: Path) -> None:
    """Refuses what is not a lock: it would be overwritten, or, if it is a FIFO or a device, read without end."""
    if not path.exists():
        return
    held = b"?"
    if path.is_file():
        with path.open("rb") as file:
            held = file.read(_LONGEST_RECORD)
    if held.strip(b"\0") and not held.startswith(b"{"):
        raise UserError(f"{path} is not the lock of a job; remove it, or choose another folder")


def _locked(path: Path) -> TextIO:
    """The file of this path, locked; BlockingIOError: another process holds it.

    Opens it again if it was deleted or replaced before the lock was taken: a lock on an unlinked inode excludes no other process.
    """
    for _ in range(_TRIES):
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there = _stat(path)
            if there is not None and os.path.samestat(there, os.fstat(file.fileno())):
                return file
        except BaseException:
            file.close()
            raise
        file.close()
    raise UserError(
        f"{path} is deleted again and again by another process, so it cannot be locked; end that process"
    )


def _stat(path: Path) -> os.stat_result | None:
    """None: it is not there. Other errors, such as those of a network that is away for a moment, are raised."""
    try:
        return path.stat()
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise


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
        if read_owner(path) != owner or path.stat().st_mtime != seen:
            raise _refusal(path.parent, str(owner), way_out)
        time.sleep(_LOOK_SECONDS)


def _refusal(folder: Path, owner: str, way_out: str) -> UserError:
    return UserError(f"another job is using {folder} ({owner}); wait for it, {way_out}")


def read_owner(path: Path) -> Owner | None:
    try:
        return Owner(**read_json(path))
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
def _living(lock: FolderLock) -> Iterator[None]:
    """Renews the record every now and then."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(_BEAT_SECONDS):
            lock.renew()

    thread = threading.Thread(target=beat, daemon=True, name="folder-lock")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=1)

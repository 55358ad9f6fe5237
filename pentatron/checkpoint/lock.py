"""Locks a run's folder or a folder of checkpoints for one writer.

Two locks, as neither is sufficient. The kernel's lock (`flock` on `.lock`) is released as soon as its holder
ends, but may not work between machines, depending on how the file system is mounted. The record in the file
names the owner, who updates its modification time as a heartbeat; on another machine only this is visible.

A lock belongs to an inode, and a path may get another inode. The inode is therefore compared after locking,
and again before the owner writes (`FolderLock.require`): an owner whose folder was moved, removed or taken
over stops before it writes.
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

from pentatron.checkpoint.manifest_checks import read_json
from pentatron.errors import FolderLost, UserError

LOCK_FILE = ".lock"
# Heartbeat interval, and age of the heartbeat after which an owner on another machine counts as dead.
_BEAT_SECONDS = 10.0
_STALE_SECONDS = 60.0
_POLL_SECONDS = 1.0
# Attempts to lock a file that is deleted or replaced before each lock is acquired.
_TRIES = 100
_LONGEST_RECORD = 1 << 16
# Local file systems, where the kernel knows every holder of the lock.
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay"})
# Errors of `stat` for a missing path. ESTALE: a removed folder of a network file system.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


@dataclass(frozen=True)
class Owner:
    """Record of the lock's owner.

    `token`: identifies this lock, as PIDs are reused. `released`: it ended normally.
    """

    host: str
    pid: int
    since: str
    token: str = ""
    released: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class FolderLock:
    """A folder locked by this process. `say` gets a message if the lock file had to be created again."""

    def __init__(self, folder: Path, file: TextIO, say: Callable[[str], None]) -> None:
        self.folder, self.path = folder, folder / LOCK_FILE
        # Why the lock was lost; empty while it is held.
        self.lost = ""
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        self.owner = Owner(socket.gethostname(), os.getpid(), since, secrets.token_hex(4))
        self._file, self._say, self._folder = file, say, folder.stat()
        self._is_new = os.fstat(file.fileno()).st_size == 0
        # Guards against the heartbeat thread.
        self._one_at_a_time = threading.Lock()
        self._renewed = 0
        self._record(self.owner)

    def require(self, thorough: bool = True) -> None:
        """Raises `FolderLost` if this process no longer holds the folder. Must be called before every write.

        Costs one `stat`. The record is read only if its modification time was changed by another process, or
        if `thorough`.
        """
        with self._one_at_a_time:
            if self.lost:
                raise FolderLost(self.lost)
            try:
                status = _stat(self.path)
            except OSError:
                # An I/O error does not say who the owner is, and the following write reports it.
                return
            if status is None or not os.path.samestat(status, os.fstat(self._file.fileno())):
                self._lock_again()
            elif thorough or status.st_mtime_ns != self._renewed:
                self._require_record()

    def renew(self) -> None:
        """Heartbeat: updates the record's modification time if it is still ours."""
        with self._one_at_a_time, contextlib.suppress(OSError):
            if read_owner(self.path) == self.owner:
                os.utime(self.path)
                self._renewed = self.path.stat().st_mtime_ns

    def release(self) -> None:
        """Marks the record as released and unlocks the file."""
        # So that the next owner, on any machine, need not wait for the heartbeat to time out.
        with self._one_at_a_time, contextlib.suppress(OSError):
            if not self.lost and read_owner(self.path) == self.owner:
                self._record(replace(self.owner, released=True))
        self._file.close()

    def remove_if_created(self) -> None:
        """Removes the lock file if this lock created it, for a job that is refused after locking.

        Another job waiting for this inode compares it with the path's, and retries.
        """
        if self._is_new:
            self.path.unlink(missing_ok=True)

    def _require_record(self) -> None:
        if (recorded := read_owner(self.path)) is None:
            # Truncated or damaged; the kernel's lock on this inode is held.
            with contextlib.suppress(OSError):
                self._record(self.owner)
        elif recorded.token != self.owner.token:
            self._lose(f"{self.folder} was taken over by {recorded}")
        else:
            self._renewed = self.path.stat().st_mtime_ns

    def _lock_again(self) -> None:
        """Locks the new file after `.lock` was deleted or replaced, unless another job was faster."""
        if (folder := _stat(self.folder)) is None:
            self._lose(f"{self.folder} was moved or removed while this run wrote to it")
        if not os.path.samestat(folder, self._folder):
            self._lose(f"{self.folder} is another folder than the one that this run opened")
        try:
            file = _locked(self.path)
        except BlockingIOError:
            owner = read_owner(self.path)
            if owner is not None and owner.token == self.owner.token:
                # The same file: some network file systems change inode numbers.
                return
            self._lose(f"{self.path} was deleted, and {self.folder} taken by {owner or 'another job'}")
        except OSError as error:
            self._lose(f"{self.path} was deleted, and cannot be created again ({error.strerror or error})")
        owner = read_owner(self.path)
        if owner is not None and owner.token != self.owner.token:
            file.close()
            self._lose(f"{self.path} was deleted, and {self.folder} used by {owner}")
        self._file.close()
        self._file = file
        with contextlib.suppress(OSError):
            # The disk may be full; the kernel's lock is held.
            self._record(self.owner)
        self._say(
            f"note: {self.path} was deleted during the run; it was created again, because no other job uses the folder"
        )

    def _lose(self, how: str) -> NoReturn:
        self.lost = f"{how}; the run stops without writing there, and deletes nothing"
        raise FolderLost(self.lost)

    def _record(self, owner: Owner) -> None:
        # Written in place: a new file would be another inode with another lock.
        self.path.write_text(json.dumps(asdict(owner)), encoding="utf-8")
        self._renewed = self.path.stat().st_mtime_ns


@contextmanager
def lock_folder(
    folder: Path,
    say: Callable[[str], None] = lambda text: None,
    advice: str = "stop it, or choose another --run-dir",
) -> Iterator[FolderLock]:
    """Context manager that locks the folder for this process.

    `say` gets a message while waiting for the heartbeat of an owner on another machine. `advice`: end of
    the error for a locked folder.
    """
    path = folder / LOCK_FILE
    _require_lock_file(path)
    try:
        file = _locked(path)
    except BlockingIOError:
        raise _refusal(folder, str(read_owner(path) or "its owner is not recorded"), advice) from None
    try:
        # On a local file system, acquiring the kernel's lock proves that the owner is dead.
        is_local, last = _file_system(folder) in _LOCAL, read_owner(path)
        if last and not is_local and not last.released and last.host != socket.gethostname():
            _wait_for_timeout(path, last, say, advice)
        lock = FolderLock(folder, file, say)
    except BaseException:
        file.close()
        raise
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(_BEAT_SECONDS):
            lock.renew()

    thread = threading.Thread(target=beat, daemon=True, name="folder-lock")
    thread.start()
    try:
        yield lock
    finally:
        ended.set()
        lock.release()
        thread.join(timeout=1)


def _require_lock_file(path: Path) -> None:
    """Refuses a file that is not a lock: it would be overwritten, or, if a FIFO or device, block the read."""
    content = b"?" if path.exists() else b""
    if path.is_file():
        with path.open("rb") as file:
            content = file.read(_LONGEST_RECORD)
    if content.strip(b"\0") and not content.startswith(b"{"):
        raise UserError(f"{path} is not the lock of a job; remove it, or choose another folder")


def _locked(path: Path) -> TextIO:
    """Opens and locks the file. Raises BlockingIOError if another process holds it.

    Retries if the file was deleted or replaced before it was locked: a lock on an unlinked inode excludes no
    other process.
    """
    for _ in range(_TRIES):
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = _stat(path)
            if status is not None and os.path.samestat(status, os.fstat(file.fileno())):
                return file
        except BaseException:
            file.close()
            raise
        file.close()
    raise UserError(f"another process keeps deleting {path}, so it cannot be locked; end that process")


def _stat(path: Path) -> os.stat_result | None:
    """Returns None if the path does not exist.

    Raises other errors, such as those of an unavailable network.
    """
    try:
        return path.stat()
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise


def is_locked(folder: Path) -> bool:
    """Whether a process holds the kernel's lock of the folder."""
    try:
        with (folder / LOCK_FILE).open("r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def _file_system(folder: Path) -> str:
    """Type of the file system the folder is mounted on, or an empty string if unknown."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    fields = (line.split(" - ") for line in lines)
    mounts = [(before.split()[4], after.split()[0]) for before, after in fields]
    holding = [mount for mount in mounts if folder.resolve().is_relative_to(mount[0])]
    # Of mounts on the same path, the last one is visible.
    return max(reversed(holding), key=lambda mount: len(mount[0]), default=("", ""))[1]


def _wait_for_timeout(path: Path, owner: Owner, say: Callable[[str], None], advice: str) -> None:
    """Returns when the owner's heartbeat has timed out; raises UserError as soon as it shows a heartbeat."""
    modified = path.stat().st_mtime
    if (left := _STALE_SECONDS - _age(path)) > 0:
        say(f"{path.parent} belonged to {owner}; waiting up to {left:.0f} s for its heartbeat ...")
    while _age(path) < _STALE_SECONDS:
        if read_owner(path) != owner or path.stat().st_mtime != modified:
            raise _refusal(path.parent, str(owner), advice)
        time.sleep(_POLL_SECONDS)


def _refusal(folder: Path, owner: str, advice: str) -> UserError:
    return UserError(f"another job is using {folder} ({owner}); wait for it, {advice}")


def read_owner(path: Path) -> Owner | None:
    try:
        return Owner(**read_json(path))
    except (OSError, ValueError, TypeError):
        return None


def _age(path: Path) -> float:
    """Seconds since the last heartbeat, by the clock of the file system, which both machines share."""
    probe = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)

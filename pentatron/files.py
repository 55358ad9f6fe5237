"""Durable file writes: temporary names, fsync and atomic rename.

A file is written under a temporary name in the same folder (a rename cannot cross file systems), synced with
fsync and renamed; then the folder, which stores the name, is synced. `write_file` and `atomic_write` do this
for one file, `atomic_folder` for a folder. Checkpoints and data files consist of several files; their
protocols (checkpoint/store.py, data/indexed_writer.py) are built from the functions here.

A killed process leaves its temporary files behind. The next writer removes them, unless a live process holds
their lock. Exclusive locks of folders, free disk space and scratch folders of commands are here too.
"""

import fcntl
import itertools
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

TEMPORARY_SUFFIX = ".tmp"


# --- fsync and rename ---


def fsync(file: IO[Any] | int) -> None:
    """Flushes an open file, or the file of a descriptor, to disk (fsync)."""
    if not isinstance(file, int):
        file.flush()
        file = file.fileno()
    os.fsync(file)


def fdatasync(descriptor: int) -> None:
    """Flushes the data of an open file to disk, with only the metadata needed to read it (fdatasync)."""
    os.fdatasync(descriptor)


def fsync_folder(path: Path) -> None:
    """Syncs a folder. A new file or a rename in it survives a power failure only after this."""
    _sync_path(path, os.O_RDONLY)


def rename(path: Path, target: Path) -> None:
    """Renames a file or folder atomically, replacing a file of that name.

    Durable only after `fsync_folder`.
    """
    path.rename(target)


def commit(temporary: Path, target: Path) -> None:
    """Syncs a finished temporary file, renames it to its target and syncs the folder."""
    _sync_path(temporary, os.O_RDWR)
    rename(temporary, target)
    fsync_folder(target.parent)


def make_folder(path: Path) -> None:
    """Creates a folder and its missing parents, and syncs the parent of each new one."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        fsync_folder(folder.parent)


def write_new_synced(path: Path, text: str) -> None:
    """Writes and syncs a file that must not exist yet. Does not sync its folder."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        fsync(file)


def _sync_path(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- temporary and free names ---


def temporary_suffix() -> str:
    """Returns a suffix for temporary names, unique to this process on this machine."""
    return f".{os.getpid()}{TEMPORARY_SUFFIX}"


def shared_suffix() -> str:
    """Returns a random suffix for temporary names in folders that several machines write to."""
    return f".{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"


def hidden_name(path: Path) -> Path:
    """Returns a hidden temporary name beside a path: `.NAME.` and eight random hex digits."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def hidden_names(path: Path) -> list[Path]:
    """Returns the existing paths that `hidden_name` may have named for this path."""
    pattern = re.compile(re.escape(f".{path.name}.") + "[0-9a-f]{8}")
    return [entry for entry in path.parent.iterdir() if pattern.fullmatch(entry.name)]


def free_name(wanted: Path) -> Path:
    """Returns the path itself, or the first of `NAME-2`, `NAME-3`, … that does not exist."""
    numbered_names = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    return _first_free(itertools.chain([wanted], numbered_names))


def next_numbered_name(path: Path, separator: str, ending: str = "") -> Path:
    """Returns the first of `NAME.1`, `NAME.2`, … that does not exist.

    `separator` precedes the number and `ending` follows it.
    """
    return _first_free(path.with_name(f"{path.name}{separator}{n}{ending}") for n in itertools.count(1))


def _first_free(names: Iterable[Path]) -> Path:
    """Returns the first name that does not exist, not even as a broken symbolic link."""
    return next(name for name in names if not os.path.lexists(name))


def free_bytes(path: Path) -> int:
    """Returns the space free to this user on the disk of a path, which need not exist yet."""
    return shutil.disk_usage(next(p for p in (path, *path.resolve().parents) if p.exists())).free


# --- leftovers of killed processes ---


def lock(descriptor: int) -> bool:
    """Locks a temporary file or folder while its descriptor is open.

    The kernel releases the lock when the process ends. Returns False if another process holds it or the file
    system has no locks; leftovers are then kept.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextmanager
def exclusive_folder(folder: Path) -> Iterator[None]:
    """Holds an exclusive lock on a folder; a second process waits, then finds the result of the first."""
    with (folder / ".lock").open("w") as file:
        # The kernel releases the lock when the file is closed, also if the process is killed.
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove_leftovers(target: Path) -> None:
    """Removes temporary files of `target` that no live process holds."""
    pattern = re.compile(re.escape(f"{target.name}.") + "[0-9a-f]+" + re.escape(TEMPORARY_SUFFIX))
    if not target.parent.is_dir():
        return
    for path in [entry for entry in target.parent.iterdir() if pattern.fullmatch(entry.name)]:
        with suppress(OSError):
            # O_NONBLOCK: do not wait on a FIFO. O_NOFOLLOW: do not follow a symbolic link.
            _remove_if_free(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW, Path.unlink)


def _remove_if_free(path: Path, flags: int, remove: Callable[[Path], object]) -> None:
    descriptor = os.open(path, flags)
    try:
        if lock(descriptor):
            remove(path)
    finally:
        os.close(descriptor)


def remove_leftover_folders(target: Path) -> None:
    """Removes temporary folders of `target` that `atomic_folder` left behind in a killed process."""
    for folder in filter(Path.is_dir, hidden_names(target)):
        _remove_if_free(folder, os.O_RDONLY, _remove_tree)


def _remove_tree(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


# --- atomic writes ---


def write_file(target: Path, content: bytes) -> None:
    """Writes a file atomically: on an error the old content stays."""
    with atomic_write(target) as file:
        file.write(content)


@contextmanager
def atomic_write(target: Path, suffix: str | None = None) -> Iterator[BinaryIO]:
    """Context manager that yields a file that replaces `target` when the block ends without an error.

    Removes leftovers of `target` first. `suffix`: of the temporary name (default: `temporary_suffix()`).
    """
    remove_leftovers(target)
    temporary = target.with_name(target.name + (suffix or temporary_suffix()))
    try:
        with temporary.open("wb") as file:
            lock(file.fileno())
            yield file
            file.flush()
            commit(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Context manager that yields a folder that becomes `target` when the block ends without an error.

    After an error it is removed. `target` must not exist or must be an empty folder.
    """
    temporary = hidden_name(target)
    temporary.mkdir()
    try:
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            lock(descriptor)
            yield temporary
            fsync_folder(temporary)
            rename(temporary, target)
            fsync_folder(target.parent)
        finally:
            os.close(descriptor)
    except BaseException:
        _remove_tree(temporary)
        raise


# --- scratch folders of commands ---

_SCRATCH_PREFIX, _SCRATCH_LOCK = "pentatron-", "in-use"
# The owner of a younger folder may not have locked it yet.
_STALE_SECONDS = 60.0


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """Creates a temporary folder, and removes those of killed commands of this user."""
    _remove_stale_folders(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=f"{_SCRATCH_PREFIX}{purpose}-") as name:
        descriptor = lock_scratch_folder(Path(name))
        try:
            yield Path(name)
        finally:
            os.close(descriptor)


def lock_scratch_folder(folder: Path) -> int:
    """Locks a temporary folder against removal while the returned descriptor is open."""
    descriptor = os.open(folder / _SCRATCH_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _remove_stale_folders(place: Path) -> None:
    for folder in place.glob(f"{_SCRATCH_PREFIX}*-*"):
        # Another process may remove it at the same time.
        with suppress(OSError):
            status = folder.lstat()
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if is_own and time.time() - status.st_mtime > _STALE_SECONDS and not _is_in_use(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_in_use(folder: Path) -> bool:
    descriptor = os.open(folder / _SCRATCH_LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return not lock(descriptor)
    finally:
        os.close(descriptor)

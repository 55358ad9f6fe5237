"""Durable file writes: temporary names, fsync and atomic rename.

A file is written under a temporary name in the same folder (a rename cannot cross file systems), synced with
fsync and renamed; then the folder, which stores the name, is synced. `write_file` and `atomic_write` do this
for one file, `atomic_folder` for a folder. Checkpoints and data files consist of several files; their
protocols (checkpoint/store.py, data/indexed_writer.py) are built from the functions here.

A killed process leaves its temporary files behind. The next writer removes them, unless a live process holds
their lock.
"""

import fcntl
import itertools
import os
import re
import secrets
import shutil
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

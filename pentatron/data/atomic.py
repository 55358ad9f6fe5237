"""Files that appear whole or not at all: written under a temporary name, synced to disk, then renamed."""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

TEMPORARY_SUFFIX = ".tmp"


def temporary_path(target: Path, name: str | None = None) -> Path:
    """A name beside `target` (a rename must not cross file systems) that no other process of this machine uses.

    `name`: hexadecimal digits instead of the process id, for folders that several machines write to.
    """
    return target.with_name(f"{target.name}.{name or os.getpid()}{TEMPORARY_SUFFIX}")


def commit(temporary: Path, target: Path) -> None:
    """Make `temporary` become `target`, surviving a crash of the machine right after the call."""
    _sync(temporary, os.O_RDWR)
    temporary.replace(target)
    sync_folder(target.parent)


def sync_folder(path: Path) -> None:
    """Makes renames inside a folder survive a power cut: they live in the folder, which has to reach the disk as well."""
    _sync(path, os.O_RDONLY)


def make_folder(path: Path) -> None:
    """Makes a folder and its missing parents, each of which survives a power cut."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        sync_folder(folder.parent)


def write_file(target: Path, content: bytes) -> None:
    """Write `content` to `target`, or leave what was there before."""
    with replaced(target) as file:
        file.write(content)


@contextmanager
def replaced(target: Path, name: str | None = None) -> Iterator[BinaryIO]:
    """A file to write, which becomes `target` if the block ends without an error. Removes what killed processes left of it."""
    remove_leftovers(target)
    temporary = temporary_path(target, name)
    try:
        with temporary.open("wb") as file:
            mark_in_use(file.fileno())
            yield file
            file.flush()
            commit(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def mark_in_use(descriptor: int) -> bool:
    """Locks a temporary file for as long as it is open. The kernel unlocks it when the process dies, which tells leftovers from work."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        # Another process has it, or the file system has no locks; then leftovers stay.
        return False
    return True


def remove_leftovers(target: Path) -> None:
    """Removes temporary files of `target` that no process has open any more."""
    name = re.compile(re.escape(f"{target.name}.") + "[0-9a-f]+" + re.escape(TEMPORARY_SUFFIX))
    if not target.parent.is_dir():
        return
    for path in [entry for entry in target.parent.iterdir() if name.fullmatch(entry.name)]:
        with suppress(OSError):
            # Not blocked by a FIFO, not led elsewhere by a symlink.
            descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                if mark_in_use(descriptor):
                    path.unlink()
            finally:
                os.close(descriptor)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

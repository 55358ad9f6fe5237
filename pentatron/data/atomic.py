"""Files that appear whole or not at all: written under a temporary name, synced to disk, then renamed."""

import os
from pathlib import Path

TEMPORARY_SUFFIX = ".tmp"


def temporary_path(target: Path) -> Path:
    """A name beside `target` (a rename must not cross file systems) that no other process of this machine uses."""
    return target.with_name(f"{target.name}.{os.getpid()}{TEMPORARY_SUFFIX}")


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
    temporary = temporary_path(target)
    try:
        temporary.write_bytes(content)
        commit(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

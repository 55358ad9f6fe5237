"""Durable files: every temporary name, fsync and rename of the package.

A file appears whole or not at all. It is written under a temporary name in the same folder, as a rename must not cross file systems;
it is synced and renamed; then its folder, which holds the name, is synced. `write_file` and `replaced` do this for one file and
`whole_folder` does it for a folder. Checkpoints and data files consist of several files; they have protocols of their own
(checkpoint/store.py, data/pair_writer.py), made of the same steps.

A process that is killed leaves its temporary names behind. The next writer removes them, unless a living process holds their lock.
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


# --- steps ---


def sync(file: IO[Any] | int) -> None:
    """Writes what is buffered of an open file, or of a descriptor, to the disk."""
    if not isinstance(file, int):
        file.flush()
        file = file.fileno()
    os.fsync(file)


def sync_data(descriptor: int) -> None:
    """Writes the bytes of an open file to the disk, and of its metadata only what reading them takes."""
    os.fdatasync(descriptor)


def sync_folder(path: Path) -> None:
    """Writes the names in a folder to the disk. A file or a rename survives a power cut only after this."""
    _sync_path(path, os.O_RDONLY)


def rename(path: Path, target: Path) -> None:
    """Gives a file or a folder another name; a file of that name is replaced. Not on the disk before `sync_folder`."""
    path.rename(target)


def commit(temporary: Path, target: Path) -> None:
    """Syncs a file that is written, renames it and syncs its folder."""
    _sync_path(temporary, os.O_RDWR)
    rename(temporary, target)
    sync_folder(target.parent)


def make_folder(path: Path) -> None:
    """Makes a folder and its missing parents, and syncs the folder around each of them."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        sync_folder(folder.parent)


def write_new(path: Path, text: str) -> None:
    """Writes a file that must not exist, and syncs it; its folder is not synced."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        sync(file)


def _sync_path(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- names ---


def temporary_suffix() -> str:
    """The end of a temporary name that no other process of this machine uses."""
    return f".{os.getpid()}{TEMPORARY_SUFFIX}"


def shared_suffix() -> str:
    """The same for folders that processes of several machines write to."""
    return f".{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"


def hidden_name(path: Path) -> Path:
    """A name beside a path for what is to become it, or was it: `.NAME.` and eight random hexadecimal digits."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def hidden_names(path: Path) -> list[Path]:
    """What lies beside a path under a name that `hidden_name` gives for it."""
    name = re.compile(re.escape(f".{path.name}.") + "[0-9a-f]{8}")
    return [entry for entry in path.parent.iterdir() if name.fullmatch(entry.name)]


def free_name(wanted: Path) -> Path:
    """The path itself, or the first of `NAME-2`, `NAME-3`, … that does not exist."""
    others = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    return _first_free(itertools.chain([wanted], others))


def numbered(path: Path, separator: str, ending: str = "") -> Path:
    """The first of `NAME.1`, `NAME.2`, … that does not exist; `separator` stands before the number and `ending` after it."""
    return _first_free(
        path.with_name(f"{path.name}{separator}{number}{ending}") for number in itertools.count(1)
    )


def _first_free(names: Iterable[Path]) -> Path:
    """The first of these names that does not exist, not even as a broken link."""
    return next(name for name in names if not os.path.lexists(name))


# --- what killed processes leave ---


def lock(descriptor: int) -> bool:
    """Locks a temporary file or folder for as long as it is open: the kernel unlocks it when the process ends.

    False: another process has it, or the file system has no locks; leftovers then stay.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
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
            _remove_if_free(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW, Path.unlink)


def _remove_if_free(path: Path, flags: int, remove: Callable[[Path], object]) -> None:
    descriptor = os.open(path, flags)
    try:
        if lock(descriptor):
            remove(path)
    finally:
        os.close(descriptor)


def remove_leftover_folders(target: Path) -> None:
    """The same for what `whole_folder` leaves of a process that is killed."""
    for folder in filter(Path.is_dir, hidden_names(target)):
        _remove_if_free(folder, os.O_RDONLY, _remove_tree)


def _remove_tree(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


# --- one file, one folder ---


def write_file(target: Path, content: bytes) -> None:
    """Writes `content` to `target`, or leaves what was there before."""
    with replaced(target) as file:
        file.write(content)


@contextmanager
def replaced(target: Path, suffix: str | None = None) -> Iterator[BinaryIO]:
    """A file to write, which becomes `target` if the block ends without an error. Removes leftovers of `target` first.

    `suffix`: of the temporary name (`temporary_suffix()`).
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
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `target` if the block ends without an error, and else is removed.

    `target` must not exist, or be an empty folder.
    """
    temporary = hidden_name(target)
    temporary.mkdir()
    try:
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            lock(descriptor)
            yield temporary
            sync_folder(temporary)
            rename(temporary, target)
            sync_folder(target.parent)
        finally:
            os.close(descriptor)
    except BaseException:
        _remove_tree(temporary)
        raise

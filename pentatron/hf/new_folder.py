"""A folder that appears under its name when it is complete, or not at all."""

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pentatron.data.atomic import sync_folder
from pentatron.errors import UserError
from pentatron.hf.progress import size_text


@contextmanager
def new_folder(wanted: Path, needs_bytes: int) -> Iterator[Path]:
    """Gives a folder beside the wanted one to write to, and renames it in the end; after an error, nothing is left."""
    final = wanted.resolve()
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise UserError(
            f"{wanted} exists already and nothing is overwritten; name a new folder, or remove it"
        )
    temporary = final.parent / f".{final.name}.{secrets.token_hex(4)}"
    parents = [folder for folder in final.parents if not folder.exists()]
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(final)
        _require_space(final, needs_bytes)
        with _locked(temporary):
            yield temporary
            sync_folder(temporary)
            temporary.rename(final)
            sync_folder(final.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        for folder in parents:
            # It stays if somebody else has begun to use it.
            _remove_if_empty(folder)
        if isinstance(error, OSError):
            reason = f"{error.filename or wanted}: {error.strerror or error}"
            raise UserError(
                f"{wanted} could not be written ({reason}; {_free(final) / 2**20:,.0f} MiB free); nothing was left behind"
            ) from None
        raise


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return


def _require_space(final: Path, needs_bytes: int) -> None:
    free = _free(final)
    if free < needs_bytes:
        raise UserError(
            f"{final} would take {size_text(needs_bytes)} and {size_text(free)} are free there; make room, or choose "
            f"another disk"
        )


def _free(path: Path) -> int:
    return shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Makes the folder and holds it. The kernel lets go of it with the process, which tells leftovers from work."""
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        # Held by another process, or a file system that knows no locks.
        return False
    return True


def _remove_leftovers(final: Path) -> None:
    """What processes that were killed have left of this folder."""
    name = re.compile(re.escape(f".{final.name}.") + "[0-9a-f]{8}")
    for folder in [p for p in final.parent.iterdir() if name.fullmatch(p.name) and p.is_dir()]:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            if _lock(descriptor):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)

"""The folder of an import or export: checked before it is written, and complete or not there at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pentatron.errors import UserError
from pentatron.files import remove_leftover_folders, whole_folder
from pentatron.text import decimal_size, in_mib


@contextmanager
def new_folder(wanted: Path, needs_bytes: int) -> Iterator[Path]:
    """A folder to write to, which becomes `wanted` if the block ends without an error; after an error, nothing is left."""
    final = wanted.resolve()
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise UserError(
            f"{wanted} exists already and nothing is overwritten; name a new folder, or remove it"
        )
    parents = [folder for folder in final.parents if not folder.exists()]
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        # First of all: they may be what fills the disk.
        remove_leftover_folders(final)
        _require_space(final, needs_bytes)
        with whole_folder(final) as folder:
            yield folder
    except BaseException as error:
        for folder in parents:
            # It stays if somebody else has begun to use it.
            _remove_if_empty(folder)
        if isinstance(error, OSError):
            reason = f"{error.filename or wanted}: {error.strerror or error}"
            raise UserError(
                f"{wanted} could not be written ({reason}; {in_mib(_free(final))} MiB free); nothing was left behind"
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
            f"{final} would take {decimal_size(needs_bytes)} and {decimal_size(free)} are free there; make room, or choose "
            f"another disk"
        )


def _free(path: Path) -> int:
    return shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free

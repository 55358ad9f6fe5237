"""One run folder, one job."""

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from pentatron.config.errors import UserError


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Holds the folder for this process. The kernel releases the lock with the process, so none can go stale."""
    path = folder / ".lock"
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another job is using {folder} ({_owner(path)}); wait for it, stop it, or choose another --run-dir"
            ) from None
        file.truncate(0)
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        json.dump({"host": socket.gethostname(), "pid": os.getpid(), "since": started}, file)
        file.flush()
        yield


def _owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "its owner is not recorded"

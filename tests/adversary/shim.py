"""Simulates a failing disk: compiles shim.c, arms it in a process that preloads it, reads its journal."""

import ctypes
import enum
import hashlib
import os
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
_HEAD = struct.Struct("=IIII QQ IIII")
_MAGIC = 0x41445653


class Mode(enum.IntEnum):
    """What happens at the k-th call.

    ENOSPC fails calls that need space, so that files can still be removed. EROFS fails every change.
    """

    NONE = 0
    EIO_ONCE = 1
    EIO_ALWAYS = 2
    ENOSPC_ALWAYS = 3
    HALF_WRITE = 4
    EROFS_ALWAYS = 5
    KILL = 6


class Op(enum.IntEnum):
    OPEN = 1
    WRITE = 2
    TRUNCATE = 3
    FSYNC = 4
    RENAME = 5
    UNLINK = 6
    MKDIR = 7
    RMDIR = 8
    LINK = 9
    SYMLINK = 10
    OUTPUT = 11
    UNKNOWN = 12


@dataclass(frozen=True)
class Record:
    """One successful call.

    `number` counts calls from 1; lines of output carry the number of the call before them.
    """

    number: int
    op: Op
    path: str
    other: str
    inode: int
    offset: int
    data: bytes
    created: bool
    emptied: bool


def missing() -> str | None:
    """Returns why the shim cannot be used here, or None."""
    if not sys.platform.startswith("linux"):
        return f"the failing disk needs Linux, and this is {sys.platform}"
    if compiler() is None:
        return "the failing disk needs a C compiler, and neither cc, gcc nor clang is on the PATH"
    return None


def compiler() -> str | None:
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def built() -> Path:
    """Returns the shared library, which is compiled once for each version of its source."""
    text = SOURCE.read_bytes() + sysconfig.get_platform().encode()
    folder = Path(tempfile.gettempdir()) / f"pentatron-adversary-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to another user; set TMPDIR to a folder of your own")
    library = folder / f"shim-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}")
        command = [compiler() or "cc", "-shared", "-fPIC", "-O2", "-o", made, SOURCE, "-ldl", "-lpthread"]
        subprocess.run(command, check=True)
        made.replace(library)
    return library


def arm(
    folder: str, journal: str = "", report: str = "", call: int = 0, mode: int = Mode.NONE
) -> ctypes.CDLL:
    """Counts calls of this process that change files below `folder` from now on; call `call` fails."""
    library = ctypes.CDLL(None)
    library.adversary_arm.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_long, ctypes.c_int]
    if library.adversary_arm(os.fsencode(folder), os.fsencode(journal), os.fsencode(report), call, mode) != 0:
        raise OSError(f"the shim cannot be armed for {folder}")
    return library


def read_journal(path: Path) -> Iterator[Record]:
    text, at = path.read_bytes(), 0
    while at < len(text):
        magic, op, number, flags, inode, offset, first, second, size, _ = _HEAD.unpack_from(text, at)
        assert magic == _MAGIC, f"{path} is no journal at byte {at}"
        at += _HEAD.size
        path_end, other_end = at + first, at + first + second
        yield Record(
            number,
            Op(op),
            os.path.normpath(os.fsdecode(text[at:path_end])) if first else "",
            os.path.normpath(os.fsdecode(text[path_end:other_end])) if second else "",
            inode,
            offset,
            text[other_end : other_end + size],
            created=bool(flags & 1) and op == Op.OPEN,
            emptied=bool(flags & 2) and op == Op.OPEN,
        )
        at = other_end + size

"""Starts the program that reads pickled files, and understands what it says."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from pentatron.errors import UserError

_PROGRAM = Path(__file__).with_name("apart.py")
# CPU time of the reader: a base, and what each second must read at least.
_SECONDS, _BYTES_A_SECOND = 30, 2**20
# By the clock, for each of those: a file may lie on a slow disk, and the machine may be busy.
_PATIENCE = 10


def read_apart(path: Path, seconds: int = _SECONDS) -> Any:
    """What a pickled file of Megatron-LM holds, read by a process that can run nothing of it.

    `seconds` of a core are enough for any small file; larger ones have more, by their size.
    """
    try:
        with path.open("rb") as file:
            seconds += os.fstat(file.fileno()).st_size // _BYTES_A_SECOND
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror or error}); name another checkpoint"
        ) from None
    # -I and -S: neither the environment nor installed packages have a say in it.
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(_PROGRAM), str(path.resolve()), str(seconds)],
            capture_output=True,
            env={},
            check=False,
            timeout=seconds * _PATIENCE,
        )
    except subprocess.TimeoutExpired:
        raise _endless(path, f"{seconds * _PATIENCE} seconds") from None
    if done.returncode == -signal.SIGXCPU:
        raise _endless(path, f"{seconds} seconds of a core")
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise UserError(
            f"{path} could not be read: its reader ended with status {done.returncode} {last}; the file is damaged or not a checkpoint"
        ) from None
    if "refused" in answer:
        raise UserError(
            f"{path} asks for {answer['refused']}, which no checkpoint needs, so it was not read and nothing of it ran; do not use this "
            f"file unless you know who made it"
        )
    if "error" in answer:
        raise UserError(f"{path} is not a file of Megatron-LM's checkpoints, or damaged ({answer['error']})")
    return answer["found"]


def _endless(path: Path, limit: str) -> UserError:
    return UserError(
        f"{path} takes longer than {limit} to read, so its reader was stopped; the file is damaged, or was made to run without end: "
        f"name another checkpoint"
    )

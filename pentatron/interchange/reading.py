"""Starts the program that reads pickled files, and understands what it says."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from pentatron.config.errors import UserError

_PROGRAM = Path(__file__).with_name("apart.py")


def read_apart(path: Path) -> Any:
    """What a pickled file of Megatron-LM holds, read by a process that can run nothing of it."""
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror or error}); name another checkpoint"
        ) from None
    # -I and -S: neither the environment nor installed packages have a say in it.
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(_PROGRAM), str(path.resolve())],
        capture_output=True,
        env={},
        check=False,
    )
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

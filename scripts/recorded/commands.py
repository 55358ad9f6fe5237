"""Runs `pentatron` commands in forked processes and records their output.

The parent has imported the package, so a command does not wait for imports.
"""

import atexit
import contextlib
import gc
import hashlib
import importlib
import os
import pkgutil
import re
import runpy
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recorded.noise import Noise

LIMIT_S = 300
_PAUSE = 0.002


@dataclass(frozen=True)
class Output:
    code: int | None
    out: str
    err: str


class Recorder:
    """Runs commands in `place` and writes one file for each below `into`."""

    def __init__(self, into: Path, place: Path, noise: Noise) -> None:
        self.into, self.place, self.noise = into, place, noise

    def record(
        self,
        name: str,
        words: Sequence[str],
        environment: Mapping[str, str] | None = None,
        noise: str = "exact",
        shown: str = "",
    ) -> Output:
        """Runs a command and writes its output into a file.

        `noise`: what is removed, as in `Noise.remove`. `shown`: written before the command in the file.
        """
        output = run(words, self.place, environment or {})
        parts = [
            self.noise.remove(f"$ {shown}pentatron {shlex.join(words)}", "exact"),
            f"exit code {output.code}",
        ]
        for title, text in (("standard output", output.out), ("standard error", output.err)):
            if text:
                parts += [f"--- {title}", self.noise.remove(text, noise).rstrip("\n")]
        self.write(f"{name}.txt", "\n".join(parts) + "\n")
        return output

    def write(self, name: str, text: str) -> None:
        path = self.into / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def slug(words: Sequence[str]) -> str:
    """Returns a readable file name that no other words have."""
    text = shlex.join(words)
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-")[:80]
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def import_package(tree: Path) -> None:
    """Imports the modules that commands need, so that forked processes have them."""
    package = importlib.import_module("pentatron")
    assert Path(str(package.__file__)).is_relative_to(tree), f"{package.__file__} is not in {tree}"
    importlib.import_module("torch")
    for module in pkgutil.walk_packages(package.__path__, "pentatron.", onerror=lambda name: None):
        if module.name.split(".")[1] in ("cli", "config", "settings", "plan", "layout", "checkpoint", "data"):
            importlib.import_module(module.name)
    # Garbage collection at the end of a command would otherwise copy all pages of this process.
    gc.collect()
    gc.freeze()


def run(words: Sequence[str], place: Path, environment: Mapping[str, str]) -> Output:
    """Runs `python -m pentatron WORDS...` in `place`, in a forked process."""
    files = [place.parent / f"{place.name}.{stream}" for stream in ("out", "err")]
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = _live(words, place, environment, files)
        finally:
            os._exit(status)
    code = _wait(pid)
    out, err = (path.read_text(encoding="utf-8", errors="replace") for path in files)
    return Output(code, out, err)


def _wait(pid: int) -> int | None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_PAUSE)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _live(words: Sequence[str], place: Path, environment: Mapping[str, str], files: Sequence[Path]) -> int:
    """Runs a command as a new interpreter would, without the exit handlers of the parent."""
    os.setsid()
    atexit._clear()
    for path, descriptor in zip(files, (1, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(place)
    os.environ.update(environment)
    code: object = 1
    try:
        sys.argv = ["pentatron", *words]
        runpy.run_module("pentatron", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):
            stream.flush()
    return code if isinstance(code, int) else 0 if code is None else 1

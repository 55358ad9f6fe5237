"""Runs any command of pentatron in a forked process, on a disk that may fail.

`python -m tests.adversary.child` is the fork server; `tests.faults.commands.Zygote` is its client.
"""

import contextlib
import fcntl
import os
import resource
import sys
import tempfile
import termios
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.adversary import shim
from tests.faults import zygote
from tests.harness import processes

# Exit code of Python if standard output cannot be flushed at the end.
FLUSH_FAILED = 120


def live(request: Mapping[str, Any]) -> int:
    processes.die_with_parent(os.getppid())
    os.environ.update(request["environment"])
    os.environ.pop("LD_PRELOAD", None)
    tempfile.tempdir = None
    os.chdir(request["folder"])
    _take_streams(request["out"], request["err"], request["terminal"])
    limit, resident = _status("VmSize") + request["memory"], _status("VmRSS")
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.ExitStack() as stack:
        for name in request["without"]:
            stack.enter_context(WITHOUT[name]())
        if request["shim"]:
            shim.arm(**request["shim"])
        code = _command(request["words"])
    Path(request["peak"]).write_text(str(_status("VmHWM") - resident))
    return _leave_streams(code)


def _command(words: list[str]) -> int:
    """Runs a command; returns its exit code as the interpreter would."""
    from pentatron.cli.main import main

    sys.argv = ["pentatron", *words]
    try:
        return main(words)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:
        with contextlib.suppress(OSError, AttributeError):
            traceback.print_exc()
        return 1


def _take_streams(out: str, err: str, terminal: bool) -> None:
    """Redirects standard streams to these paths; an empty path closes the stream, as `>&-` does.

    `terminal`: `out` becomes the controlling terminal of this process.
    """
    if terminal:
        os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name, path, target in (("stdout", out, 1), ("stderr", err, 2)):
        if not path:
            os.close(target)
            # As the interpreter does it at its start.
            setattr(sys, name, None)
            setattr(sys, f"__{name}__", None)
            continue
        if target == 2 and err == out:
            os.dup2(1, 2)
            continue
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, target)
        os.close(descriptor)
        if terminal and target == 1:
            fcntl.ioctl(target, termios.TIOCSCTTY, 0)


def _leave_streams(code: int) -> int:
    """Flushes the streams as the interpreter does at its end."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            code = FLUSH_FAILED if number == 1 else code
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - for the lines that end this process
    return code


def _status(name: str) -> int:
    """Returns a size of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0


# ---- controls: protections of the product, switched off to check that a trial notices ----


@contextlib.contextmanager
def _without_fsync() -> Iterator[None]:
    """Disables fsync, so that a rename may reach the disk before the data."""
    original = os.fsync
    os.fsync = lambda descriptor: None  # type: ignore[assignment]
    try:
        yield
    finally:
        os.fsync = original


@contextlib.contextmanager
def _without_errors() -> Iterator[None]:
    """Makes commands that fail end with exit code 0."""
    from pentatron.cli import main

    original = main.run_guarded
    main.run_guarded = lambda action: original(action) * 0
    try:
        yield
    finally:
        main.run_guarded = original


WITHOUT = {"fsync": _without_fsync, "exit code": _without_errors}


if __name__ == "__main__":
    zygote.main(live)

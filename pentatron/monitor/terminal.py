"""What a process says: standard output, standard error and lines of logs, each of which may fail while the process works.

A terminal is closed, the reader of a pipe leaves, the disk under a log is full, or a stream is closed from the start. Work that leaves its
results in files outlives all of that; a command whose result is its output does not, and must not end with 0.
"""

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STREAMS = {"stdout": 1, "stderr": 2}
# A disk may have room again later; a reader that has left does not come back.
_MAY_PASS = (errno.ENOSPC, errno.EDQUOT)


class OutputLost(OSError):
    """Standard output cannot be written, and it is what the command is for."""


class Stream(io.RawIOBase):
    """Writes to a file descriptor. After a failure what is written is dropped; or, unless `survives`, `OutputLost` is raised.

    `error` is the first failure.
    """

    def __init__(self, descriptor: int, survives: bool, error: OSError | None = None) -> None:
        self._descriptor, self.survives, self.error = descriptor, survives, error

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.error is None or self.error.errno in _MAY_PASS:
            try:
                self._write_all(view)
            except OSError as error:
                self.error = self.error or error
        if self.error is not None and not self.survives:
            raise OutputLost(self.error.errno, self.error.strerror)
        return len(view)

    def _write_all(self, view: memoryview) -> None:
        while len(view):
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:
                # Another process that shares the terminal has made it non-blocking.
                select.select([], [self._descriptor], [])


# The streams of this process, by name, once they are owned.
_owned: dict[str, Stream] = {}


def own_streams() -> None:
    """Puts streams that survive in the place of Python's own. Streams that a caller has put there (a notebook, a test) stay.

    From here on a failure of standard output raises `OutputLost`, until `outlive_output()` is called; one of standard error never raises.
    """
    closed = _occupy_closed_descriptors()
    for name, descriptor in STREAMS.items():
        current = getattr(sys, name)
        if name in _owned and getattr(getattr(current, "buffer", None), "raw", None) is _owned[name]:
            # Another command of the same process; a fork may have put a file in the place of the descriptor.
            _owned[name].error = None
            continue
        if current is not getattr(sys, f"__{name}__"):
            _owned.pop(name, None)
            if isinstance(current, io.TextIOWrapper):
                current.reconfigure(errors="replace")
            continue
        error = OSError(errno.EBADF, os.strerror(errno.EBADF)) if descriptor in closed else None
        _owned[name] = Stream(descriptor, survives=True, error=error)
        setattr(sys, name, _as_text(current, _owned[name]))
    if "stdout" in _owned:
        _owned["stdout"].survives = False


def _occupy_closed_descriptors() -> list[int]:
    """Opens /dev/null as each of the descriptors 0, 1 and 2 that is closed: the next file would get that number, and the prints with it."""
    closed = []
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            closed.append(descriptor)
            null = os.open(os.devnull, os.O_RDONLY if descriptor == 0 else os.O_WRONLY)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            os.set_inheritable(descriptor, True)
    return closed


def _as_text(before: Any, raw: Stream) -> io.TextIOWrapper:
    """With the encoding that Python chose. A character that it lacks (×, →) is shown as `?`."""
    if before is not None:
        with contextlib.suppress(OSError, ValueError):
            before.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(before, "encoding", None) or "utf-8",
        errors="replace",
        line_buffering=getattr(before, "line_buffering", False),
        write_through=getattr(before, "write_through", False),
    )


def outlive_output() -> None:
    """For work that leaves its results in files: output that cannot be written is dropped from now on."""
    if "stdout" in _owned:
        _owned["stdout"].survives = True


def output_error() -> OSError | None:
    """Why standard output cannot be written, if it could not."""
    return _owned["stdout"].error if "stdout" in _owned else None


def append_line(file: Path, line: str) -> bool:
    """Adds a line to a log without ever ending or blocking its writer; whether it could be written. A FIFO without a reader is refused."""
    try:
        opened = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        with os.fdopen(opened, "a", encoding="utf-8", errors="replace") as log:
            log.write(f"{line}\n")
    except OSError:
        return False
    return True


@contextmanager
def whole_output() -> Iterator[None]:
    """Raises `OutputLost` at the end of the block if a command whose result is its output could not write all of it.

    Nothing that is written after the block raises: Python's last flush would change the exit code.
    """
    try:
        yield
        sys.stdout.flush()
        stream = _owned.get("stdout")
        if stream is not None and not stream.survives and stream.error is not None:
            raise OutputLost(stream.error.errno, stream.error.strerror)
    finally:
        outlive_output()

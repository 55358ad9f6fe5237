"""Standard output and standard error that survive write errors, and log lines that never fail.

A terminal is closed, the reader of a pipe exits, the disk under a log fills up, or a stream is closed from
the start. Training stores its results in files and continues; a command whose output is its result must fail
with a non-zero exit code.
"""

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STREAMS = {"stdout": 1, "stderr": 2}
# Temporary errors: a full disk may have space later, while a closed pipe stays closed.
_TEMPORARY = (errno.ENOSPC, errno.EDQUOT)


class OutputLost(OSError):
    """Standard output cannot be written, and the command's result is its output."""


class Stream(io.FileIO):
    """Writes to a file descriptor.

    After a failure, output is dropped if `survives`, otherwise `OutputLost` is raised. `error` is the first
    failure.
    """

    def __init__(self, descriptor: int, survives: bool, error: OSError | None = None) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.survives, self.error = survives, error

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.error is None or self.error.errno in _TEMPORARY:
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
                view = view[os.write(self.fileno(), view) :]
            except BlockingIOError:
                # Another process on the terminal made it non-blocking.
                select.select([], [self.fileno()], [])


# Replaced streams of this process by name. Module state, as `sys.stdout` is process-wide too.
_owned: dict[str, Stream] = {}


def replace_streams() -> None:
    """Replaces stdout and stderr by streams that survive write errors.

    Streams replaced by the caller (notebook, test) are kept. From here on, a failure of stdout raises
    `OutputLost` until `ignore_output_errors()` is called; a failure of stderr never raises.
    """
    closed = _fill_closed_descriptors()
    for name, descriptor in STREAMS.items():
        current = getattr(sys, name)
        if name in _owned and getattr(getattr(current, "buffer", None), "raw", None) is _owned[name]:
            # Another command in the same process; a fork may have redirected the descriptor.
            _owned[name].error = None
            continue
        if current is not getattr(sys, f"__{name}__"):
            _owned.pop(name, None)
            if isinstance(current, io.TextIOWrapper):
                current.reconfigure(errors="replace")
            continue
        error = OSError(errno.EBADF, os.strerror(errno.EBADF)) if descriptor in closed else None
        _owned[name] = Stream(descriptor, survives=True, error=error)
        setattr(sys, name, _text_stream(current, _owned[name]))
    if "stdout" in _owned:
        _owned["stdout"].survives = False


def _fill_closed_descriptors() -> list[int]:
    """Opens /dev/null for each closed descriptor of 0, 1 and 2.

    Otherwise the next opened file would get its number, and receive the output.
    """
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


def _text_stream(replaced_stream: Any, raw: Stream) -> io.TextIOWrapper:
    """Wraps a stream with Python's encoding. Characters it lacks (×, →) are written as `?`."""
    if replaced_stream is not None:
        with contextlib.suppress(OSError, ValueError):
            replaced_stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(replaced_stream, "encoding", None) or "utf-8",
        errors="replace",
        line_buffering=getattr(replaced_stream, "line_buffering", False),
        write_through=getattr(replaced_stream, "write_through", False),
    )


def ignore_output_errors() -> None:
    """Drops output that cannot be written from now on, for work that stores its results in files."""
    if "stdout" in _owned:
        _owned["stdout"].survives = True


def output_error() -> OSError | None:
    """Returns the first write error of standard output, if any."""
    return _owned["stdout"].error if "stdout" in _owned else None


def append_line(file: Path, line: str) -> bool:
    """Appends a line to a log without raising or blocking.

    Returns whether it was written. O_NONBLOCK refuses a FIFO without a reader.
    """
    with contextlib.suppress(OSError):
        opened = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        with os.fdopen(opened, "a", encoding="utf-8", errors="replace") as log:
            log.write(f"{line}\n")
        return True
    return False


@contextlib.contextmanager
def require_complete_output() -> Iterator[None]:
    """Raises `OutputLost` at the end of the block if the output of a command could not be written completely.

    Output after the block never raises: Python's final flush would change the exit code.
    """
    try:
        yield
        sys.stdout.flush()
        stream = _owned.get("stdout")
        if stream is not None and not stream.survives and stream.error is not None:
            raise OutputLost(stream.error.errno, stream.error.strerror)
    finally:
        ignore_output_errors()

"""Workers on this machine, started and watched by ourselves."""

import contextlib
import fcntl
import os
import resource
import secrets
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from pentatron.errors import BadNumbers, UserError
from pentatron.parallel.rendezvous import LISTENER, SECRET, MeetingPoint, listening_at
from pentatron.supervise.hang import STACKS, stacks_path
from pentatron.supervise.heartbeat import beat_path, read_beat
from pentatron.supervise.processes import (
    Failure,
    Process,
    Signals,
    end_all,
    failures_of,
    listening,
    started,
    unfinished,
)
from pentatron.supervise.signals import WATCHED, watched_here

# What workers find in their environment: the job's folder, its launcher, and how often the job was started again.
JOB, LAUNCHER, RESTART = "PENTATRON_JOB", "PENTATRON_LAUNCHER", "PENTATRON_RESTART"
# All that `run_workers` puts into the environment of a worker; the first ones have no meaning to other programs.
OF_OUR_LAUNCHER = (JOB, LAUNCHER, RESTART, SECRET, LISTENER)
OF_A_WORKER = (
    *OF_OUR_LAUNCHER,
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
# The reader of the output has left, in the words of a shell.
READER_LEFT = 128 + signal.SIGPIPE
# Ends of which a rank has said why, and which another start would not change.
TOLD = (UserError.exit_code, BadNumbers.REPRODUCIBLE, BadNumbers.TRANSIENT, READER_LEFT)
_HOST = "127.0.0.1"
_PAUSE = 0.1
# How long the others may take to end by themselves: after a crash, and after an end that all agree on.
_AFTER_A_CRASH, _AFTER_AN_END = 3.0, 60.0


@dataclass(frozen=True)
class Ended:
    """How the workers ended; `failures` has the first one first. `stopped_by`: the launcher was told to stop."""

    exit_code: int
    failures: Sequence[Failure] = ()
    stopped_by: signal.Signals | None = None
    # The last step that any rank had done, whether it was one of this attempt's, and whether the run's folder was ours by then.
    step: int = 0
    advanced: bool = False
    opened: bool = False

    @property
    def failed_rank(self) -> int | None:
        return self.failures[0].rank if self.failures else None

    @property
    def is_crash(self) -> bool:
        """Something failed of its own accord: no mistake of the user's, and nobody's wish."""
        return bool(self.failures) and self.exit_code not in TOLD and self.wished_by is None

    @property
    def wished_by(self) -> signal.Signals | None:
        """The signal by which somebody wanted the end: of the launcher, or of a rank."""
        return self.stopped_by or next((n for n in WATCHED if self.exit_code in (128 + n, -n)), None)

    @property
    def has_told(self) -> bool:
        """A rank has said why, itself: it met a mistake, or it ended in good order."""
        return _is_agreed(self.exit_code)

    @property
    def status(self) -> int:
        """What the launcher itself ends with."""
        if self.is_crash:
            return 1
        if self.exit_code >= 0:
            return self.exit_code
        # Killed: by a signal that it was not yet listening to, or by something else while it was to stop.
        return 128 - self.exit_code if -self.exit_code in WATCHED else 1

    def story(self, ranks: int, when: str = "") -> str:
        """What the first failure was, with its traceback."""
        first = self.failures[0]
        sentence = first.sentence(ranks, when)
        return f"{sentence}:\n{first.text.rstrip()}" if first.text else sentence


_SCRATCH, _HELD = "pentatron-", "in-use"
# A folder that is younger may be one that its owner is about to hold.
_LEFT_AFTER = 60.0


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """A temporary folder; those that killed commands of the same user have left are removed first."""
    _remove_left_folders(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=f"{_SCRATCH}{purpose}-") as name:
        held = hold_folder(Path(name))
        try:
            yield Path(name)
        finally:
            os.close(held)


def hold_folder(folder: Path) -> int:
    """Keeps a temporary folder from being removed while the descriptor is open, which it is until the process ends if nothing closes it."""
    held = os.open(folder / _HELD, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    fcntl.flock(held, fcntl.LOCK_SH)
    return held


def _remove_left_folders(place: Path) -> None:
    for folder in place.glob(f"{_SCRATCH}*-*"):
        # Another process may remove it at the same time.
        with contextlib.suppress(OSError):
            about = folder.lstat()
            is_own = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()
            if is_own and time.time() - about.st_mtime > _LEFT_AFTER and not _is_held(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_held(folder: Path) -> bool:
    held = os.open(folder / _HELD, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(held)
    return False


# What a rank opens by itself (libraries, data, checkpoints, logs), for each other rank (sockets of the process groups), and how many are enough.
_FILES, _FILES_PER_RANK, _ENOUGH_FILES = 64, 8, 2**16


def require_descriptors(processes: int) -> None:
    """Raises the limit of open files as far as this process may, and refuses one with which ranks would wait for each other without end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    needed = _FILES + _FILES_PER_RANK * processes
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise UserError(
            f"{processes} processes need {needed} open files each, and the limit here is {soft} (ulimit -n); raise it, as with `ulimit -n 4096`, "
            f"or ask the administrator of this machine for a higher one"
        )


# Looks at the running processes now and then; tells who is at fault where they hang.
Watch = Callable[[Sequence[Process], Path], Failure | None]


def listener_for_workers(port: int) -> socket.socket:
    """A socket on a port of the loopback address, a free one for 0. Rank 0 inherits it, so that no other process gets the port.

    Fails at once if another job has the port, instead of after the rendezvous timeout.
    """
    return listening_at(MeetingPoint(_HOST, port))


def run_workers(
    python_words: Sequence[str],
    processes: int,
    port: int | None,
    environment: Mapping[str, str],
    launcher: int,
    told: Signals | None = None,
    watch: Watch | None = None,
    restart: int = 0,
) -> Ended:
    """Runs `python WORDS...` once per process until all end; a failing one takes the others down with it.

    `environment` is what they inherit, `launcher` this process. `told` has the signals of a caller who listens already.
    """
    with contextlib.ExitStack() as stack:
        signals = told or stack.enter_context(listening(watched_here()))
        listener = stack.enter_context(listener_for_workers(port or 0))
        require_descriptors(processes)
        job = stack.enter_context(scratch_folder("job"))
        common = {
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(listener.getsockname()[1]),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            JOB: str(job),
            LAUNCHER: str(launcher),
            RESTART: str(restart),
            # In the environment, which other users cannot read, unlike the words of a command.
            SECRET: secrets.token_hex(32),
        }
        of_each = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
        of_each[0][LISTENER] = str(listener.fileno())
        with (
            started(python_words, environment, of_each, listener) as running,
            _stacks_on_request(running, job),
        ):
            # From here on it is rank 0's alone: if that dies, connections are refused.
            listener.close()
            hang = _follow(running, signals, job, watch)
            end_all(running)
            return _ended(running, signals, job, hang)


@contextmanager
def _stacks_on_request(processes: Sequence[Process], job: Path) -> Iterator[None]:
    """SIGQUIT (Ctrl-\\) asks every rank for its stacks, and the job continues."""

    def ask(number: int, frame: FrameType | None) -> None:
        # One that has not come so far as to have the file would be killed by the signal.
        asked = [process for process in processes if stacks_path(job, process.rank).exists()]
        for process in asked:
            process.send(STACKS)
        with contextlib.suppress(OSError):
            os.write(2, f"pentatron: {len(asked)} ranks write their stacks to {job}/rank-*.stacks\n".encode())

    before = signal.signal(STACKS, ask)
    try:
        yield
    finally:
        signal.signal(STACKS, before)


def _follow(processes: Sequence[Process], signals: Signals, job: Path, watch: Watch | None) -> Failure | None:
    """Returns when all have ended, or when those that are left must be; with what is wrong, where they hang."""
    passed_on, deadline = False, None
    while True:
        for process in processes:
            process.look()
        codes = [process.code for process in processes]
        if None not in codes or signals.is_impatient:
            return None
        if signals.received and not passed_on:
            # Once: whoever asks a second time means the first.
            passed_on = True
            for process in processes:
                process.send(signals.received[0])
        if any(codes) and deadline is None:
            agreed = signals.received or all(
                _is_agreed(code) and code != READER_LEFT for code in codes if code
            )
            deadline = time.monotonic() + (_AFTER_AN_END if agreed else _AFTER_A_CRASH)
        if deadline is not None and time.monotonic() > deadline:
            return None
        hang = watch(processes, job) if watch is not None and deadline is None else None
        if hang is not None:
            return hang
        time.sleep(_PAUSE)


def _is_agreed(code: int) -> bool:
    return code in TOLD or code - 128 in WATCHED


def _is_wished(code: int) -> bool:
    return code == 0 or -code in WATCHED or code - 128 in WATCHED


def _ended(processes: Sequence[Process], signals: Signals, job: Path, hang: Failure | None) -> Ended:
    stopped_by = signals.first
    if signals.is_impatient:
        sys.stderr.write("pentatron: stopped at once; checkpoints that were saved before are intact\n")
        sys.stderr.flush()
        return Ended(128 + signal.SIGINT, stopped_by=signal.SIGINT)
    codes = [process.code for process in processes]
    if hang is None and not any(codes):
        failures = unfinished(processes, job)
        if not failures:
            return Ended(0)
    else:
        failures = [*([hang] if hang else []), *failures_of(processes, job)]
    code = failures[0].code
    if (
        hang is None
        and stopped_by is not None
        and all(code is not None and _is_wished(code) for code in codes)
    ):
        # Also of ranks that had not yet begun to listen, or listened no more; a scheduler's harder signal may come then.
        if all(code == -stopped_by for code in codes):
            sys.stderr.write(f"pentatron: stopped by {stopped_by.name} before training began\n")
        return Ended(128 + stopped_by, stopped_by=stopped_by)
    beats = [b for p in processes if (b := read_beat(beat_path(job, p.rank))) is not None]
    step = max((b.step for b in beats), default=0)
    advanced, opened = any(b.step > b.began for b in beats), any(b.opened for b in beats)
    return Ended(code, failures, stopped_by, step, advanced, opened)

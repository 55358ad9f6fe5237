"""Launcher: starts the workers of this machine, forwards signals, and determines how the job ended."""

import contextlib
import os
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from pentatron.errors import NonFiniteError, UserError
from pentatron.files import scratch_folder
from pentatron.parallel.rendezvous import LISTENER, SECRET, Rendezvous, listening_socket
from pentatron.supervise.hang import STACKS_SIGNAL, read_heartbeats
from pentatron.supervise.processes import (
    Failure,
    Process,
    ReceivedSignals,
    find_failures,
    kill_all,
    rank_file,
    start_workers,
    unfinished_ranks,
)
from pentatron.supervise.signals import WATCHED, handle_signals

# Environment of workers: the folder of the job, process ID of the launcher, and number of restarts.
JOB_FOLDER, LAUNCHER_PID, RESTART_COUNT = "PENTATRON_JOB", "PENTATRON_LAUNCHER", "PENTATRON_RESTART"
# All variables that `run_workers` sets; the first ones have no meaning to other programs.
LAUNCHER_VARIABLES = (JOB_FOLDER, LAUNCHER_PID, RESTART_COUNT, SECRET, LISTENER)
WORKER_VARIABLES = (
    *LAUNCHER_VARIABLES,
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
# Exit code after SIGPIPE, when the reader of the output has closed it, as a shell reports it.
BROKEN_PIPE = 128 + signal.SIGPIPE
# Exit codes with which a rank has printed the reason, and which a restart would not change.
EXPLAINED_CODES = (UserError.exit_code, NonFiniteError.REPRODUCIBLE, NonFiniteError.TRANSIENT, BROKEN_PIPE)
_HOST = "127.0.0.1"
_PAUSE = 0.1
# How long the other ranks may take to exit: after a crash, and after an end that all ranks agree on.
_AFTER_A_CRASH, _AFTER_AN_END = 3.0, 60.0


@dataclass(frozen=True)
class JobResult:
    """How the workers ended.

    `failures`: with the cause first. `stopped_by`: signal to the launcher. `step`: last step done by any
    rank. `advanced`: whether that step is of this start. `opened`: whether the run folder was locked.
    """

    exit_code: int
    failures: Sequence[Failure] = ()
    stopped_by: signal.Signals | None = None
    step: int = 0
    advanced: bool = False
    opened: bool = False

    @property
    def is_crash(self) -> bool:
        """Whether something failed, other than by a user error or a requested stop."""
        return bool(self.failures) and self.exit_code not in EXPLAINED_CODES and self.stop_signal is None

    @property
    def stop_signal(self) -> signal.Signals | None:
        """The signal that stopped the launcher or a rank."""
        return self.stopped_by or next((n for n in WATCHED if self.exit_code in (128 + n, -n)), None)

    @property
    def is_explained(self) -> bool:
        """Whether a rank has printed the reason itself."""
        return _is_agreed(self.exit_code)

    @property
    def status(self) -> int:
        """Exit code of the launcher."""
        if self.is_crash:
            return 1
        if self.exit_code >= 0:
            return self.exit_code
        # A worker was killed: by a signal before it had its handler, or otherwise while it was stopping.
        return 128 - self.exit_code if -self.exit_code in WATCHED else 1

    def failure_message(self, ranks: int, when: str = "") -> str:
        """Describes the first failure with its traceback."""
        first = self.failures[0]
        sentence = first.sentence(ranks, when)
        return f"{sentence}:\n{first.text.rstrip()}" if first.text else sentence


# --- workers ---

# File descriptors of a rank itself (libraries, data, checkpoints, logs) and per peer (sockets of process
# groups), and the highest limit to set.
_FILES, _FILES_PER_RANK, _ENOUGH_FILES = 64, 8, 2**16


def require_descriptors(processes: int) -> None:
    """Raises the limit of open files to the hard limit; raises an error if even that is too low."""
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


# Watchdog over the processes of a job: returns a failure if they hang.
Watch = Callable[[Sequence[Process], Path], Failure | None]


def listener_for_workers(port: int) -> socket.socket:
    """Returns a socket that listens on a port of the loopback address, a free one for 0.

    Rank 0 inherits it, so that no other process can take the port. If another job has the port, it fails at
    once instead of after the rendezvous timeout.
    """
    return listening_socket(Rendezvous(_HOST, port))


def run_workers(
    python_words: Sequence[str],
    processes: int,
    port: int | None,
    environment: Mapping[str, str],
    launcher: int,
    received: ReceivedSignals | None = None,
    watch: Watch | None = None,
    restart: int = 0,
) -> JobResult:
    """Runs `python WORDS...` once per rank until all exit; if one fails, the others are killed.

    `launcher`: ID of this process. `received`: the signals of a caller that records them already.
    """
    with contextlib.ExitStack() as stack:
        signals = received or stack.enter_context(handle_signals(ReceivedSignals()))
        listener = stack.enter_context(listener_for_workers(port or 0))
        require_descriptors(processes)
        job = stack.enter_context(scratch_folder("job"))
        common = {
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(listener.getsockname()[1]),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            JOB_FOLDER: str(job),
            LAUNCHER_PID: str(launcher),
            RESTART_COUNT: str(restart),
            # Other users can read the command line of a process, but not its environment.
            SECRET: secrets.token_hex(32),
        }
        of_each = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
        of_each[0][LISTENER] = str(listener.fileno())
        with (
            start_workers(python_words, environment, of_each, listener) as running,
            _stacks_on_request(running, job),
        ):
            # Rank 0 alone holds it now: if it dies, connections are refused.
            listener.close()
            hang = _follow(running, signals, job, watch)
            kill_all(running)
            return _ended(running, signals, job, hang)


def _stacks_on_request(processes: Sequence[Process], job: Path) -> AbstractContextManager[object]:
    """Context manager in which SIGQUIT (Ctrl-\\) makes every rank write its stack traces and continue."""

    def ask(number: int, frame: FrameType | None) -> None:
        # The file shows that the worker has a handler: without one the signal would kill it.
        ready = [process for process in processes if rank_file(job, process.rank, "stacks").exists()]
        for process in ready:
            process.send(STACKS_SIGNAL)
        with contextlib.suppress(OSError):
            os.write(2, f"pentatron: {len(ready)} ranks write their stacks to {job}/rank-*.stacks\n".encode())

    return handle_signals(ask, STACKS_SIGNAL)


def _follow(
    processes: Sequence[Process], signals: ReceivedSignals, job: Path, watch: Watch | None
) -> Failure | None:
    """Returns when all processes have exited or the rest is to be killed; returns the failure of a hang."""
    forwarded, deadline = False, None
    while True:
        for process in processes:
            process.poll()
        codes = [process.code for process in processes]
        if None not in codes or signals.is_impatient:
            return None
        if signals.received and not forwarded:
            # The first signal only: schedulers repeat theirs.
            forwarded = True
            for process in processes:
                process.send(signals.received[0])
        if any(codes) and deadline is None:
            agreed = signals.received or all(_is_agreed(c) and c != BROKEN_PIPE for c in codes if c)
            deadline = time.monotonic() + (_AFTER_AN_END if agreed else _AFTER_A_CRASH)
        if deadline is not None and time.monotonic() > deadline:
            return None
        if watch is not None and deadline is None and (hang := watch(processes, job)) is not None:
            return hang
        time.sleep(_PAUSE)


def _is_agreed(code: int) -> bool:
    return code in EXPLAINED_CODES or code - 128 in WATCHED


def _ended(
    processes: Sequence[Process], signals: ReceivedSignals, job: Path, hang: Failure | None
) -> JobResult:
    stopped_by = signals.first
    if signals.is_impatient:
        sys.stderr.write("pentatron: stopped immediately; earlier checkpoints are intact\n")
        sys.stderr.flush()
        return JobResult(128 + signal.SIGINT, stopped_by=signal.SIGINT)
    codes = [process.code for process in processes]
    failed = [*([hang] if hang else []), *find_failures(processes, job)]
    failures = failed or unfinished_ranks(processes, job)
    if not failures:
        return JobResult(0)
    code = failures[0].code
    # A rank without its handler, at the start or the end, is killed by the signal or a later one of the
    # scheduler.
    stopped = all(c is not None and (c == 0 or -c in WATCHED or c - 128 in WATCHED) for c in codes)
    if hang is None and stopped_by is not None and stopped:
        if all(code == -stopped_by for code in codes):
            sys.stderr.write(f"pentatron: stopped by {stopped_by.name} before training began\n")
        return JobResult(128 + stopped_by, stopped_by=stopped_by)
    beats = read_heartbeats(job, [process.rank for process in processes])
    step = max((b.step for b in beats), default=0)
    advanced, opened = any(b.step > b.began for b in beats), any(b.opened for b in beats)
    return JobResult(code, failures, stopped_by, step, advanced, opened)

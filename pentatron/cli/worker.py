"""Worker side of supervision: heartbeats, failure records, exit with the launcher, and restart detection."""

import contextlib
import ctypes
import faulthandler
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pentatron.files import lock_scratch_folder
from pentatron.parallel.rank_status import RankStatus
from pentatron.parallel.rendezvous import collective_error
from pentatron.supervise.attempts import Attempt, LauncherState, identify_attempt
from pentatron.supervise.hang import STACKS_SIGNAL, HangLimits
from pentatron.supervise.heartbeat import HeartbeatWriter, heartbeat_path, read_heartbeat
from pentatron.supervise.launcher import (
    JOB_FOLDER,
    LAUNCHER_PID,
    LAUNCHER_VARIABLES,
    RESTART_COUNT,
    WORKER_VARIABLES,
)
from pentatron.supervise.processes import mark_done, mark_working, rank_file, write_record

# Marks the process that the worker variables are for: its child processes inherit them but are not workers.
WORKER = "PENTATRON_WORKER"
# Set by the launcher for its workers: the monotonic clock when the job began.
BEGAN = "PENTATRON_BEGAN"
_TORCHRUN_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_PR_SET_PDEATHSIG = 1
_HEARTBEAT_SECONDS = 0.5


@dataclass(frozen=True)
class SupervisedWorker:
    """A worker process of pentatron's own launcher. `restarts`: number of restarts of the job so far."""

    folder: Path
    launcher: int
    rank: int
    restarts: int

    def attach_to_launcher(self) -> None:
        """Requests SIGTERM on the death of the launcher, and enables stack traces for crashes and hangs."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != self.launcher:
            # The launcher died before prctl: no signal will come.
            sys.exit(128 + signal.SIGTERM)
        # The lock keeps later jobs from removing the folder as stale while this process is alive.
        lock_scratch_folder(self.folder)
        mark_working(self.folder, self.rank)
        # Both files stay open until the process ends: faulthandler writes to their descriptors.
        crash, stacks = (rank_file(self.folder, self.rank, kind) for kind in ("crash", "stacks"))
        faulthandler.enable(crash.open("w", encoding="utf-8"))
        faulthandler.register(STACKS_SIGNAL, stacks.open("w", encoding="utf-8"))

    def heartbeat_writer(self, status: RankStatus, limits: HangLimits) -> HeartbeatWriter:
        """Returns the heartbeat that reports the status of this rank to the launcher."""
        path, host = heartbeat_path(self.folder, self.rank), socket.gethostname()
        check = _OrphanWatchdog(self, status, limits).check
        return HeartbeatWriter(path, self.rank, host, status, _HEARTBEAT_SECONDS, on_beat=check)

    def record_finished(self) -> None:
        """Records that this rank completed its work, which exit code 0 alone does not prove."""
        with contextlib.suppress(OSError):
            mark_done(self.folder, self.rank)

    def record_lost_rank(self, sentence: str) -> None:
        """Records a failure that the loss of another rank caused; only that rank's error is printed."""
        self._write("lost", f"{sentence}\n")

    def record_failure(self, error: BaseException) -> None:
        """Records the stack trace of an exception for the launcher."""
        text = "".join(traceback.format_exception(error))
        is_consequence = isinstance(error, RuntimeError) and collective_error(str(error), 0) is not None
        self._write("lost" if is_consequence else "exception", text)

    def _write(self, kind: str, text: str) -> None:
        try:
            write_record(self.folder, self.rank, kind, text, time.time())
        except OSError:
            # The launcher has died and removed the folder, so it cannot print the record.
            sys.stderr.write(text)

    def remove_orphaned_folder(self) -> None:
        """Removes the folder of the job if the launcher, which normally does, has died."""
        if os.getppid() != self.launcher:
            shutil.rmtree(self.folder, ignore_errors=True)


class _OrphanWatchdog:
    """Kills the job if its launcher has died and this rank hangs; a healthy orphan stops at its next step."""

    def __init__(self, worker: SupervisedWorker, status: RankStatus, limits: HangLimits) -> None:
        self.worker, self.status = worker, status
        # --heartbeat-timeout 0 turns off the launcher's hang detection, but an orphan has nothing else to end
        # it: None stands for the automatic limit.
        self.limits = limits if limits.heartbeat != 0 else replace(limits, heartbeat=None)
        self._progress: tuple[int, int] | None = None
        self._since = 0.0

    def check(self) -> None:
        """Called at each heartbeat, by the heartbeat thread, because the main thread may hang."""
        if os.getppid() == self.worker.launcher:
            return
        progress = (self.status.step, self.status.calls)
        if progress != self._progress:
            self._progress, self._since = progress, time.monotonic()
        elif time.monotonic() - self._since > self.limits.progress_timeout(self.status):
            self._kill_job()

    def _kill_job(self) -> None:
        """Kills all ranks, because a rank that is stopped (SIGSTOP) cannot kill itself; this process last."""
        beats = [read_heartbeat(path) for path in self.worker.folder.glob("*.beat")]
        shutil.rmtree(self.worker.folder, ignore_errors=True)
        for pid in [beat.pid for beat in beats if beat is not None and beat.pid != os.getpid()]:
            if _belongs_to_job(pid, self.worker.folder):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
        os.killpg(os.getpid(), signal.SIGKILL)


def _belongs_to_job(pid: int, folder: Path) -> bool:
    """Whether the process is a rank of this job. The pid of a rank that has ended may have been reused."""
    if not Path("/proc/self/environ").exists():
        return True
    with contextlib.suppress(OSError):
        return f"{JOB_FOLDER}={folder}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def current_worker() -> SupervisedWorker | None:
    """Returns this process as a worker, if pentatron's own launcher started it."""
    if any(name not in os.environ for name in (LAUNCHER_PID, JOB_FOLDER, RESTART_COUNT, "RANK")):
        return None
    if os.environ.get(WORKER, marker := _marker()).partition("\n")[0] != str(os.getpid()):
        return None
    os.environ[WORKER] = marker
    launcher, rank, restarts = (int(os.environ[name]) for name in (LAUNCHER_PID, "RANK", RESTART_COUNT))
    return SupervisedWorker(Path(os.environ[JOB_FOLDER]), launcher, rank, restarts)


def clear_inherited_worker_variables() -> None:
    """Removes worker variables that a command, such as one in a user's hook, inherited from a worker.

    Keeps variables that another launcher has set since, such as a torchrun that the worker started.
    """
    inherited = os.environ.get(WORKER, "").split("\n")
    if inherited[0] in ("", str(os.getpid())):
        return
    del os.environ[WORKER]
    current = _marker().split("\n")
    others = LAUNCHER_VARIABLES if inherited[1] == current[1] else ()
    for name in WORKER_VARIABLES if inherited[1:] == current[1:] else others:
        os.environ.pop(name, None)


def _marker() -> str:
    """Returns the value of `WORKER`: the pid, and the job, rank and port, which another launcher changes."""
    job = (os.environ.get(name, "") for name in (JOB_FOLDER, "RANK", "MASTER_PORT"))
    return "\n".join([str(os.getpid()), *job])


def current_attempt(environment: Mapping[str, str], run_dir: Path) -> Attempt:
    """Detects whether this start is a restart by pentatron's launcher, by torchrun or by Slurm (requeue)."""
    launchers: dict[str, LauncherState] = {}
    if _TORCHRUN_RESTARTS in environment:
        restarts = _count(environment, _TORCHRUN_RESTARTS)
        launchers["torchrun"] = LauncherState(_torchrun_id(environment), restarts)
    if "SLURM_JOB_ID" in environment or "SLURM_RESTART_COUNT" in environment:
        restarts = _count(environment, "SLURM_RESTART_COUNT")
        launchers["slurm"] = LauncherState(environment.get("SLURM_JOB_ID"), restarts)
    worker = current_worker()
    is_restart = worker is not None and worker.restarts > 0
    attempt = Attempt(True, launchers) if is_restart else identify_attempt(run_dir, launchers)
    began = time.monotonic()
    if worker is not None:
        # All attempts of a job share one time limit, which counts from the start of the launcher.
        with contextlib.suppress(KeyError, ValueError):
            began = float(environment[BEGAN])
    return replace(attempt, began=began)


def _torchrun_id(environment: Mapping[str, str]) -> str | None:
    """Returns an id that all ranks and restarts of one torchrun share, and no other torchrun has.

    On one machine it is the folder for the errors of the workers, which each torchrun creates for itself.
    """
    names = ("TORCHELASTIC_ERROR_FILE", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    errors, local, world = (environment.get(name, "") for name in names)
    if errors and local == world:
        return str(Path(errors).parents[2])
    name = environment.get("TORCHELASTIC_RUN_ID", "none")
    if name != "none":
        return name
    point = [environment.get(part, "") for part in ("MASTER_ADDR", "MASTER_PORT")]
    return ":".join(point) if all(point) else None


def _count(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "0").strip()
    return int(text) if text.isascii() and text.isdecimal() else 0

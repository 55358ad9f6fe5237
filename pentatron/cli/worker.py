"""A worker of our own launcher: it ends with its launcher, and tells it why it failed."""

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

from pentatron.parallel.rank_status import Whereabouts
from pentatron.parallel.rendezvous import lost_contact
from pentatron.supervise.attempts import Attempt, Launched, attempt_in
from pentatron.supervise.hang import STACKS, Limits, stacks_path
from pentatron.supervise.heartbeat import Heart, beat_path, read_beat
from pentatron.supervise.launcher import JOB, LAUNCHER, OF_A_WORKER, OF_OUR_LAUNCHER, RESTART, hold_folder
from pentatron.supervise.processes import begin_work, crash_path, end_work, write_record

# The process that the variables of a worker are for. Its own children inherit them, and are no workers.
WORKER = "PENTATRON_WORKER"
_PR_SET_PDEATHSIG = 1
_PULSE_SECONDS = 0.5


@dataclass(frozen=True)
class Supervised:
    """This worker's place in its job. `restarts`: how often the job was started again before."""

    folder: Path
    launcher: int
    rank: int
    restarts: int

    def follow_launcher(self) -> None:
        """From the first moment on: whoever loses its launcher is asked to end, and a crash leaves its stacks."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != self.launcher:
            # It went before we could ask to be told.
            sys.exit(128 + signal.SIGTERM)
        # As long as this process lives, no later job takes the folder for a left one.
        hold_folder(self.folder)
        begin_work(self.folder, self.rank)
        # Not closed before the process ends.
        faulthandler.enable(crash_path(self.folder, self.rank).open("w", encoding="utf-8"))
        faulthandler.register(STACKS, stacks_path(self.folder, self.rank).open("w", encoding="utf-8"))

    def heart(self, where: Whereabouts, limits: Limits) -> Heart:
        """Tells the launcher where this rank is."""
        path = beat_path(self.folder, self.rank)
        orphan = _Orphan(self, where, limits)
        return Heart(
            path, self.rank, socket.gethostname(), where, _PULSE_SECONDS, at_pulse=orphan.end_if_stuck
        )

    def finished(self) -> None:
        """Proves to the launcher that this rank came to the end of its work, and did not only end without an error."""
        with contextlib.suppress(OSError):
            end_work(self.folder, self.rank)

    def lost(self, sentence: str) -> None:
        """The end of a rank that only met the end of another: worth a place in its file, not on the terminal."""
        self._write("lost", f"{sentence}\n")

    def failed(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        is_consequence = isinstance(error, RuntimeError) and lost_contact(str(error), 0) is not None
        self._write("lost" if is_consequence else "exception", text)

    def _write(self, kind: str, text: str) -> None:
        try:
            write_record(self.folder, self.rank, kind, text, time.time())
        except OSError:
            # The launcher is gone, and nobody else would tell.
            sys.stderr.write(text)

    def leave(self) -> None:
        """Without a launcher nobody else removes the job's folder."""
        if os.getppid() != self.launcher:
            shutil.rmtree(self.folder, ignore_errors=True)


class _Orphan:
    """Whose launcher is gone, the rank ends by itself at the next step; unless it hangs, and then nobody else would end it."""

    def __init__(self, place: Supervised, where: Whereabouts, limits: Limits) -> None:
        self.place, self.where = place, where
        # Also where the user wants no launcher to judge: there is none any more. A first step or a save gets the time that it gets otherwise.
        self.limits = limits if limits.heartbeat != 0 else replace(limits, heartbeat=None)
        self._at: tuple[int, int] | None = None
        self._since = 0.0

    def end_if_stuck(self) -> None:
        """Called now and then, by another thread than the one that may hang."""
        if os.getppid() == self.place.launcher:
            return
        at = (self.where.step, self.where.calls)
        if at != self._at:
            self._at, self._since = at, time.monotonic()
        elif time.monotonic() - self._since > self.limits.of(self.where):
            self._end_all()

    def _end_all(self) -> None:
        """The other ranks too: one that is stopped cannot end itself."""
        beats = [read_beat(path) for path in self.place.folder.glob("*.beat")]
        shutil.rmtree(self.place.folder, ignore_errors=True)
        for pid in [beat.pid for beat in beats if beat is not None and beat.pid != os.getpid()]:
            if _is_of_job(pid, self.place.folder):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
        os.killpg(os.getpid(), signal.SIGKILL)


def _is_of_job(pid: int, folder: Path) -> bool:
    """Numbers of processes come again: one of a rank that has ended may be somebody else's by now."""
    if not Path("/proc/self/environ").exists():
        return True
    try:
        return f"{JOB}={folder}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def this_worker() -> Supervised | None:
    """This process, if our own launcher started it as a worker."""
    if any(name not in os.environ for name in (LAUNCHER, JOB, RESTART, "RANK")):
        return None
    if os.environ.get(WORKER, own := _marker()).partition("\n")[0] != str(os.getpid()):
        return None
    os.environ[WORKER] = own
    launcher, rank, restarts = (int(os.environ[name]) for name in (LAUNCHER, "RANK", RESTART))
    return Supervised(Path(os.environ[JOB]), launcher, rank, restarts)


def leave_parents_job() -> None:
    """Removes the variables of a worker from the environment of a command that the worker started, in a hook of the user's.

    Variables that another launcher has set since, such as a torchrun which the worker started, stay.
    """
    marked = os.environ.get(WORKER, "").split("\n")
    if marked[0] in ("", str(os.getpid())):
        return
    del os.environ[WORKER]
    now = _marker().split("\n")
    names = OF_A_WORKER if marked[1:] == now[1:] else OF_OUR_LAUNCHER if marked[1] == now[1] else ()
    for name in names:
        os.environ.pop(name, None)


def _marker() -> str:
    """The process that the variables of a worker are for, and what tells them from those of another job."""
    return "\n".join([str(os.getpid()), *(os.environ.get(name, "") for name in (JOB, "RANK", "MASTER_PORT"))])


# Whether this start is a restart: by our own launcher, by torchrun, or by Slurm that put the job back into
# the queue.


# Set by the launcher for its workers: the monotonic clock when the job began.
BEGAN = "PENTATRON_BEGAN"
_TORCHRUN = "TORCHELASTIC_RESTART_COUNT"


def this_attempt(environment: Mapping[str, str], run_dir: Path) -> Attempt:
    """This start of the job, as one of the run in the folder. Our own launcher knows itself whether its job has used the folder."""
    launchers: dict[str, Launched] = {}
    if _TORCHRUN in environment:
        launchers["torchrun"] = Launched(_elastic_job(environment), _count(environment, _TORCHRUN))
    if "SLURM_JOB_ID" in environment or "SLURM_RESTART_COUNT" in environment:
        launchers["slurm"] = Launched(
            environment.get("SLURM_JOB_ID"), _count(environment, "SLURM_RESTART_COUNT")
        )
    place = this_worker()
    if place is not None and place.restarts > 0:
        attempt = Attempt(True, launchers)
    else:
        attempt = attempt_in(run_dir, launchers)
    return replace(attempt, began=_began(environment) if place is not None else time.monotonic())


def _began(environment: Mapping[str, str]) -> float:
    """When our launcher began: a job that is restarted has one limit of time for all its attempts."""
    try:
        return float(environment[BEGAN])
    except (KeyError, ValueError):
        return time.monotonic()


def _elastic_job(environment: Mapping[str, str]) -> str | None:
    """What is the same in all restarts of one torchrun, and on all ranks, and in no other torchrun.

    On one machine: the folder it keeps for its workers' errors, which it makes anew each time it is called.
    """
    errors, local, world = (
        environment.get(name, "") for name in ("TORCHELASTIC_ERROR_FILE", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    )
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

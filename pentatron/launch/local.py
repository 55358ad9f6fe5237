"""Workers on this machine, started and watched by ourselves."""

import contextlib
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pentatron.config.errors import BadNumbers, UserError
from pentatron.launch.failure import Failure, failures_of
from pentatron.launch.processes import Process, Signals, end_all, listening, started
from pentatron.train.heartbeat import beat_path, read_beat
from pentatron.train.interrupt import WATCHED, watched_here

# What workers find in their environment: the job's folder, its launcher, and how often the job was started again.
JOB, LAUNCHER, RESTART = "PENTATRON_JOB", "PENTATRON_LAUNCHER", "PENTATRON_RESTART"
# Ends of which a rank has said why, and which another start would not change.
TOLD = (UserError.exit_code, BadNumbers.REPRODUCIBLE, BadNumbers.TRANSIENT)
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


# Looks at the running processes now and then; tells who is at fault where they hang.
Watch = Callable[[Sequence[Process], Path], Failure | None]


def refuse_used_port(port: int) -> None:
    """Says so at once when the meeting point is taken, instead of waiting for a time-out."""
    with _bound(port):
        pass


@contextmanager
def _bound(port: int) -> Iterator[int]:
    """A port of ours, a free one for 0, that nobody else is given; the first rank will listen on it.

    Linux lets a second socket have it as long as the first one does not listen; elsewhere it is free again at once.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UserError(
                f"port {port} cannot be used as the meeting point ({error.strerror}); choose another with --master-port, "
                f"or leave it out to take a free one"
            ) from None
        chosen = probe.getsockname()[1]
        if sys.platform != "linux":
            probe.close()
        yield chosen


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
        chosen = stack.enter_context(_bound(port or 0))
        job = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pentatron-job-")))
        common = {
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(chosen),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            JOB: str(job),
            LAUNCHER: str(launcher),
            RESTART: str(restart),
        }
        of_each = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
        with started(python_words, environment, of_each) as running:
            hang = _follow(running, signals, job, watch)
            end_all(running)
            return _ended(running, signals, job, hang)


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
            agreed = signals.received or all(_is_agreed(code) for code in codes if code)
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
        return Ended(0)
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

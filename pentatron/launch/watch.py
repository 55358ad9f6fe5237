"""The launcher's eye on its ranks: reads their beats, and when the job hangs asks them for their stacks and writes the file."""

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from pentatron.launch.failure import Failure
from pentatron.launch.hang import Hang, HangWatch, Limits, describe, free_path, process_state
from pentatron.launch.processes import Process
from pentatron.train.heartbeat import Beat, beat_path, read_beat

# On which a worker of ours writes the stacks of its threads, whatever it is doing.
STACKS = signal.SIGQUIT
_PAUSE = 0.5
_FOR_AN_ANSWER = 1.5


def stacks_path(job: Path, rank: int) -> Path:
    return job / f"rank-{rank}.stacks"


def read_beats(job: Path, ranks: Sequence[int]) -> list[Beat]:
    return [beat for rank in ranks if (beat := read_beat(beat_path(job, rank))) is not None]


class JobWatch:
    """`folder`: of the run, where the file goes."""

    def __init__(self, limits: Limits, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self.folder, self.clock = limits, folder, clock
        self._watch = HangWatch(limits)
        self._next = 0.0

    def __call__(self, processes: Sequence[Process], job: Path) -> Failure | None:
        """The failure that a hang is, once it is one."""
        now = self.clock()
        if now < self._next:
            return None
        self._next = now + _PAUSE
        running = [process for process in processes if process.code is None]
        beats = read_beats(job, [process.rank for process in running])
        hang = self._watch.look(beats, now, [process.rank for process in running])
        return None if hang is None else self._settle(hang, running, job, len(processes))

    def _settle(self, hang: Hang, running: Sequence[Process], job: Path, ranks: int) -> Failure:
        states = {process.rank: process_state(process.pid) for process in running}
        sentence = hang.sentence(states, ranks)
        # One that has not come so far as to beat would be killed by it.
        listening = {standing.beat.rank for standing in hang.standing}
        for process in running:
            if process.rank in listening:
                process.send(STACKS)
        time.sleep(_FOR_AN_ANSWER)
        stacks = {rank: _read(stacks_path(job, rank)) for rank in listening}
        path = free_path(self.folder, hang.step)
        with suppress(OSError):
            path.write_text(describe(hang, sentence, stacks), encoding="utf-8")
            sentence = f"{sentence}; {path} says where every rank is"
        rank = hang.culprits[0] if hang.culprits else running[0].rank
        return Failure(rank, 1, time.time(), "hung", story=sentence)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

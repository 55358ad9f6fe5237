"""Whether a job hangs, who is at fault, and the file that says so.

A rank that is stopped gives no sign of life; one that loops, or waits for a reader of data, gives signs of life from one place; the others stand
in a collective and wait. Which of them waits for whom follows from the numbers of the collectives that each has begun.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from pentatron.layout.ranks import ranks_in_words
from pentatron.supervise.heartbeat import Beat, beat_path, read_beat
from pentatron.supervise.processes import Failure, Process

# In which a rank computes, step by step; anything else (a start, a save, an evaluation) may take as long as collectives may wait.
_STEADY = ("step", "reading data")
# A step may take so many times as long as the longest before it.
_TIMES_THE_LONGEST_STEP = 10
_LEAST_SECONDS = 60.0
_TIMES_OUTSIDE_STEPS = 5
# Shapes that come late are compiled like those of the first step.
_TIMES_THE_FIRST_STEP = 2
# Between two looks of ours: longer than that, and we were held up ourselves.
_HELD_UP = 5.0


class Pace(Protocol):
    """What limits depend on: of a rank itself (`Whereabouts`), or as it tells others (`Beat`)."""

    @property
    def phase(self) -> str: ...
    @property
    def first_step(self) -> float: ...
    @property
    def longest_step(self) -> float: ...


@dataclass(frozen=True)
class Limits:
    """Seconds. `heartbeat`: as the user wants it, None for what the steps so far suggest, 0 for never; `collective`: how long a collective may wait."""

    heartbeat: float | None
    collective: float

    @property
    def pulse(self) -> float:
        return _LEAST_SECONDS if self.heartbeat is None else self.heartbeat

    def silence(self, pace: Pace) -> float:
        """How long a rank may give no sign: reading, writing or compiling much can hold the interpreter, further steps do not."""
        steady = _is_steady(pace) or self.heartbeat is not None
        return self.pulse if steady else _TIMES_OUTSIDE_STEPS * self.pulse

    def of(self, pace: Pace) -> float:
        """How long a rank may stay where it is."""
        if not _is_steady(pace):
            return max(self.collective, self.pulse)
        if self.heartbeat is not None:
            return self.heartbeat
        usual = max(_LEAST_SECONDS, _TIMES_THE_LONGEST_STEP * pace.longest_step)
        return max(usual, min(_TIMES_THE_FIRST_STEP * pace.first_step, self.collective))


def _is_steady(pace: Pace) -> bool:
    """In a step, and not in the first one, which compiles."""
    return pace.phase in _STEADY and pace.first_step > 0


@dataclass
class _Seen:
    beat: Beat
    pulse_at: float
    place_at: float


@dataclass(frozen=True)
class Standing:
    """A rank as it was found: its last beat, for how long it has given no sign, and for how long it is where it is."""

    beat: Beat
    silent: float
    still: float
    is_silent: bool


@dataclass(frozen=True)
class Hang:
    """`culprits`: the ranks that the others wait for; none where nothing tells them apart."""

    standing: Sequence[Standing]
    culprits: Sequence[int]

    @property
    def step(self) -> int:
        return max(s.beat.step for s in self.standing)

    def sentence(self, states: Mapping[int, str], ranks: int) -> str:
        """What the first culprit does, and what the others wait in. `states`: of processes, where they are known."""
        if not self.culprits:
            places = "; ".join(f"rank {s.beat.rank} {_where(s.beat)}" for s in self.standing[:4])
            return f"after step {self.step} the job hangs and no rank stands out: {places}"
        return f"after step {self.step} rank {self.culprits[0]} of {ranks} {self._what_is_wrong(states)}"

    def _what_is_wrong(self, states: Mapping[int, str]) -> str:
        culprit = self.culprits[0]
        own = next(s for s in self.standing if s.beat.rank == culprit)
        others = [
            s for s in self.standing if s.beat.rank not in self.culprits and s.beat.waits_in is not None
        ]
        waiting = ""
        if others:
            who = ranks_in_words([s.beat.rank for s in others])
            verb = "waits" if len(others) == 1 else "wait"
            waiting = f", and {who} {verb} in the {others[0].beat.waits_in}"
        more = (
            f" (so {'does' if len(self.culprits) == 2 else 'do'} {ranks_in_words(self.culprits[1:])})"
            if len(self.culprits) > 1
            else ""
        )
        if own.is_silent:
            state = states.get(culprit, "")
            return f"is frozen{f' ({state})' if state else ''}: no sign of life for {own.silent:.0f} seconds{more}{waiting}"
        if own.beat.waits_in is not None:
            return f"is not where the others are, as if a collective had been left out{more}: it {_where(own.beat)}{waiting}"
        return f"hangs{more}: for {own.still:.0f} seconds it {_where(own.beat)}{waiting}"


def _where(beat: Beat) -> str:
    if beat.waits_in is not None:
        return f"waits in the {beat.waits_in}"
    if beat.phase == "step":
        return f"computes in step {beat.step + 1}"
    return f"is {beat.phase}, after step {beat.step}"


class HangWatch:
    """Looks at the beats of a job's ranks; the clock is that of whoever looks."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._seen: dict[int, _Seen] = {}
        self._looked = 0.0

    def look(self, beats: Sequence[Beat], now: float, ranks: Sequence[int]) -> Hang | None:
        """What hangs, by now, among these ranks; others have ended."""
        if now - self._looked > _HELD_UP:
            # A machine that was asleep, or a launcher that was stopped: nobody could give signs that were seen.
            self._seen.clear()
        self._looked = now
        self._seen = {rank: seen for rank, seen in self._seen.items() if rank in ranks}
        for beat in beats:
            seen = self._seen.setdefault(beat.rank, _Seen(beat, now, now))
            if beat.pulse != seen.beat.pulse:
                seen.pulse_at = now
            if beat.place != seen.beat.place:
                seen.place_at = now
            seen.beat = beat
        if not beats or self.limits.heartbeat == 0:
            return None
        standing = [
            Standing(
                s.beat, now - s.pulse_at, now - s.place_at, now - s.pulse_at > self.limits.silence(s.beat)
            )
            for _, s in sorted(self._seen.items())
        ]
        limit = max(self.limits.of(s.beat) for s in standing)
        if any(s.is_silent for s in standing) or all(s.still > limit for s in standing):
            return Hang(standing, culprits_of(standing))
        return None


def culprits_of(standing: Sequence[Standing]) -> list[int]:
    """Whom the others wait for, by what all of them do."""
    silent = [s.beat.rank for s in standing if s.is_silent]
    if silent:
        return silent
    busy = [s.beat.rank for s in standing if s.beat.waits_in is None]
    if 0 < len(busy) < len(standing) or len(standing) == 1:
        return busy
    behind: dict[int, None] = {}
    for group in {name for s in standing for name in s.beat.counts}:
        members = [s for s in standing if group in s.beat.counts]
        most = max(s.beat.counts[group] for s in members)
        behind.update(dict.fromkeys(s.beat.rank for s in members if s.beat.counts[group] < most))
    if 0 < len(behind) < len(standing):
        return sorted(behind)
    return _others_than_most(standing)


def _others_than_most(standing: Sequence[Standing]) -> list[int]:
    """Ranks that are in another collective than most while all count the same: they have left one out, and are ahead."""
    kinds: dict[tuple[int, str, int], list[int]] = {}
    for s in standing:
        call = s.beat.waits_in
        if call is not None and call.number:
            kinds.setdefault((s.beat.step, call.what, call.size), []).append(s.beat.rank)
    if len(kinds) < 2:
        return []
    # Few against many; of equally many, those that have come further.
    ranked = sorted((len(ranks), -step, ranks) for (step, _, _), ranks in kinds.items())
    return ranked[0][2] if ranked[0][:2] != ranked[1][:2] else []


def process_state(pid: int) -> str:
    """Of a process of this machine, in words: from /proc, so that one that is stopped need not answer."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    letter = fields.get("State", "?").strip()[:1]
    words = {
        "T": "its process is stopped, as by SIGSTOP",
        "t": "a debugger holds its process",
        "R": "its process runs",
        "S": "its process sleeps",
        "D": "its process waits for a disk or a device",
        "Z": "its process is dead",
    }
    return words.get(letter, f"its process is in state {letter}")


def _children(pid: int) -> list[int]:
    with suppress(OSError, ValueError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def describe(hang: Hang, sentence: str, stacks: Mapping[int, str]) -> str:
    """The file of a hang: who is at fault, where every rank is, and what those that could answer were doing."""
    lines = [f"{datetime.now().astimezone().isoformat(timespec='seconds')}: {sentence}", ""]
    for found in hang.standing:
        beat = found.beat
        mark = "  <- the others wait for this one" if beat.rank in hang.culprits else ""
        lines.append(f"rank {beat.rank} (process {beat.pid} on {beat.host}){mark}")
        lines.append(
            f"  {beat.step} steps done, phase: {beat.phase}, at this place for {found.still:.1f} s, last sign of life {found.silent:.1f} s ago"
        )
        lines.append(f"  {'in no collective' if beat.waits_in is None else f'waits in the {beat.waits_in}'}")
        counts = ", ".join(f"{name}: {count}" for name, count in beat.counts.items())
        lines.append(f"  collectives begun: {counts or 'none'}")
        if beat.host == os.uname().nodename:
            lines.append(f"  {process_state(beat.pid) or 'its process is gone'}")
            lines += [f"  its process {child}: {process_state(child)}" for child in _children(beat.pid)]
        lines.append("")
    for rank, text in sorted(stacks.items()):
        lines += [
            f"--- stacks of rank {rank}, the innermost call first ---",
            text.strip() or "(it did not answer)",
            "",
        ]
    return "\n".join(lines)


def free_path(folder: Path, step: int, is_taken: Callable[[Path], bool] = Path.exists) -> Path:
    """hang-STEP.txt, or with a number where the same step hung before."""
    path, number = folder / f"hang-{step}.txt", 2
    while is_taken(path):
        path, number = folder / f"hang-{step}-{number}.txt", number + 1
    return path


# The launcher's eye on its ranks: reads their beats, and when the job hangs asks them for their stacks and
# writes the file.


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

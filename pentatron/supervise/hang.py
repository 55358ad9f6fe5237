"""Watchdog for hangs: detects them from the ranks' heartbeats, finds the culprit and writes a report.

A frozen process sends no heartbeat. A rank in an endless loop, or waiting for a data loader, sends heartbeats
without progress. All other ranks wait in a collective; the numbers of the collectives that each rank has
started show which rank is missing.
"""

import faulthandler
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from pentatron.layout.ranks import ranks_in_words
from pentatron.parallel.rank_status import RankStatus
from pentatron.supervise.heartbeat import Heartbeat, HeartbeatWriter, heartbeat_path, read_heartbeat
from pentatron.supervise.processes import Failure, Process, rank_file, read_if_possible

# Phases with step limits. Any other phase (start, save, evaluation) may take as long as the collective
# timeout.
_STEP_PHASES = ("step", "reading data")
# A step is a hang after this many times the longest step so far, and after at least _LEAST_SECONDS.
_TIMES_THE_LONGEST_STEP = 10
_LEAST_SECONDS = 60.0
# Factor for a missing heartbeat outside of steps.
_TIMES_OUTSIDE_STEPS = 5
# A step may take this many times the first one: new shapes are compiled again.
_TIMES_THE_FIRST_STEP = 2
# After a longer pause between two checks the watchdog itself was suspended.
_SUSPENDED_SECONDS = 5.0
# Upon this signal a worker writes the stack traces of all its threads, even if it is blocked.
STACKS_SIGNAL = signal.SIGQUIT
_CHECK_SECONDS = 0.5
_STACKS_SECONDS = 1.5


@dataclass(frozen=True)
class HangLimits:
    """Timeouts in seconds.

    `heartbeat`: the user's limit; None derives it from the steps so far, 0 turns the watchdog off.
    `collective`: timeout of collectives.
    """

    heartbeat: float | None
    collective: float

    @property
    def heartbeat_timeout(self) -> float:
        return _LEAST_SECONDS if self.heartbeat is None else self.heartbeat

    def silence_timeout(self, status: RankStatus) -> float:
        """Limit for a missing heartbeat. Outside of steps, I/O or compilation may hold the GIL for long."""
        in_steps = _is_in_steps(status) or self.heartbeat is not None
        return self.heartbeat_timeout if in_steps else _TIMES_OUTSIDE_STEPS * self.heartbeat_timeout

    def progress_timeout(self, status: RankStatus) -> float:
        """Limit for a rank without progress."""
        if not _is_in_steps(status):
            return max(self.collective, self.heartbeat_timeout)
        if self.heartbeat is not None:
            return self.heartbeat
        usual = max(_LEAST_SECONDS, _TIMES_THE_LONGEST_STEP * status.longest_step)
        return max(usual, min(_TIMES_THE_FIRST_STEP * status.first_step, self.collective))


def _is_in_steps(status: RankStatus) -> bool:
    """Whether the rank is in a step other than the first, which compiles."""
    return status.phase in _STEP_PHASES and status.first_step > 0


@dataclass(frozen=True)
class RankState:
    """State of a rank: its last heartbeat, seconds since then, and seconds without progress.

    `is_silent`: whether the heartbeat is overdue.
    """

    beat: Heartbeat
    silent_seconds: float
    stalled_seconds: float
    is_silent: bool


@dataclass(frozen=True)
class Hang:
    """A detected hang. `culprits`: the ranks that the others wait for; empty if undetermined."""

    rank_states: Sequence[RankState]
    culprits: Sequence[int]

    @property
    def step(self) -> int:
        return max(s.beat.step for s in self.rank_states)

    def sentence(self, states: Mapping[int, str], ranks: int) -> str:
        """Describes the hang in one sentence. `states`: process states by rank, as far as known."""
        if not self.culprits:
            places = "; ".join(f"rank {s.beat.rank} {_where(s.beat)}" for s in self.rank_states[:4])
            return f"the job hangs after step {self.step}; no single rank is the cause: {places}"
        return f"after step {self.step} rank {self.culprits[0]} of {ranks} {self._diagnosis(states)}"

    def _diagnosis(self, states: Mapping[int, str]) -> str:
        culprit = self.culprits[0]
        state = next(s for s in self.rank_states if s.beat.rank == culprit)
        others = [s for s in self.rank_states if s.beat.rank not in self.culprits and s.beat.waits_in]
        waiting = more = ""
        if others:
            who = ranks_in_words([s.beat.rank for s in others])
            verb = "waits" if len(others) == 1 else "wait"
            waiting = f", and {who} {verb} in the {others[0].beat.waits_in}"
        if len(self.culprits) > 1:
            verb = "does" if len(self.culprits) == 2 else "do"
            more = f" (so {verb} {ranks_in_words(self.culprits[1:])})"
        if state.is_silent:
            process = states.get(culprit, "")
            return f"is frozen{f' ({process})' if process else ''}: no heartbeat for {state.silent_seconds:.0f} seconds{more}{waiting}"
        if state.beat.waits_in is not None:
            return f"waits in a different collective than the other ranks, so it may have skipped one{more}: it {_where(state.beat)}{waiting}"
        return f"hangs{more}: for {state.stalled_seconds:.0f} seconds it {_where(state.beat)}{waiting}"


def _where(beat: Heartbeat) -> str:
    if beat.waits_in is not None:
        return f"waits in the {beat.waits_in}"
    if beat.phase == "step":
        return f"computes in step {beat.step + 1}"
    return f"is {beat.phase}, after step {beat.step}"


class HangDetector:
    """Detects hangs from heartbeats, with the clock of the observer only."""

    def __init__(self, limits: HangLimits) -> None:
        self.limits = limits
        # The last heartbeat of each rank, and when its pulse and its place have last changed.
        self._seen: dict[int, tuple[Heartbeat, float, float]] = {}
        self._last_check = 0.0

    def check(self, beats: Sequence[Heartbeat], now: float, ranks: Sequence[int]) -> Hang | None:
        """Returns the hang of the running `ranks`, if there is one."""
        if now - self._last_check > _SUSPENDED_SECONDS:
            # The machine was asleep or the launcher was stopped: heartbeats were missed.
            self._seen.clear()
        self._last_check = now
        self._seen = {rank: seen for rank, seen in self._seen.items() if rank in ranks}
        for beat in beats:
            before, beat_at, place_at = self._seen.get(beat.rank, (beat, now, now))
            beat_at = beat_at if beat.pulse == before.pulse else now
            place_at = place_at if beat.place == before.place else now
            self._seen[beat.rank] = beat, beat_at, place_at
        if not beats or self.limits.heartbeat == 0:
            return None
        rank_states = [
            RankState(beat, now - beat_at, now - place_at, now - beat_at > self.limits.silence_timeout(beat))
            for _, (beat, beat_at, place_at) in sorted(self._seen.items())
        ]
        limit = max(self.limits.progress_timeout(s.beat) for s in rank_states)
        if any(s.is_silent for s in rank_states) or all(s.stalled_seconds > limit for s in rank_states):
            return Hang(rank_states, find_culprits(rank_states))
        return None


def find_culprits(rank_states: Sequence[RankState]) -> list[int]:
    """Returns the ranks that the others wait for.

    These are silent ranks, else ranks outside of collectives, else ranks that have started fewer collectives
    of a group than its other members, else ranks in another collective than most.
    """
    silent = [s.beat.rank for s in rank_states if s.is_silent]
    if silent:
        return silent
    busy = [s.beat.rank for s in rank_states if s.beat.waits_in is None]
    if 0 < len(busy) < len(rank_states) or len(rank_states) == 1:
        return busy
    behind: dict[int, None] = {}
    for group in {name for s in rank_states for name in s.beat.counts}:
        members = [s for s in rank_states if group in s.beat.counts]
        most = max(s.beat.counts[group] for s in members)
        behind.update(dict.fromkeys(s.beat.rank for s in members if s.beat.counts[group] < most))
    if 0 < len(behind) < len(rank_states):
        return sorted(behind)
    return _minority(rank_states)


def _minority(rank_states: Sequence[RankState]) -> list[int]:
    """Returns the ranks in another collective than most: with equal counts, they skipped one."""
    kinds: dict[tuple[int, str, int], list[int]] = {}
    for s in rank_states:
        call = s.beat.waits_in
        if call is not None and call.number:
            kinds.setdefault((s.beat.step, call.what, call.size), []).append(s.beat.rank)
    if len(kinds) < 2:
        return []
    # The smallest group; of equally large groups, the one in the latest step.
    ranked = sorted((len(ranks), -step, ranks) for (step, _, _), ranks in kinds.items())
    return ranked[0][2] if ranked[0][:2] != ranked[1][:2] else []


def process_state(pid: int) -> str:
    """Describes the state of a local process. From /proc, as a stopped process does not respond."""
    text = read_if_possible(Path(f"/proc/{pid}/status"))
    if not text:
        return ""
    fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    letter = fields.get("State", "?").strip()[:1]
    words = {
        "T": "its process is stopped, e.g. by SIGSTOP",
        "t": "its process is stopped by a debugger",
        "R": "its process runs",
        "S": "its process sleeps",
        "D": "its process waits for a disk or a device",
        "Z": "its process is a zombie",
    }
    return words.get(letter, f"its process is in state {letter}")


def format_report(hang: Hang, sentence: str, stacks: Mapping[int, str]) -> str:
    """Formats the report of a hang: the culprit, the state of every rank, and stack traces."""
    lines = [f"{datetime.now().astimezone().isoformat(timespec='seconds')}: {sentence}", ""]
    for state in hang.rank_states:
        beat = state.beat
        mark = "  <- the others wait for this one" if beat.rank in hang.culprits else ""
        lines.append(f"rank {beat.rank} (process {beat.pid} on {beat.host}){mark}")
        lines.append(
            f"  {beat.step} steps done, phase: {beat.phase}, without progress for {state.stalled_seconds:.1f} s, last heartbeat {state.silent_seconds:.1f} s ago"
        )
        lines.append(f"  {'in no collective' if beat.waits_in is None else f'waits in the {beat.waits_in}'}")
        counts = ", ".join(f"{name}: {count}" for name, count in beat.counts.items())
        lines.append(f"  collectives begun: {counts or 'none'}")
        if beat.host == os.uname().nodename:
            lines.append(f"  {process_state(beat.pid) or 'its process is gone'}")
            children = read_if_possible(Path(f"/proc/{beat.pid}/task/{beat.pid}/children")).split()
            lines += [f"  its process {child}: {process_state(int(child))}" for child in children]
        lines.append("")
    for rank, text in sorted(stacks.items()):
        title = f"--- stacks of rank {rank}, the innermost call first ---"
        lines += [title, text.strip() or "(no response)", ""]
    return "\n".join(lines)


def report_path(folder: Path, step: int, is_taken: Callable[[Path], bool] = Path.exists) -> Path:
    """Returns hang-STEP.txt, with a number if that step has hung before."""
    path, number = folder / f"hang-{step}.txt", 2
    while is_taken(path):
        path, number = folder / f"hang-{step}-{number}.txt", number + 1
    return path


def read_heartbeats(job: Path, ranks: Sequence[int]) -> list[Heartbeat]:
    return [beat for rank in ranks if (beat := read_heartbeat(heartbeat_path(job, rank))) is not None]


class JobWatchdog:
    """The launcher's watchdog over its workers. `folder`: the run folder, for the report."""

    def __init__(self, limits: HangLimits, folder: Path) -> None:
        self.limits, self.folder = limits, folder
        self._detector = HangDetector(limits)
        self._next = 0.0

    def __call__(self, processes: Sequence[Process], job: Path) -> Failure | None:
        """Returns the failure if the job hangs."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + _CHECK_SECONDS
        running = [process for process in processes if process.code is None]
        beats = read_heartbeats(job, [process.rank for process in running])
        hang = self._detector.check(beats, now, [process.rank for process in running])
        return None if hang is None else self._report_hang(hang, running, job, len(processes))

    def _report_hang(self, hang: Hang, running: Sequence[Process], job: Path, ranks: int) -> Failure:
        states = {process.rank: process_state(process.pid) for process in running}
        sentence = hang.sentence(states, ranks)
        # The signal would kill a worker that has not yet installed its handler, and sends no heartbeat
        # either.
        listening = {state.beat.rank for state in hang.rank_states}
        for process in running:
            if process.rank in listening:
                process.send(STACKS_SIGNAL)
        time.sleep(_STACKS_SECONDS)
        stacks = {rank: read_if_possible(rank_file(job, rank, "stacks")) for rank in listening}
        path = report_path(self.folder, hang.step)
        with suppress(OSError):
            path.write_text(format_report(hang, sentence, stacks), encoding="utf-8")
            sentence = f"{sentence}; {path} has the state of every rank"
        rank = hang.culprits[0] if hang.culprits else running[0].rank
        return Failure(rank, 1, time.time(), "hung", message=sentence)


# Watchdog for hangs without our launcher, as under torchrun or Slurm: every rank watches itself and its
# peers.
#
# A rank with progress only writes its heartbeat. A rank without progress reads those of its peers in the run
# folder. If no rank has progress, the first to notice writes the report, and every rank exits, so that the
# launcher sees a failure.


_LONGEST_PAUSE = 5.0
# Heartbeats of the peers to compare before the job counts as hung.
_CHECKS = 3


@dataclass(eq=False)
class PeerWatchdog:
    """A rank's watchdog over itself and its peers.

    `folder`: the run folder, on a shared file system. `print_line` prints to the terminal.
    """

    status: RankStatus
    rank: int
    ranks: int
    folder: Path
    limits: HangLimits
    print_line: Callable[[str], None]
    writer: HeartbeatWriter | None = None
    _place: object = None
    _since: float = field(default_factory=time.monotonic)
    _first: dict[int, Heartbeat] = field(default_factory=dict)
    _checks: int = 0
    # Reports of earlier hangs, from before this start.
    _earlier_reports: frozenset[Path] = frozenset()

    @property
    def beats(self) -> Path:
        return self.folder / "ranks"

    def start(self) -> None:
        """Starts the heartbeat. Called once the run folder is locked; ignores an unwritable folder."""
        with suppress(OSError):
            self._earlier_reports = frozenset(self.folder.glob("hang-*.txt"))
            self.beats.mkdir(exist_ok=True)
            path = heartbeat_path(self.beats, self.rank)
            host, pause = os.uname().nodename, min(_LONGEST_PAUSE, self.limits.heartbeat_timeout / 4)
            self.writer = HeartbeatWriter(path, self.rank, host, self.status, pause, True, self.on_beat)
            self.writer.start()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            with suppress(OSError):
                self.beats.rmdir()

    def on_beat(self) -> None:
        if self.status.place != self._place:
            self._place, self._since, self._checks = self.status.place, time.monotonic(), 0
            return
        if time.monotonic() - self._since <= self.limits.progress_timeout(self.status):
            return
        if self.writer is not None and self.writer.last_write_succeeded:
            # If this rank cannot write, peers probably cannot either, and only seem frozen.
            self._check_peers()

    def _check_peers(self) -> None:
        now = {beat.rank: beat for beat in read_heartbeats(self.beats, range(self.ranks))}
        if not self._checks:
            self._first = now
        self._checks += 1
        before = {rank: self._first.get(rank, beat) for rank, beat in now.items()}
        if any(beat.place != before[rank].place for rank, beat in now.items()):
            # A peer makes progress: this rank may be waiting for it.
            self._checks = 0
        elif self._checks > _CHECKS:
            stalled = time.monotonic() - self._since
            rank_states = []
            for rank, beat in now.items():
                is_silent = beat.pulse == before[rank].pulse
                rank_states.append(RankState(beat, stalled if is_silent else 0.0, stalled, is_silent))
            self._report_and_exit(Hang(rank_states, find_culprits(rank_states)))

    def _report_and_exit(self, hang: Hang) -> None:
        host = os.uname().nodename
        states = {s.beat.rank: process_state(s.beat.pid) for s in hang.rank_states if s.beat.host == host}
        with suppress(OSError), (self.beats / f"rank-{self.rank:05d}.log").open("a") as log:
            log.write(f"hangs after step {self.status.step}, the innermost call first:\n")
            log.flush()
            faulthandler.dump_traceback(log, all_threads=True)
        sentence = hang.sentence(states, self.ranks)
        path = report_path(self.folder, hang.step, self._earlier_reports.__contains__)
        try:
            # Mode "x": of all ranks that notice the hang, one writes the report.
            with path.open("x", encoding="utf-8") as file:
                file.write(format_report(hang, sentence, {}))
                file.write(f"The stacks of the ranks that responded are in {self.beats}.\n")
            self.print_line(f"{sentence}; {path} has the state of every rank, {self.beats} their stacks")
        except FileExistsError:
            pass
        except OSError as error:
            self.print_line(f"{sentence}; {path} cannot be written ({error.strerror})")
        os._exit(1)

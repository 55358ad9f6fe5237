"""Watchdog for hangs without our launcher, as under torchrun or Slurm: every rank watches itself and its
peers.

A rank with progress only writes its heartbeat. A rank without progress reads those of its peers in the run
folder. If no rank has progress, the first to notice writes the report, and every rank exits, so that the
launcher sees a failure.
"""

import contextlib
import faulthandler
import os
import time
from collections.abc import Callable
from pathlib import Path

from pentatron.parallel.rank_status import RankStatus
from pentatron.supervise.hang import (
    Hang,
    HangLimits,
    RankState,
    find_culprits,
    format_report,
    process_state,
    read_heartbeats,
    report_path,
)
from pentatron.supervise.heartbeat import Heartbeat, HeartbeatWriter, heartbeat_path

_SLOWEST_PULSE = 5.0
# Heartbeats of the peers to compare before the job counts as hung.
_LOOKS = 3


class PeerWatchdog:
    """A rank's watchdog over itself and its peers.

    `folder`: the run folder, on a shared file system. `tell` prints a line to the terminal.
    """

    def __init__(
        self,
        where: RankStatus,
        rank: int,
        ranks: int,
        folder: Path,
        limits: HangLimits,
        tell: Callable[[str], None],
    ) -> None:
        self.where, self.rank, self.ranks, self.folder = where, rank, ranks, folder
        self.limits, self.tell = limits, tell
        self.heart: HeartbeatWriter | None = None
        self._place: object = None
        self._since = time.monotonic()
        self._first: dict[int, Heartbeat] = {}
        self._looks = 0
        # Reports of earlier hangs, from before this start.
        self._earlier_reports: frozenset[Path] = frozenset()

    @property
    def pause(self) -> float:
        return min(_SLOWEST_PULSE, self.limits.pulse / 4)

    @property
    def beats(self) -> Path:
        return self.folder / "ranks"

    def start(self) -> None:
        """Starts the heartbeat. Called once the run folder is locked; ignores an unwritable folder."""
        with contextlib.suppress(OSError):
            self._earlier_reports = frozenset(self.folder.glob("hang-*.txt"))
            self.beats.mkdir(exist_ok=True)
            path = heartbeat_path(self.beats, self.rank)
            host = os.uname().nodename
            self.heart = HeartbeatWriter(path, self.rank, host, self.where, self.pause, True, self.at_pulse)
            self.heart.start()

    def close(self) -> None:
        if self.heart is not None:
            self.heart.close()
            with contextlib.suppress(OSError):
                self.beats.rmdir()

    def at_pulse(self) -> None:
        place = (self.where.step, self.where.phase, self.where.calls)
        if place != self._place:
            self._place, self._since, self._looks = place, time.monotonic(), 0
            return
        if time.monotonic() - self._since <= self.limits.of(self.where):
            return
        if self.heart is not None and self.heart.last_write_succeeded:
            # If this rank cannot write, peers probably cannot either, and only seem frozen.
            self._check_peers()

    def _check_peers(self) -> None:
        now = {beat.rank: beat for beat in read_heartbeats(self.beats, range(self.ranks))}
        if not self._looks:
            self._first = now
        self._looks += 1
        before = {rank: self._first.get(rank, beat) for rank, beat in now.items()}
        if any(beat.place != before[rank].place for rank, beat in now.items()):
            # A peer makes progress: this rank may be waiting for it.
            self._looks = 0
        elif self._looks > _LOOKS:
            still = time.monotonic() - self._since
            standing = []
            for rank, beat in now.items():
                is_silent = beat.pulse == before[rank].pulse
                standing.append(RankState(beat, still if is_silent else 0.0, still, is_silent))
            self._report_and_exit(Hang(standing, find_culprits(standing)))

    def _report_and_exit(self, hang: Hang) -> None:
        host = os.uname().nodename
        states = {s.beat.rank: process_state(s.beat.pid) for s in hang.standing if s.beat.host == host}
        with contextlib.suppress(OSError), (self.beats / f"rank-{self.rank:05d}.log").open("a") as log:
            log.write(f"hangs after step {self.where.step}, the innermost call first:\n")
            log.flush()
            faulthandler.dump_traceback(log, all_threads=True)
        sentence = hang.sentence(states, self.ranks)
        path = report_path(self.folder, hang.step, self._earlier_reports.__contains__)
        try:
            # Mode "x": of all ranks that notice the hang, one writes the report.
            with path.open("x", encoding="utf-8") as file:
                file.write(format_report(hang, sentence, {}))
                file.write(f"The stacks of ranks that could tell are in {self.beats}.\n")
            self.tell(f"{sentence}; {path} says where every rank is, and {self.beats} has their stacks")
        except FileExistsError:
            pass
        except OSError as error:
            self.tell(f"{sentence}; {path} cannot be written ({error.strerror})")
        os._exit(1)

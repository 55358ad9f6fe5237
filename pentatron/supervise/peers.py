"""Watching oneself and the others, where the launcher is somebody else's (torchrun, Slurm) and knows nothing of hangs.

While a rank gets on it only writes its own beats. A rank that does not looks at those of the others in the run's folder; if none gets on, the first to
notice writes the file of the hang, and every rank that can ends, so that the launcher sees a failure.
"""

import contextlib
import faulthandler
import os
import time
from collections.abc import Callable
from pathlib import Path

from pentatron.parallel.rank_status import Whereabouts
from pentatron.supervise.hang import (
    Hang,
    Limits,
    Standing,
    culprits_of,
    describe,
    free_path,
    process_state,
    read_beats,
)
from pentatron.supervise.heartbeat import Beat, Heart, beat_path

_SLOWEST_PULSE = 5.0
# Pulses for which the others are looked at before anybody is blamed.
_LOOKS = 3


class PeerWatch:
    """`folder`: of the run, seen by all ranks. `tell` puts a line on the terminal."""

    def __init__(
        self,
        where: Whereabouts,
        rank: int,
        ranks: int,
        folder: Path,
        limits: Limits,
        tell: Callable[[str], None],
    ) -> None:
        self.where, self.rank, self.ranks, self.folder = where, rank, ranks, folder
        self.limits, self.tell = limits, tell
        self.heart: Heart | None = None
        self._place: object = None
        self._since = time.monotonic()
        self._first: dict[int, Beat] = {}
        self._looks = 0
        # Files of earlier hangs, which a rank of this attempt has not written.
        self._earlier: frozenset[Path] = frozenset()

    @property
    def pause(self) -> float:
        return min(_SLOWEST_PULSE, self.limits.pulse / 4)

    @property
    def beats(self) -> Path:
        return self.folder / "ranks"

    def start(self) -> None:
        """Once the run's folder is ours. A folder that cannot be written is somebody else's complaint."""
        with contextlib.suppress(OSError):
            self._earlier = frozenset(self.folder.glob("hang-*.txt"))
            self.beats.mkdir(exist_ok=True)
            path = beat_path(self.beats, self.rank)
            host = os.uname().nodename
            self.heart = Heart(path, self.rank, host, self.where, self.pause, True, self.at_pulse)
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
        if self.heart is not None and self.heart.is_heard:
            # Whoever cannot write itself would take others that cannot for frozen.
            self._look_at_the_others()

    def _look_at_the_others(self) -> None:
        now = {beat.rank: beat for beat in read_beats(self.beats, range(self.ranks))}
        if not self._looks:
            self._first = now
        self._looks += 1
        before = {rank: self._first.get(rank, beat) for rank, beat in now.items()}
        if any(beat.place != before[rank].place for rank, beat in now.items()):
            # Somebody gets on: whoever waits for that one waits rightly.
            self._looks = 0
        elif self._looks > _LOOKS:
            still = time.monotonic() - self._since
            self._end(
                [
                    Standing(
                        beat,
                        still if beat.pulse == before[rank].pulse else 0.0,
                        still,
                        beat.pulse == before[rank].pulse,
                    )
                    for rank, beat in now.items()
                ]
            )

    def _end(self, standing: list[Standing]) -> None:
        hang = Hang(standing, culprits_of(standing))
        host = os.uname().nodename
        here = {s.beat.rank: process_state(s.beat.pid) for s in standing if s.beat.host == host}
        with contextlib.suppress(OSError), (self.beats / f"rank-{self.rank:05d}.log").open("a") as log:
            log.write(f"hangs after step {self.where.step}, the innermost call first:\n")
            log.flush()
            faulthandler.dump_traceback(log, all_threads=True)
        sentence = hang.sentence(here, self.ranks)
        path = free_path(self.folder, hang.step, self._earlier.__contains__)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(describe(hang, sentence, {}))
                file.write(f"The stacks of ranks that could tell are in {self.beats}.\n")
            self.tell(f"{sentence}; {path} says where every rank is, and {self.beats} has their stacks")
        except FileExistsError:
            # Another rank was first, and has said it.
            pass
        except OSError as error:
            self.tell(f"{sentence}; {path} cannot be written ({error.strerror})")
        os._exit(1)

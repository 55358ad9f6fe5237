"""Kills the ranks and the launcher of one run at random moments, many times."""

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.launching import children_of, is_running

_PAUSE = 0.005
# Timeouts in seconds: of anything that should happen, and of the end of orphaned ranks.
_PATIENCE = 300.0
_ORPHANS_END = 60.0
# Seconds in which ranks that were not killed may still write.
_DYING = 0.3
# Probability that two ranks are killed at once.
_BOTH = 0.2
# Targets of a kill and their weights.
AIMS = {"step": 9, "save": 5, "start": 3, "launcher": 3, "everything": 2}

Start = Callable[[Sequence[str], Path], Any]


class ChaosFailed(Exception):
    """Raised if the run did not survive or left processes behind."""


@dataclass
class Kill:
    """One kill, and its cost.

    `place`: what the run was doing, as seen from outside. `starts`: number of starts in the log by then.
    `lost`: steps that had to be computed again; of several kills without a step between, the first one has
    them.
    """

    place: str
    victims: str
    reached: int
    starts: int
    at: float
    lost: int = 0
    back_after: float | None = None


@dataclass
class Log:
    """Follows the run's log as it grows."""

    path: Path
    resumed_at: int = 0
    # `step`: last step of this start, if any. `computed`: steps of all starts.
    step: int | None = None
    computed: int = 0
    starts: int = 0
    _place: int = 0
    _rest: str = ""

    def read(self) -> bool:
        """Reads new lines; returns whether they have a step."""
        if not self.path.exists() or self.path.stat().st_size == self._place:
            return False
        with self.path.open(encoding="utf-8", errors="replace") as file:
            file.seek(self._place)
            text = self._rest + file.read()
            self._place = file.tell()
        *lines, self._rest = text.split("\n")
        before = self.computed
        for line in lines:
            self._take(line)
        return self.computed > before

    def _take(self, line: str) -> None:
        if line.startswith("time to initialize"):
            self.starts, self.step, self.resumed_at = self.starts + 1, None, 0
        elif match := re.match(r"resuming at step (\d+) of", line):
            self.resumed_at = int(match[1])
        elif match := re.search(r"\] iteration +(\d+)/", line):
            self.step = int(match[1])
            self.computed += 1


@dataclass
class Campaign:
    """`startup` and `step_seconds`: durations in an undisturbed run."""

    words: Sequence[str]
    folder: Path
    ranks: int
    start: Start
    startup: float
    step_seconds: float
    dice: random.Random
    kills: list[Kill] = field(default_factory=list)
    launchers_killed: int = 0
    gave_up: int = 0
    has_ended: bool = False
    hurt: frozenset[int] = frozenset()
    last_kill: float = 0.0

    def run(self, count: int, steps: int, interval: int, tell: Callable[[str], None]) -> float:
        """Kills `count` times while the run trains to its end; returns its duration in seconds."""
        self.log = Log(self.folder / "train.log")
        thresholds = sorted(self.dice.randint(1, steps - 2 * interval) for _ in range(count))
        begun = time.monotonic()
        self._launch()
        for number, threshold in enumerate(thresholds, 1):
            self._strike(self.dice.choices(list(AIMS), list(AIMS.values()))[0], threshold)
            kill = self.kills[-1]
            tell(f"{number:>3} of {count}: {kill.victims} {kill.place}, after step {kill.reached} of {steps}")
        self._until(lambda: self.has_ended, "come to its end")
        return time.monotonic() - begun

    def _launch(self) -> None:
        self.launcher = self.start(self.words, self.folder / "console.log")

    def _strike(self, aim: str, threshold: int) -> None:
        if aim == "start":
            self._until(lambda: bool(self._ranks()), "start its ranks")
            self._pass(self.dice.uniform(0, self.startup))
        else:
            self._until(lambda: self._is_training() and (self.log.step or 0) >= threshold, "make steps")
            if aim == "save":
                self._until(lambda: self._is_training() and self._is_saving(), "save")
            self._pass(self.dice.uniform(0, self.step_seconds * (0.2 if aim == "save" else 1.5)))
        if aim in ("launcher", "everything"):
            self._kill_launcher(with_ranks=aim == "everything")
        else:
            self._kill_ranks()

    def _kill_ranks(self) -> None:
        self._until(lambda: bool(self._ranks()), "have ranks")
        ranks = self._ranks()
        chosen = sorted(self.dice.sample(range(len(ranks)), 2 if self.dice.random() < _BOTH else 1))
        self._record("rank " + " and ".join(map(str, chosen)))
        for rank in chosen:
            _kill(ranks[rank])
        self.hurt, self.last_kill = frozenset(ranks), time.time()

    def _kill_launcher(self, with_ranks: bool) -> None:
        """Kills the launcher.

        With its ranks, as a power failure does. Without them, the ranks must notice and end in good order.
        """
        ranks = children_of(self.launcher.pid)
        self._record("the launcher and all ranks" if with_ranks else "the launcher")
        for pid in [self.launcher.pid, *(ranks if with_ranks else ())]:
            _kill(pid)
        self.last_kill = time.time()
        self.launcher.wait(_PATIENCE)
        self.launchers_killed += 1
        deadline = time.monotonic() + _ORPHANS_END
        while left := [pid for pid in ranks if is_running(pid)]:
            if time.monotonic() > deadline:
                raise ChaosFailed(f"the launcher was killed, and {len(left)} of its ranks live on")
            time.sleep(_PAUSE)
        self.last_kill = time.time()
        # Starts the same command again, as a scheduler would.
        self._launch()

    def _record(self, victims: str) -> None:
        self._look()
        place = "in a step" if self._is_training() else "at the start"
        reached = self.log.resumed_at if self.log.step is None else self.log.step
        self.kills.append(
            Kill(
                "in a save" if self._is_saving() else place,
                victims,
                reached,
                self.log.starts,
                time.monotonic(),
            )
        )

    def _is_training(self) -> bool:
        """Whether there was a step since the last kill."""
        return bool(self._ranks()) and self.log.step is not None and not self._is_before_start()

    def _is_before_start(self) -> bool:
        """Whether the last start in the log is the one that was killed."""
        return bool(self.kills) and self.log.starts == self.kills[-1].starts

    def _look(self) -> None:
        """Reads the log for new steps and checks the launcher; restarts one that gave up."""
        if self.log.read() and self.kills:
            self._settle()
        if self.has_ended or self.launcher.poll() is None:
            return
        if self.launcher.returncode == 0:
            self.has_ended = True
        else:
            self.gave_up += 1
            self._launch()

    def _settle(self) -> None:
        """Computes the cost of kills at the next step; the first of several kills has the lost steps."""
        waiting = [kill for kill in self.kills if kill.back_after is None]
        if not waiting:
            return
        if self._is_before_start():
            # The last step of ranks that are still ending.
            waiting[0].reached = max(waiting[0].reached, self.log.step or 0)
            return
        waiting[0].lost = max(0, waiting[0].reached - self.log.resumed_at)
        for kill in waiting:
            kill.back_after = time.monotonic() - kill.at

    def _ranks(self) -> list[int]:
        """Returns the ranks of an attempt without a kill, or none until all have started."""
        found = children_of(self.launcher.pid)
        return [] if self.hurt & set(found) or len(found) < self.ranks else found

    def _is_saving(self) -> bool:
        """Whether a save is in progress; a partial one that the last kill left does not count."""
        for path in (self.folder / "checkpoints").glob(".step-*"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime > self.last_kill + _DYING:
                    return True
        return False

    def _pass(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(_PAUSE, left))
            self._look()

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            if self.has_ended:
                raise ChaosFailed(f"the run ended before all kills: it was to {what} once more")
            if time.monotonic() > deadline:
                raise ChaosFailed(f"the run did not {what} within {_PATIENCE:.0f} s")
            self._look()
            time.sleep(_PAUSE)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

"""Restarts a crashed job from its last checkpoint, until restarts reach no new checkpoint."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pentatron.checkpoint.lock import is_locked
from pentatron.monitor.report import ERROR_PREFIX
from pentatron.monitor.terminal import append_line
from pentatron.supervise.launcher import JobResult
from pentatron.supervise.processes import Failure, ReceivedSignals, append_tracebacks
from pentatron.supervise.signals import signal_name

# Starts the job and waits for its end. The argument is the number of restarts so far.
Attempt = Callable[[int], JobResult]

_POLL_SECONDS = 0.1
_LONGEST_PAUSE = 30


def pause_before(in_vain: int) -> int:
    """Returns the seconds before a restart after `in_vain` restarts without a new checkpoint.

    The first restart is immediate. Later ones back off exponentially, as a lost disk or network may come
    back.
    """
    return min(2 ** (in_vain - 1), _LONGEST_PAUSE) if in_vain else 0


@dataclass
class Supervisor:
    """Runs a job with restarts.

    Args: limit: number of restarts in a row that may reach no new checkpoint. A new checkpoint resets the
    count, as a run of weeks has many unrelated crashes. folder: the run folder, whose log gets the lines that
    `print_line` prints to the terminal. resumes: whether the first start resumes the run in the folder, too.
    saved_step: returns the last step to resume from. resume_hint: how the user resumes the run.
    """

    attempt: Attempt
    ranks: int
    limit: int
    folder: Path
    signals: ReceivedSignals
    resumes: bool
    saved_step: Callable[[], int | None]
    print_line: Callable[[str], None]
    sleep: Callable[[float], None] = time.sleep
    resume_hint: str = "the same command resumes from there"
    # Whether another job holds the folder, which is then not written to.
    _in_use: bool = False

    def run(self) -> JobResult:
        # `in_vain` counts the restarts since the last new checkpoint, `restarts` all of them. A start with 0
        # known restarts follows the user's choice of resuming or not.
        restarts, in_vain, known_restarts, furthest = 0, 0, 0, -1
        while True:
            ended = self.attempt(known_restarts)
            if not ended.failures:
                return ended
            self._in_use = not ended.opened and is_locked(self.folder)
            if ended.is_explained:
                self._keep(ended.failures, restarts)
                return ended
            self._report(ended, restarts)
            # Before the job has opened the folder, its steps may be an earlier run's. Finding them imports
            # torch.
            is_own = self.resumes or ended.opened or known_restarts > 0
            saved = self.saved_step() if is_own else None
            if saved is not None and saved > furthest:
                furthest, in_vain = saved, 0
            reason = self._reason_to_end(ended, restarts, in_vain)
            if reason is None:
                self._say(self._announcement(in_vain, saved, ended.step))
                self._wait(pause_before(in_vain))
                reason = self._requested_stop(ended)
            if reason is not None:
                outcome = "No checkpoint had been saved yet"
                if saved is not None:
                    outcome = f"The last checkpoint, step {saved}, is intact: {self.resume_hint}"
                self._say(f"{reason}. {outcome}")
                return ended
            restarts, in_vain = restarts + 1, in_vain + 1
            known_restarts = restarts if is_own else 0
            self._record(ended.failures[0], restarts, saved or 0, ended.step)

    def _report(self, ended: JobResult, restarts: int) -> None:
        """Prints the first traceback. The log gets one line, the folder `ranks` all tracebacks."""
        first = ended.failures[0]
        records = self._keep(ended.failures, restarts)
        when = f"after step {ended.step}" if ended.advanced else "before its first step was done"
        others = (
            f"; {self.folder / 'ranks'} has the tracebacks of the other ranks" if len(records) > 1 else ""
        )
        note = f"\n(rank {first.rank} failed first{others})" if first.text else others
        self.print_line(f"{ended.failure_message(self.ranks, when)}{note}")
        self._log(f"{ERROR_PREFIX}{first.sentence(self.ranks, when)}")

    def _keep(self, failures: Sequence[Failure], restarts: int) -> list[Path]:
        try:
            return [] if self._in_use else append_tracebacks(failures, self.folder / "ranks", restarts)
        except OSError:
            return []

    def _reason_to_end(self, ended: JobResult, restarts: int, in_vain: int) -> str | None:
        if (requested := self._requested_stop(ended)) is not None:
            return requested
        if self.limit == 0:
            return "not started again (--max-restarts 0)"
        if restarts == 0 and not ended.advanced and ended.exit_code >= 0:
            return "not started again: a failure before the first step would repeat"
        if in_vain >= self.limit:
            tried = "the restart has" if in_vain == 1 else f"{in_vain} restarts in a row have"
            return f"not started again: {tried} reached no new checkpoint (--max-restarts {self.limit}), and it failed after step {ended.step}"
        return None

    def _requested_stop(self, ended: JobResult) -> str | None:
        number = ended.stop_signal or self.signals.first
        return None if number is None else f"not started again, as {signal_name(number)} requested a stop"

    def _wait(self, seconds: int) -> None:
        """Sleeps; returns early upon a signal."""
        for _ in range(round(seconds / _POLL_SECONDS)):
            if self.signals.first is not None:
                return
            self.sleep(_POLL_SECONDS)

    def _announcement(self, in_vain: int, saved: int | None, step: int) -> str:
        lost = max(0, step - (saved or 0))
        place = f"from step {saved}" if saved is not None else "from the beginning (nothing was saved yet)"
        again = {0: "no step is lost", 1: "1 step is lost"}.get(lost, f"{lost} steps are lost")
        pause = f" in {seconds} s" if (seconds := pause_before(in_vain)) else ""
        return f"restarting {place}{pause} ({in_vain + 1} of {self.limit}); {again}"

    def _say(self, text: str) -> None:
        self.print_line(text)
        self._log(text)

    def _log(self, text: str) -> None:
        if not self._in_use:
            append_line(self.folder / "train.log", text)

    def _record(self, failure: Failure, restarts: int, saved: int, step: int) -> None:
        """Appends a row to restarts.jsonl."""
        if self._in_use:
            return
        row = {
            "time": datetime.now().astimezone().isoformat(timespec="seconds"),
            "restart": restarts,
            "rank": failure.rank,
            "how": failure.how,
            "after_step": step,
            "from_step": saved,
            "steps_lost": max(0, step - saved),
        }
        append_line(self.folder / "restarts.jsonl", json.dumps(row))

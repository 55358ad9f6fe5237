"""A job that is started again when it crashes: how often, from where, and when that is in vain."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pentatron.checkpoint.lock import is_in_use
from pentatron.launch.failure import Failure, keep_records
from pentatron.launch.local import Ended
from pentatron.launch.processes import Signals
from pentatron.monitor.report import FAILED
from pentatron.train.interrupt import signal_name

# Restarts without a new checkpoint, one after the other, after which another one is in vain.
_FRUITLESS = 2


# Starts the job; the number says how often it was started again before.
Attempt = Callable[[int], Ended]


@dataclass
class Supervisor:
    """`resumes`: also the first attempt goes on with what is there. `saved_step`: the last step that can be gone on from.

    `tell` puts a line on the terminal; the same lines go to the log of the run in `folder`.
    """

    attempt: Attempt
    ranks: int
    limit: int
    folder: Path
    signals: Signals
    resumes: bool
    saved_step: Callable[[], int | None]
    tell: Callable[[str], None]
    # By another job, which writes there.
    _in_use: bool = False

    def run(self) -> Ended:
        restarts, fruitless, goes_on = 0, 0, 0
        before: int | None = None
        while True:
            ended = self.attempt(goes_on)
            if not ended.failures:
                return ended
            self._in_use = not ended.opened and is_in_use(self.folder)
            if ended.has_told:
                self._keep(ended.failures, restarts)
                return ended
            self._say_what_happened(ended, restarts)
            # What lies there may be an earlier run's, which this one has not yet moved aside. To look takes seconds, as it imports torch.
            is_own = self.resumes or ended.opened or goes_on > 0
            saved = self.saved_step() if is_own else None
            fruitless = fruitless + 1 if restarts and saved == before else 0
            reason = self._why_not_again(ended, restarts, fruitless)
            if reason is not None:
                self._say(f"{reason}. {self._where_it_stands(saved)}")
                return ended
            restarts, before = restarts + 1, saved
            goes_on = restarts if is_own else 0
            self._record(ended.failures[0], restarts, saved or 0, ended.step)
            self._say(self._again(restarts, saved, ended.step))

    def _say_what_happened(self, ended: Ended, restarts: int) -> None:
        """The traceback on the terminal; the log has the sentence, as the ranks' own files have all of them."""
        first = ended.failures[0]
        kept = self._keep(ended.failures, restarts)
        when = f"after step {ended.step}" if ended.advanced else "before its first step was done"
        others = f"; {self.folder / 'ranks'} has what the other ranks said" if len(kept) > 1 else ""
        story = ended.story(self.ranks, when)
        self.tell(f"{story}\n(rank {first.rank} failed first{others})" if first.text else f"{story}{others}")
        self._log(f"{FAILED}{first.sentence(self.ranks, when)}")

    def _keep(self, failures: Sequence[Failure], restarts: int) -> list[Path]:
        try:
            return [] if self._in_use else keep_records(failures, self.folder / "ranks", restarts)
        except OSError:
            return []

    def _why_not_again(self, ended: Ended, restarts: int, fruitless: int) -> str | None:
        if (wished_by := ended.wished_by or self.signals.first) is not None:
            return f"not started again, as {signal_name(wished_by)} asked for an end"
        if self.limit == 0:
            return "not started again (--max-restarts 0)"
        if restarts == 0 and not ended.advanced and ended.exit_code >= 0:
            return "not started again: what fails before the first step would fail again"
        if fruitless >= _FRUITLESS:
            return (
                f"not started again: {_FRUITLESS} restarts have not reached another checkpoint, it fails at the same "
                f"place (after step {ended.step})"
            )
        if restarts >= self.limit:
            return f"not started again: that was restart {restarts} of {self.limit} (--max-restarts)"
        return None

    def _where_it_stands(self, saved: int | None) -> str:
        if saved is None:
            return "No checkpoint had been saved yet"
        return f"The last checkpoint, step {saved}, is intact: the same command goes on from there"

    def _again(self, restarts: int, saved: int | None, step: int) -> str:
        lost = max(0, step - (saved or 0))
        place = f"from step {saved}" if saved is not None else "from the beginning (nothing was saved yet)"
        again = {0: "no step is lost", 1: "1 step is lost"}.get(lost, f"{lost} steps are lost")
        return f"restarting {place} ({restarts} of {self.limit}); {again}"

    def _say(self, text: str) -> None:
        self.tell(text)
        self._log(text)

    def _log(self, text: str) -> None:
        if self._in_use:
            return
        try:
            with (self.folder / "train.log").open("a", encoding="utf-8") as log:
                log.write(f"{text}\n")
        except OSError:
            pass

    def _record(self, failure: Failure, restarts: int, saved: int, step: int) -> None:
        """For whoever looks at the run later."""
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
        try:
            with (self.folder / "restarts.jsonl").open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(row)}\n")
        except OSError:
            pass

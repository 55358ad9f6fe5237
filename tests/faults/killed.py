"""A killed rank is named, the others end within seconds, and the restarted job ends undisturbed."""

import os
import signal
import time
from collections.abc import Callable

from tests.faults.cases import Outcome, Series
from tests.faults.commands import Ran
from tests.faults.damaged_checkpoint import flipped
from tests.faults.injection import Fault, happened
from tests.faults.lab import LAST, LAYOUTS, SAVE_INTERVAL, Lab

SERIES = Series("killed rank")
# Seconds until the others have ended and the dead rank is named; about three on an idle machine.
SECONDS = 8.0
STEP, SAVED = 6, 6


def judged(
    lab: Lab, ran: Ran, layout: str, rank: int, done: int, by: str = "SIGKILL", in_background: bool = False
) -> Outcome:
    """Judges a command in which a rank was killed.

    `done`: steps completed before the kill. With an async save there may be one more.
    """
    outcome = Outcome()
    since, ranks = lab.when(), LAYOUTS[layout].ranks
    outcome.expect_output(ran, rf"rank {rank} of {ranks} was killed by {by}", since, SECONDS)
    outcome.expect(ran.find(r"restarting from step \d+ \(1 of 3\)") is not None, "no restart was announced")
    outcome.ended(ran, 0)
    done = max(done, happened(lab.folder / "happened")[1] - 1)
    outcome.lost(done - ran.resumed_at[-1] if ran.resumed_at else -1, SAVE_INTERVAL + in_background)
    outcome.same_state(lab.all_equal(layout))
    return outcome


def in_step(layout: str, rank: int, at: str, do: str = "kill") -> Callable[[Lab], Outcome]:
    def run(lab: Lab) -> Outcome:
        ran = lab.launch(layout, faults=[Fault(at, do, rank, STEP, once=lab.marker())]).wait()
        return judged(lab, ran, layout, rank, STEP - 1)

    return run


IN_STEP = {
    "in the forward": ("dp2", 1, "forward", "kill"),
    "in the backward": ("dp2", 1, "backward", "kill"),
    "in the optimizer's step, half the weights updated": ("dp2", 1, "update", "kill after"),
    "sending to the next stage": ("pp2", 0, "send", "kill"),
    "receiving from the stage before": ("pp2", 1, "receive", "kill"),
    "in the experts' all-to-all": ("ep2", 1, "all-to-all", "kill"),
    "rank 0, where the others meet": ("dp2", 0, "forward", "kill"),
}
for _name, _words in IN_STEP.items():
    SERIES.case(_name)(in_step(*_words))


@SERIES.case("in the forward, after the reader of the output has left")
def without_reader(lab: Lab) -> Outcome:
    """The message about the failure cannot be written either, which must not end the launcher."""
    reader, writer = os.pipe()
    os.close(reader)
    fault = Fault("forward", "kill", 1, STEP, once=lab.marker())
    return judged(lab, lab.launch("dp2", faults=[fault], output=writer).wait(), "dp2", 1, STEP - 1)


HALF_WRITTEN = f"*/.step-{SAVED:08d}.*/"


def in_save(
    rank: int,
    at: str,
    do: str = "kill",
    done: int = SAVED,
    expected: int = SAVED - SAVE_INTERVAL,
    more: str = "",
    **given: float,
) -> Callable[[Lab], Outcome]:
    """`done`: the step that was being saved. `expected`: the step that can be resumed."""

    def run(lab: Lab) -> Outcome:
        fault = Fault(at, do, rank, once=lab.marker(), **given)  # type: ignore[arg-type]
        ran = lab.launch("dp2", more, [fault]).wait()
        by = "SIGXFSZ" if "write" in do else "SIGKILL"
        outcome = judged(lab, ran, "dp2", rank, done, by, "--async-save" in more)
        outcome.expect(
            ran.resumed_at == [0, expected], f"it went on from {ran.resumed_at}, not from step {expected}"
        )
        left = [
            path.name
            for path in (lab.run / "checkpoints").glob(".*")
            if "step" in path.name or "latest" in path.name
        ]
        outcome.expect(not left, f"what was half written is still there: {left}")
        return outcome

    return run


SHARD = "rank-00001.safetensors"
SERIES.case("in the middle of its shard")(
    in_save(1, f"open {HALF_WRITTEN}{SHARD}", do="kill in the next write", bytes=60_000)
)
SERIES.case("in the middle of its shard, saved in the background")(
    in_save(1, f"open {HALF_WRITTEN}{SHARD}", "kill in the next write", more="--async-save", bytes=60_000)
)
SERIES.case("before the manifest, saved in the background")(
    in_save(0, f"open {HALF_WRITTEN}manifest.json", more="--async-save", seconds=0.3)
)
SERIES.case("between two shards")(in_save(1, f"open {HALF_WRITTEN}{SHARD}", seconds=0.5))
SERIES.case("before the manifest")(in_save(0, f"open {HALF_WRITTEN}manifest.json"))
SERIES.case("between manifest and rename")(in_save(0, f"rename */step-{SAVED:08d}"))
SERIES.case("between rename and pointer")(in_save(0, "open */.latest.*", done=2, expected=2))


@SERIES.case("saving a step again after a rollback")
def resaved(lab: Lab) -> Outcome:
    """A damaged newest step sets the run back; it is killed when it saves that step again."""
    flipped(SHARD)(lab.interrupted("dp2", SAVED))
    ran = lab.launch(
        "dp2", faults=[Fault(f"open {HALF_WRITTEN}{SHARD}", "kill", 1, once=lab.marker())]
    ).wait()
    outcome = judged(lab, ran, "dp2", 1, SAVED)
    before = SAVED - SAVE_INTERVAL
    outcome.expect(
        ran.resumed_at == [before, before], f"it went on from {ran.resumed_at}, not twice from step {before}"
    )
    return outcome


@SERIES.case("the launcher")
def launcher(lab: Lab) -> Outcome:
    """Workers without a launcher save and end; the same command resumes the run."""
    running = lab.launch("dp2", faults=[Fault("forward", "dawdle", 1, seconds=0.2)])
    lab.wait_for_step(running, 5)
    killed_at = time.time()
    running.signal(signal.SIGKILL)
    # Their step and their save may take a while on a machine under load.
    ran = running.wait(leave=30)
    outcome = Outcome(exit_code=ran.code, remark="workers save and end")
    lived = time.time() - killed_at
    outcome.expect(not ran.orphans, f"workers lived for {lived:.1f} s, and are left: {ran.orphans}")
    done = lab.last_step()
    again = lab.fork("dp2")
    outcome.expect_output(again, rf"^resuming at step {done} of {LAST}")
    outcome.detected_after = lived
    outcome.expect(again.code == 0, again.text)
    outcome.lost(done - again.resumed_at[-1], 0)
    outcome.same_state(lab.is_equal("dp2"))
    return outcome


@SERIES.case("five times in one run, any rank")
def five_times(lab: Lab) -> Outcome:
    """Kills at another step and point each time; `make chaos` kills fifty times."""
    points = (("forward", 0, 3), ("backward", 1, 4), ("update", 1, 6), ("forward", 1, 7), ("backward", 0, 9))
    faults = [
        Fault(at, "kill", rank, step, once=lab.marker(f"fault-{number}"))
        for number, (at, rank, step) in enumerate(points)
    ]
    ran, outcome = lab.launch("dp2", "--max-restarts 5", faults).wait(300), Outcome()
    for number, (_, rank, _) in enumerate(points):
        outcome.expect_output(ran, rf"rank {rank} of 2 was killed by SIGKILL", lab.when(f"fault-{number}"))
    outcome.detected_after = None
    outcome.ended(ran, 0)
    lost = [happened(lab.folder / f"fault-{n}")[1] - 1 - at for n, at in enumerate(ran.resumed_at[1:])]
    outcome.expect(len(lost) == len(points), f"it was started {len(lost)} times again")
    outcome.lost(sum(lost), SAVE_INTERVAL * len(points))
    outcome.same_state(lab.all_equal("dp2"))
    return outcome

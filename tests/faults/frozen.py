"""A rank that hangs or fails is named long before the process group times out; a slow one is reported."""

import re
from collections.abc import Callable
from dataclasses import replace

from tests.faults.cases import Outcome, Series
from tests.faults.injection import Fault
from tests.faults.lab import SAVE_INTERVAL, Lab

SERIES = Series("frozen or slow")
STEP = 6
# Timeouts of the heartbeat and of the process group, which must never be reached.
LIMIT, TIMEOUT = 4.0, 600.0
WATCHED = f"--heartbeat-timeout {LIMIT:g} --distributed-timeout-minutes {TIMEOUT / 60:g}"
# Generous, for a machine under load.
SECONDS = 15.0


def hangs(fault: Fault, sentence: str, layout: str = "dp2", more: str = "") -> Callable[[Lab], Outcome]:
    """Expects the hang named, a dump with the status of all ranks, a restart and the undisturbed end."""

    def run(lab: Lab) -> Outcome:
        ran = lab.launch(layout, f"{WATCHED} {more}", [replace(fault, once=lab.marker())]).wait(150)
        outcome = Outcome()
        outcome.expect_output(ran, rf"after step \d+ {sentence}", lab.when(), SECONDS)
        outcome.ended(ran, 0)
        dumps = list(lab.run.glob("hang-*.txt"))
        marked = [
            re.search(r"^rank 1 .*<- the others wait for this one", d.read_text(), re.MULTILINE)
            for d in dumps
        ]
        outcome.expect(len(dumps) == 1 and all(marked), "no file marks the rank that the others wait for")
        done = int(dumps[0].stem.removeprefix("hang-")) if dumps else 0
        outcome.lost(done - ran.resumed_at[-1] if ran.resumed_at else -1, SAVE_INTERVAL)
        outcome.same_state(lab.all_equal(layout))
        return outcome

    return run


WAITS = "rank 0 waits in the "
SERIES.case("SIGSTOP to rank 1")(
    hangs(
        Fault("forward", "freeze", 1, STEP),
        rf"rank 1 of 2 is frozen \(its process is stopped, e.g. by SIGSTOP\).*{WAITS}",
    )
)
SERIES.case("rank 1 loops without end")(
    hangs(
        Fault("forward", "loop", 1, STEP),
        rf"rank 1 of 2 hangs: for \d+ seconds it computes in step 6, and {WAITS}",
    )
)
SERIES.case("rank 1 of 4 leaves a collective out")(
    hangs(
        Fault("sum", "leave out", 1, STEP),
        "rank 1 of 4 waits in a different collective than the other ranks, so it may have skipped one",
        "any dp4",
    )
)
# A data worker does not count steps; it reads two micro-batches for each.
SERIES.case("a data worker of rank 1 loops without end")(
    hangs(
        Fault("sample", "loop", 1, 0, after=10),
        rf"rank 1 of 2 hangs: for \d+ seconds it is reading data.*{WAITS}",
        more="--num-workers 1",
    )
)


@SERIES.case("an exception on rank 1 alone")
def exception(lab: Lab) -> Outcome:
    """Its traceback is the only one shown; errors of other ranks about lost contact are in their files."""
    ran = lab.launch("dp2", faults=[Fault("forward", "raise", 1, STEP, once=lab.marker())]).wait()
    outcome = Outcome()
    outcome.expect_output(ran, r"rank 1 of 2 failed with exit code 1 after step 5:", lab.when(), SECONDS)
    outcome.ended(ran, 0, tracebacks=1)
    outcome.expect("RuntimeError: an error that was planted" in ran.text, "its error is not shown")
    outcome.expect(ran.find("lost contact") is None, "the others' complaints are shown as well")
    outcome.lost(STEP - 1 - ran.resumed_at[-1], SAVE_INTERVAL)
    outcome.same_state(lab.all_equal("dp2"))
    return outcome


@SERIES.case("rank 1 is three times slower")
def straggler(lab: Lab) -> Outcome:
    """A straggler is reported, not killed."""
    slow = Fault("forward", "dawdle", 1, 1, seconds=0.15)
    ran, outcome = (
        lab.launch("dp2", WATCHED, [slow]).wait(150),
        Outcome(remark="reported, continues"),
    )
    outcome.expect_output(
        ran, r"straggler: rank 1 was busy for \d+ ms in step \d+, ranks of the same stage for \d+ ms"
    )
    outcome.ended(ran, 0)
    outcome.expect(ran.find("restarting") is None, "it was started again")
    outcome.same_state(lab.all_equal("dp2"))
    return outcome

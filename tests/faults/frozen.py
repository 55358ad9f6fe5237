"""A rank that hangs, crawls or fails alone: it is named long before the process group would give up, a slow one is only reported."""

from collections.abc import Callable

from tests.faults.cases import Outcome, Series
from tests.faults.injection import Fault
from tests.faults.lab import SAVE_INTERVAL, Lab

SERIES = Series("frozen or slow")
STEP = 6
# The heartbeat's limit, and the process group's, which must never be what is met.
LIMIT, TIMEOUT = 4.0, 600.0
WATCHED = f"--heartbeat-timeout {LIMIT:g} --distributed-timeout-minutes {TIMEOUT / 60:g}"
# On a machine that has other things to do as well.
SECONDS = 25.0


def hangs(
    at: str, do: str, sentence: str, layout: str = "dp2", more: str = "", step: int = STEP
) -> Callable[[Lab], Outcome]:
    """Named, written down with where every rank is, started again, and the same end."""

    def run(lab: Lab) -> Outcome:
        fault = Fault(at, do, 1, step, once=lab.marker())
        ran = lab.launch(layout, f"{WATCHED} {more}", [fault]).wait(150)
        outcome = Outcome()
        outcome.told(ran, sentence, lab.when(), SECONDS)
        outcome.ended(ran, 0)
        outcome.lost(STEP - 1 - ran.resumed_at[-1] if ran.resumed_at else -1, SAVE_INTERVAL)
        outcome.same_state(lab.all_equal(layout))
        dumps = list(lab.run.glob("hang-*.txt"))
        outcome.expect(
            len(dumps) == 1 and "<- the others wait for this one" in dumps[0].read_text(),
            "no file says where every rank is",
        )
        return outcome

    return run


SERIES.case("SIGSTOP to rank 1")(
    hangs(
        "forward",
        "freeze",
        r"rank 1 of 2 is frozen \(its process is stopped, as by SIGSTOP\).*rank 0 waits in the ",
    )
)
SERIES.case("rank 1 loops without end")(
    hangs(
        "forward",
        "loop",
        r"rank 1 of 2 hangs: for \d+ seconds it computes in step 6, and rank 0 waits in the ",
    )
)
SERIES.case("rank 1 leaves a collective out")(
    hangs("sum", "leave out", r"rank 1 of 2 .*rank 0 waits in the |rank 0 of 2 is behind|no rank stands out")
)
SERIES.case("a data worker of rank 1 loops without end")(
    hangs("sample", "loop", r"rank 1 of 2 hangs: .*reading data", more="--num-workers 1", step=0)
)


@SERIES.case("an exception on rank 1 alone")
def exception(lab: Lab) -> Outcome:
    """Its traceback comes first and is the only one; the others' complaints about lost contact are in their own files."""
    ran = lab.launch("dp2", faults=[Fault("forward", "raise", 1, STEP, once=lab.marker())]).wait()
    outcome = Outcome()
    outcome.told(ran, r"rank 1 of 2 failed with exit code 1 after step 5:", lab.when(), SECONDS)
    outcome.ended(ran, 0, tracebacks=1)
    outcome.expect("RuntimeError: an error that was planted" in ran.text, "its error is not shown")
    outcome.expect(ran.find("lost contact") is None, "the others' complaints are shown as well")
    outcome.lost(STEP - 1 - ran.resumed_at[-1], SAVE_INTERVAL)
    outcome.same_state(lab.all_equal("dp2"))
    return outcome


@SERIES.case("rank 1 is three times slower")
def straggler(lab: Lab) -> Outcome:
    """Reported, not killed: the run comes to its end."""
    slow = Fault("forward", "dawdle", 1, 1, seconds=0.15)
    ran, outcome = (
        lab.launch("dp2", f"{WATCHED} --log-interval 1", [slow]).wait(150),
        Outcome(remark="reported, goes on"),
    )
    outcome.told(ran, r"rank 1 .*slower")
    outcome.ended(ran, 0)
    outcome.expect(ran.find("restarting") is None, "it was started again")
    outcome.same_state(lab.all_equal("dp2"))
    return outcome

"""NaN and inf, spikes, and weights that differ between replicas."""

from collections.abc import Callable

from tests.faults.cases import Outcome, Series
from tests.faults.injection import Fault
from tests.faults.lab import SAVE_INTERVAL, Lab

SERIES = Series("numbers")
LAYOUT = "dp2"
STEP = 6
REPRODUCIBLE, TRANSIENT = 16, 17


def stops(at: str, do: str, passing: bool, code: int, named: str) -> Callable[[Lab], Outcome]:
    """Every rank stops before the update; without the fault the run resumes to the undisturbed end."""

    def run(lab: Lab) -> Outcome:
        fault = Fault(at, do, rank=1, step=STEP, once=lab.marker() if passing else None)
        ran, outcome = lab.fork(LAYOUT, faults=[fault]), Outcome()
        outcome.expect_output(
            ran, rf"step {STEP}: the loss is .*training stopped before the weight update.*{named}"
        )
        outcome.ended(ran, code)
        outcome.expect(len(set(ran.codes)) == 1, f"ranks end with {ran.codes}")
        again = lab.fork(LAYOUT)
        outcome.expect(again.code == 0 and bool(again.resumed_at), again.text)
        outcome.lost(STEP - 1 - again.resumed_at[-1], SAVE_INTERVAL)
        outcome.same_state(lab.is_equal(LAYOUT))
        return outcome

    return run


for _what, _do in (("NaN", "nan"), ("Inf", "inf")):
    SERIES.case(f"{_what} in the loss of rank 1, once")(
        stops("forward", f"loss becomes {_do}", True, TRANSIENT, r"the loss of rank 1\)")
    )
    SERIES.case(f"{_what} in the gradient of rank 1, once")(
        stops("forward", f"gradient becomes {_do}", True, TRANSIENT, r"the gradient of \S+ on rank \d")
    )
SERIES.case("NaN in the loss of rank 1, whenever it is computed")(
    stops("forward", "loss becomes nan", False, REPRODUCIBLE, "begins with .*rank 1")
)
SERIES.case("NaN in the gradient of rank 1, whenever it is computed")(
    stops("forward", "gradient becomes nan", False, REPRODUCIBLE, "begins with .*rank 1")
)


@SERIES.case("NaN in a weight of rank 1")
def bad_weight(lab: Lab) -> Outcome:
    """Sets a weight to NaN after the update of the step before."""
    fault = Fault("optimizer", "weight becomes nan", rank=1, step=STEP - 1, once=lab.marker())
    ran, outcome = lab.fork(LAYOUT, faults=[fault]), Outcome()
    outcome.expect_output(ran, rf"step {STEP}: .*begins with the weight \S+ on rank 1", lab.when())
    outcome.ended(ran, REPRODUCIBLE)
    return outcome


@SERIES.case("NaN in the gradient of rank 1, steps are left out instead")
def left_out(lab: Lab) -> Outcome:
    """All ranks skip the same step; their weights are compared after every step."""
    fault = Fault("forward", "gradient becomes nan", rank=1, step=STEP, once=lab.marker())
    words = "--no-check-for-nan-in-loss-and-grad --check-weight-hash-across-dp-replicas-interval 1"
    ran, outcome = lab.fork(LAYOUT, words, [fault]), Outcome(remark="all ranks skip it")
    outcome.ended(ran, 0)
    log = (lab.run / "train.log").read_text()
    outcome.detected = outcome.named = "number of skipped iterations:   1" in log
    outcome.expect(outcome.detected, "no line counts the step that was left out:\n" + log[-1500:])
    outcome.expect(
        log.count("weights of replicas are the same") == 10, "the weights were not compared after every step"
    )
    return outcome


@SERIES.case("the loss spikes")
def spike(lab: Lab) -> Outcome:
    fault = Fault("forward", "loss becomes large", rank=1, step=12, once=lab.marker())
    ran, outcome = (
        lab.fork("long", "--check-for-spiky-loss --check-for-large-grads", [fault]),
        Outcome(remark="reported, continues"),
    )
    outcome.expect_output(
        ran, r"warning: step 12: the loss \S+ is \S+ times the largest one before", lab.when()
    )
    outcome.ended(ran, 0)
    return outcome


def replicas(do: str, interval: int, step: int) -> Callable[[Lab], Outcome]:
    def run(lab: Lab) -> Outcome:
        fault = Fault("optimizer", do, rank=1, step=step, once=lab.marker())
        words = f"--check-weight-hash-across-dp-replicas-interval {interval}"
        ran, outcome = lab.fork(LAYOUT, words, [fault]), Outcome()
        outcome.expect_output(
            ran, rf"after step {step} the weights of ranks 0 and 1 are not the same: \S+ differs", lab.when()
        )
        outcome.ended(ran, 2)
        again = lab.fork(LAYOUT)
        outcome.expect(again.code == 0, again.text)
        outcome.lost(step - again.resumed_at[-1], interval + SAVE_INTERVAL)
        outcome.same_state(lab.is_equal(LAYOUT))
        return outcome

    return run


SERIES.case("rank 1's weights drift")(replicas("weight drifts", 1, 5))
SERIES.case("a bit of rank 1's weights flips in memory")(replicas("weight loses a bit", 5, 5))


@SERIES.case("rank 1's weights drift, replicas are not compared", control=True)
def not_compared(lab: Lab) -> Outcome:
    fault = Fault("optimizer", "weight drifts", rank=1, step=5, once=lab.marker())
    ran, outcome = lab.fork(LAYOUT, faults=[fault]), Outcome()
    outcome.exit_code, outcome.detected = ran.code, ran.code != 0
    outcome.equal = lab.is_equal(LAYOUT)
    outcome.expect(not outcome.equal, "the drift changed nothing, so it proves nothing")
    return outcome

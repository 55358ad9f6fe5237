"""What belongs to no other group: two jobs on one folder, clocks, another model, loggers."""

import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path

from tests.faults.cases import Outcome, Series
from tests.faults.injection import Fault
from tests.faults.lab import LAST, Lab, step_folder

SERIES = Series("other")


@SERIES.case("two jobs on one folder")
def two_jobs(lab: Lab) -> Outcome:
    """The second is refused and told who the first is, which goes on undisturbed; once it is killed, its lock is nobody's."""
    fault = Fault("forward", "dawdle", step=4, seconds=2.0, once=lab.marker())
    first = lab.begin("alone", faults=[fault])
    first.wait_for("^step ")
    second, outcome = lab.fork("alone"), Outcome()
    outcome.told(second, rf"another job is using {lab.run} \(process {first.pids[0]} on \S+ since ")
    outcome.ended(second, 2)
    ran = first.wait()
    outcome.expect(ran.code == 0, ran.text)
    outcome.same_state(lab.is_equal("alone"))
    return outcome


@SERIES.case("a job was killed and left its lock")
def stale_lock(lab: Lab) -> Outcome:
    fault = Fault("forward", "kill", step=6, once=lab.marker())
    killed = lab.fork("alone", faults=[fault])
    again, outcome = lab.fork("alone"), Outcome(remark="lock taken over")
    outcome.expect(killed.code == -signal.SIGKILL, f"it was not killed but ended with {killed.code}")
    outcome.told(again, "^resuming at step 4 of 10")
    outcome.ended(again, 0)
    outcome.lost(5 - again.resumed_at[-1], 2)
    outcome.same_state(lab.is_equal("alone"))
    return outcome


@SERIES.case("the clock jumps back a day, and files are from tomorrow")
def clock(lab: Lab) -> Outcome:
    """Steps are ordered by their number: older ones carry the latest times."""
    lab.interrupted("alone")
    tomorrow = time.time() + 86400
    for step in (2, 4):
        for path in (*step_folder(lab.run, step).iterdir(), step_folder(lab.run, step)):
            os.utime(path, (tomorrow, tomorrow))
    fault = Fault("forward", "set the clock back", step=8, seconds=86400, once=lab.marker())
    ran, outcome = lab.fork("alone", "--exit-duration-in-mins 60", [fault]), Outcome(remark="ordered by step")
    outcome.detected = ran.resumed_at == [6]
    outcome.expect(outcome.detected, f"it went on from {ran.resumed_at}, not from step 6")
    outcome.ended(ran, 0)
    outcome.lost(0, 0)
    outcome.same_state(lab.is_equal("alone"))
    return outcome


@SERIES.case("the clock jumps forward a day, with --exit-duration-in-mins")
def clock_forward(lab: Lab) -> Outcome:
    fault = Fault("forward", "set the clock back", step=4, seconds=-86400, once=lab.marker())
    ran, outcome = (
        lab.fork("alone", "--exit-duration-in-mins 60", [fault]),
        Outcome(remark="trains to its end"),
    )
    outcome.detected = lab.last_step() == LAST
    outcome.expect(outcome.detected, f"it ended after step {lab.last_step()}")
    outcome.ended(ran, 0)
    outcome.same_state(lab.is_equal("alone"))
    return outcome


@SERIES.case("another model in the command", quick=True)
def another_model(lab: Lab) -> Outcome:
    lab.interrupted("alone")
    ran, outcome = lab.fork("alone", "--hidden-size 64 --num-layers 3"), Outcome()
    outcome.told(ran, r"holds a model with --num-layers 2, but the command line says --num-layers 3")
    outcome.expect(
        ran.find("--hidden-size 32, but the command line says --hidden-size 64") is not None,
        "the width is not told of",
    )
    outcome.ended(ran, 2)
    outcome.expect(lab.newest(8) is None, "it trained all the same")
    return outcome


@SERIES.case("other settings in the command", quick=True)
def other_settings(lab: Lab) -> Outcome:
    """What the numbers depend on is told, and gone on with."""
    lab.interrupted("alone")
    ran, outcome = lab.fork("alone", "--lr 1e-3 --seed 7"), Outcome(remark="told, goes on")
    outcome.told(
        ran,
        r"settings that are not the checkpoint's: --seed 7 \(was 1234\), --lr 0\.001 \(was 0\.01\); --seed draws the order of samples",
    )
    outcome.ended(ran, 0)
    return outcome


def logger(lab: Lab, words: str, pattern: str, place: Path, kib: int | None) -> Outcome:
    """A log is no reason to stop training."""
    place.mkdir()
    ran = lab.fork("alone", words, mounts=[{"at": str(place), "kib": kib}])
    outcome = Outcome(remark="told, goes on")
    outcome.told(ran, pattern)
    outcome.ended(ran, 0)
    outcome.same_state(lab.is_equal("alone"))
    return outcome


@SERIES.case("TensorBoard's folder is full")
def full_tensorboard(lab: Lab) -> Outcome:
    place = lab.folder / "events"
    return logger(
        lab, f"--tensorboard-dir {place}", r"warning: .*TensorBoard.*No space left on device", place, 8
    )


@SERIES.case("TensorBoard's folder cannot be written")
def locked_tensorboard(lab: Lab) -> Outcome:
    place = lab.folder / "events"
    return logger(
        lab, f"--tensorboard-dir {place}", r"warning: .*TensorBoard.*Read-only file system", place, None
    )


def lost_wandb(lab: Lab) -> Outcome:
    """Its client is made to fail as it does without a key or a network."""
    around = {
        "WANDB_MODE": "online",
        "WANDB_API_KEY": "",
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_INIT_TIMEOUT": "3",
    }
    ran = lab.fork("alone", "--wandb-project faults", around=lambda rank: around)
    outcome = Outcome(remark="told, goes on")
    outcome.told(ran, r"warning: Weights & Biases fails \(it did not start")
    outcome.ended(ran, 0)
    outcome.same_state(lab.is_equal("alone"))
    return outcome


# Where it is not installed there is nothing that could be out of reach.
if find_spec("wandb") is not None:
    SERIES.case("Weights & Biases cannot be reached")(lost_wandb)

"""Other faults: two jobs on one folder, lost or damaged files, clocks, another model, loggers."""

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
    """The second job is refused with the process of the first, which continues undisturbed."""
    fault = Fault("forward", "dawdle", step=4, seconds=2.0, once=lab.marker())
    first = lab.begin("alone", faults=[fault])
    first.wait_for("^step ")
    second, outcome = lab.fork("alone"), Outcome()
    outcome.expect_output(second, rf"another job is using {lab.run} \(process {first.pids[0]} on \S+ since ")
    outcome.ended(second, 2)
    ran = first.wait()
    outcome.expect(ran.code == 0, ran.text)
    outcome.same_state(lab.is_equal("alone"))
    return outcome


@SERIES.case("two jobs save into one folder of checkpoints")
def two_savers(lab: Lab) -> Outcome:
    """The second job has its own run folder, but saves to the first one's checkpoints."""
    fault = Fault("forward", "dawdle", step=4, seconds=2.0, once=lab.marker())
    first = lab.begin("alone", faults=[fault])
    first.wait_for("^step ")
    steps = lab.run / "checkpoints"
    second, outcome = lab.fork("alone", f"--save {steps}", run=lab.folder / "another"), Outcome()
    outcome.expect_output(second, rf"another job is using {steps} \(process {first.pids[0]} on \S+ since ")
    outcome.ended(second, 2)
    ran = first.wait()
    outcome.expect(ran.code == 0, ran.text)
    outcome.same_state(lab.all_equal("alone"))
    return outcome


@SERIES.case("the lock is deleted during the run")
def deleted_lock(lab: Lab) -> Outcome:
    """The owner creates its lock again, as no other job took the folder; a second job is refused."""
    faults = [
        Fault("forward", "delete", step=3, file=str(lab.run / ".lock"), once=lab.marker()),
        Fault("forward", "dawdle", step=5, seconds=2.0, once=lab.marker("dawdled")),
    ]
    first = lab.begin("alone", faults=faults)
    lab.wait_for_fault(first, "dawdled")
    second, outcome = lab.fork("alone"), Outcome(remark="locked again, a second job is refused")
    outcome.expect(second.code == 2 and second.find("another job is using") is not None, second.text)
    ran = first.wait()
    outcome.expect_output(
        ran, rf"{lab.run}/\.lock was deleted during the run; it was created again", lab.when()
    )
    outcome.ended(ran, 0)
    outcome.same_state(lab.all_equal("alone"))
    return outcome


@SERIES.case("the run's folder is moved during the run")
def moved_folder(lab: Lab) -> Outcome:
    """All ranks stop before they write under the old name; under the new name the run is complete."""
    fault = Fault("forward", "move", rank=0, step=7, file=str(lab.run), once=lab.marker())
    ran, outcome = lab.fork("dp2", faults=[fault]), Outcome(remark="stopped before the next write")
    outcome.expect_output(ran, rf"{lab.run} was moved or removed while this run wrote to it", lab.when())
    outcome.ended(ran, 2)
    outcome.expect(not lab.run.exists(), "the old folder was made again")
    moved = lab.run.with_name(f"{lab.run.name}-moved")
    again = lab.fork("dp2", run=moved)
    outcome.expect(again.code == 0 and again.resumed_at == [6], again.text)
    outcome.lost(6 - again.resumed_at[-1], 2)
    outcome.same_state(lab.is_equal("dp2", run=moved))
    return outcome


@SERIES.case("log and metrics are deleted during the run")
def deleted_log(lab: Lab) -> Outcome:
    faults = [
        Fault("forward", "delete", step=step, file=str(lab.run / name), once=lab.marker(name))
        for step, name in ((4, "train.log"), (6, "metrics.jsonl"))
    ]
    ran, outcome = lab.fork("alone", faults=faults), Outcome(remark="reported, recreated")
    for name in ("train.log", "metrics.jsonl"):
        outcome.expect_output(
            ran,
            rf"{lab.run / name} was deleted or replaced during the run; it was created again",
            lab.when(name),
        )
    outcome.ended(ran, 0)
    outcome.same_state(lab.all_equal("alone"))
    return outcome


@SERIES.case("config.yaml is empty", quick=True)
def empty_config(lab: Lab) -> Outcome:
    lab.interrupted("alone")
    (lab.run / "config.yaml").write_bytes(b"")
    return goes_on(
        lab, rf"{lab.run}/config\.yaml is damaged \(it is empty\); it was renamed to config\.yaml\.damaged-1"
    )


@SERIES.case("a bit of metrics.jsonl is flipped", quick=True)
def flipped_metrics(lab: Lab) -> Outcome:
    lab.interrupted("alone")
    content = bytearray((lab.run / "metrics.jsonl").read_bytes())
    content[10] ^= 128
    (lab.run / "metrics.jsonl").write_bytes(content)
    return goes_on(lab, r"metrics\.jsonl: 1 line is damaged and was skipped")


def goes_on(lab: Lab, said: str) -> Outcome:
    """Expects a resume, since the checkpoint has all that is needed."""
    ran, outcome = lab.fork("alone"), Outcome(remark="reported, continues")
    outcome.expect_output(ran, said)
    outcome.ended(ran, 0)
    outcome.expect(ran.resumed_at == [6], f"it went on from {ran.resumed_at}, not from step 6")
    outcome.lost(0, 0)
    outcome.same_state(lab.is_equal("alone"))
    return outcome


@SERIES.case("a job was killed and left its lock")
def stale_lock(lab: Lab) -> Outcome:
    fault = Fault("forward", "kill", step=6, once=lab.marker())
    killed = lab.fork("alone", faults=[fault])
    again, outcome = lab.fork("alone"), Outcome(remark="lock taken over")
    outcome.expect(killed.code == -signal.SIGKILL, f"it was not killed but ended with {killed.code}")
    outcome.expect_output(again, "^resuming at step 4 of 10")
    outcome.ended(again, 0)
    outcome.lost(5 - again.resumed_at[-1], 2)
    outcome.same_state(lab.is_equal("alone"))
    return outcome


@SERIES.case("the clock jumps back a day, and files are from tomorrow")
def clock(lab: Lab) -> Outcome:
    """Steps are ordered by number, although older ones have later modification times."""
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
    outcome.expect_output(
        ran, r"holds a model with --num-layers 2, but the command line gives --num-layers 3"
    )
    outcome.expect(
        ran.find("--hidden-size 32, but the command line gives --hidden-size 64") is not None,
        "the width is not told of",
    )
    outcome.ended(ran, 2)
    outcome.expect(lab.newest(8) is None, "it trained all the same")
    return outcome


@SERIES.case("other settings in the command", quick=True)
def other_settings(lab: Lab) -> Outcome:
    """Changed settings that affect the numbers are reported and used."""
    lab.interrupted("alone")
    ran, outcome = lab.fork("alone", "--lr 1e-3 --seed 7"), Outcome(remark="reported, continues")
    outcome.expect_output(
        ran,
        r"settings differ from the checkpoint's: --seed 7 \(was 1234\), --lr 0\.001 \(was 0\.01\); --seed changes the sample order",
    )
    outcome.ended(ran, 0)
    return outcome


def logger(lab: Lab, words: str, pattern: str, place: Path, kib: int | None) -> Outcome:
    """Expects a warning and the undisturbed end, although the logger cannot write."""
    place.mkdir()
    ran = lab.fork("alone", words, mounts=[{"at": str(place), "kib": kib}])
    outcome = Outcome(remark="reported, continues")
    outcome.expect_output(ran, pattern)
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
    """Makes the W&B client fail as it does without a key or a network."""
    around = {
        "WANDB_MODE": "online",
        "WANDB_API_KEY": "",
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_INIT_TIMEOUT": "3",
    }
    ran = lab.fork("alone", "--wandb-project faults", around=lambda rank: around)
    outcome = Outcome(remark="reported, continues")
    outcome.expect_output(ran, r"warning: Weights & Biases fails \(it did not start")
    outcome.ended(ran, 0)
    outcome.same_state(lab.is_equal("alone"))
    return outcome


# Without wandb installed there is no client that could fail.
if find_spec("wandb") is not None:
    SERIES.case("Weights & Biases cannot be reached")(lost_wandb)

"""Stop signals: one coordinated save at the end of a step, a clean exit code and one line."""

import os
import signal
import time
from collections.abc import Callable, Sequence

from tests.faults.cases import Outcome, Series
from tests.faults.commands import Ran, Running, Terminal
from tests.faults.injection import Fault
from tests.faults.lab import LAST, SAVE_INTERVAL, Lab

SERIES = Series("preemption")
LAYOUT = "dp2"
# Slows the run down, so that a signal arrives in the middle of it.
SLOW = Fault("forward", "dawdle", 1, seconds=0.1)
SECONDS = 20.0


def judged(lab: Lab, ran: Ran, number: signal.Signals, asked_at: float, code: int | None = None) -> Outcome:
    """Expects a stop with a saved checkpoint, and a resume to the undisturbed end."""
    outcome, done = Outcome(), lab.last_step()
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    outcome.expect_output(
        ran, f"stopped by {name} after step {done}; its checkpoint is saved", asked_at, SECONDS
    )
    outcome.ended(ran, 128 + number if code is None else code)
    outcome.expect(ran.text.count("stopped by") == 1, "it is told more than once")
    outcome.expect(done < LAST, "the run was over by then, so it proves nothing")
    again = lab.fork(LAYOUT)
    outcome.expect(again.code == 0 and bool(again.resumed_at), again.text)
    outcome.lost(done - again.resumed_at[-1] if again.resumed_at else -1, 0)
    outcome.same_state(lab.is_equal(LAYOUT))
    return outcome


def asked(
    send: Callable[[Running], object], number: signal.Signals, more: str = "", code: int | None = None
) -> Callable[[Lab], Outcome]:
    def run(lab: Lab) -> Outcome:
        running = lab.launch(LAYOUT, more, [SLOW])
        lab.wait_for_step(running, 3)
        at = time.time()
        send(running)
        return judged(lab, running.wait(), number, at, code)

    return run


for _number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGXCPU):
    SERIES.case(f"{_number.name} to the launcher")(
        asked(lambda running, n=_number: running.signal(n), _number)
    )  # type: ignore[misc]
SERIES.case("SIGTERM to one rank")(
    asked(lambda running: os.kill(running.rank(1), signal.SIGTERM), signal.SIGTERM)
)
SERIES.case("SIGTERM to the launcher, as a wish (--exit-signal-handler)")(
    asked(lambda running: running.signal(signal.SIGTERM), signal.SIGTERM, "--exit-signal-handler", 0)
)


@SERIES.case("the terminal is closed")
def closed_terminal(lab: Lab) -> Outcome:
    """The kernel sends SIGHUP, and every later write to the terminal fails."""
    terminal = Terminal()
    running = lab.launch(LAYOUT, "--progress-bar on", [SLOW], output=terminal.descriptor)
    lab.wait_for_step(running, 3)
    at = time.time()
    terminal.close()
    ran = running.wait()
    outcome = judged(lab, ran, signal.SIGHUP, at)
    outcome.expect(
        ran.find("standard output cannot be written any more") is not None, "the log does not say so"
    )
    return outcome


def twice(numbers: Sequence[signal.Signals]) -> Callable[[Running], None]:
    def send(running: Running) -> None:
        for number in numbers:
            running.signal(number)
            time.sleep(0.15)

    return send


SERIES.case("SIGTERM twice")(asked(twice((signal.SIGTERM, signal.SIGTERM)), signal.SIGTERM))
SERIES.case("SIGUSR1, then SIGTERM")(asked(twice((signal.SIGUSR1, signal.SIGTERM)), signal.SIGUSR1))


def everyone(running: Running) -> None:
    """Sends SIGTERM to every process, as a scheduler does."""
    for pid in running.members():
        os.kill(pid, signal.SIGTERM)


SERIES.case("SIGTERM to every process of the job")(asked(everyone, signal.SIGTERM))


@SERIES.case("SIGTERM to ranks without a launcher of ours")
def without_launcher(lab: Lab) -> Outcome:
    """Starts ranks as mpirun or srun do."""
    running = lab.begin(LAYOUT, faults=[SLOW])
    lab.wait_for_step(running, 3)
    at = time.time()
    running.signal(signal.SIGTERM)
    return judged(lab, running.wait(), signal.SIGTERM, at)


def during_save(lab: Lab, more: str) -> Outcome:
    slow_save = Fault("open */.step-00000004.*/manifest.json", "dawdle", 0, seconds=1.0, once=lab.marker())
    running = lab.launch(LAYOUT, more, [SLOW, slow_save])
    lab.wait_for_fault(running)
    at = time.time()
    running.signal(signal.SIGTERM)
    return judged(lab, running.wait(), signal.SIGTERM, at)


SERIES.case("SIGTERM during a save")(lambda lab: during_save(lab, ""))
SERIES.case("SIGTERM during a save in the background")(lambda lab: during_save(lab, "--async-save"))


@SERIES.case("Ctrl-C twice")
def impatient(lab: Lab) -> Outcome:
    """The second Ctrl-C stops at once and leaves the last checkpoint as it was."""
    hanging = Fault("open */.step-00000005.*/manifest.json", "dawdle", 0, seconds=60, once=lab.marker())
    running = lab.launch(
        LAYOUT, faults=[Fault("forward", "dawdle", 1, step=5, seconds=1.0, once=lab.marker("slow")), hanging]
    )
    lab.wait_for_fault(running, "slow")
    running.signal(signal.SIGINT)
    lab.wait_for_fault(running)
    at = time.time()
    running.signal(signal.SIGINT)
    ran, outcome = running.wait(), Outcome(remark="stopped immediately")
    outcome.expect_output(ran, "stopped immediately; earlier checkpoints are intact", at, 5)
    outcome.ended(ran, 130)
    again = lab.fork(LAYOUT)
    outcome.expect(again.code == 0, again.text)
    outcome.lost(5 - again.resumed_at[-1], SAVE_INTERVAL)
    outcome.same_state(lab.is_equal(LAYOUT))
    return outcome


@SERIES.case("a save slower than the grace time")
def too_slow(lab: Lab) -> Outcome:
    """The scheduler kills all processes in the middle of the save that SIGTERM caused."""
    hanging = Fault("open */.step-00000005.*/manifest.json", "dawdle", 0, seconds=60, once=lab.marker())
    running = lab.launch(
        LAYOUT, faults=[Fault("forward", "dawdle", 1, step=5, seconds=1.0, once=lab.marker("slow")), hanging]
    )
    lab.wait_for_fault(running, "slow")
    running.signal(signal.SIGTERM)
    lab.wait_for_fault(running)
    time.sleep(0.5)
    for pid in running.members():
        os.kill(pid, signal.SIGKILL)
    ran, again = running.wait(), lab.fork(LAYOUT)
    outcome = Outcome(exit_code=ran.code, remark="last valid step used")
    outcome.expect_output(again, rf"^resuming at step 4 of {LAST}")
    outcome.expect(again.code == 0, again.text)
    outcome.lost(5 - again.resumed_at[-1], SAVE_INTERVAL)
    outcome.same_state(lab.is_equal(LAYOUT))
    return outcome

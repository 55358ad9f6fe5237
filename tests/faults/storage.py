"""Folders that are full, read-only or missing, a port in use, and a rendezvous that fails."""

import os
import socket

from tests.faults.cases import Outcome, Series
from tests.faults.injection import Fault
from tests.faults.lab import LAST, Lab, free_port

SERIES = Series("storage")


@SERIES.case("the disk under standard output is full")
def full_output(lab: Lab) -> Outcome:
    """No file of the run is on that disk."""
    ran = lab.launch("dp2", output=os.open("/dev/full", os.O_WRONLY)).wait()
    outcome = Outcome(remark="reported in train.log, continues")
    outcome.expect_output(ran, r"standard output cannot be written any more \(No space left on device\)")
    outcome.ended(ran, 0)
    outcome.same_state(lab.is_equal("dp2"))
    return outcome


def refused(lab: Lab, pattern: str, layout: str = "alone", code: int = 2, **given: object) -> Outcome:
    ran, outcome = lab.fork(layout, **given), Outcome(remark="refused before step 1")  # type: ignore[arg-type]
    outcome.expect_output(ran, pattern)
    outcome.ended(ran, code)
    outcome.expect(ran.find("^step ") is None, "it trained all the same")
    return outcome


@SERIES.case("the disk has no room for one checkpoint")
def too_small(lab: Lab) -> Outcome:
    """Mounts a file system of 200 KiB for checkpoints of a few hundred KiB."""
    lab.run.mkdir()
    return refused(
        lab, r"a checkpoint takes \d+ KiB and \S+ has \d+ KiB free", mounts=[{"at": str(lab.run), "kib": 200}]
    )


def filled(lab: Lab, more: str = "") -> Outcome:
    """Fills the disk after the third checkpoint, as another program would."""
    lab.run.mkdir()
    fault = Fault(
        "forward", "fill", step=7, bytes=64 * 1024, file=str(lab.run / "ballast"), once=lab.marker()
    )
    rescued = lab.folder / "rescued"
    mount = {"at": str(lab.run), "kib": 6000}
    ran = lab.fork("alone", more, [fault], mounts=[mount], rescue=(str(lab.run), str(rescued)))
    outcome = Outcome(remark="reported, training continues, the last valid step is kept")
    said = "the checkpoint of step 8 could not be saved "
    if more:
        # The async save of step 6 may still be in progress, or take the last byte from the log.
        said = "(the checkpoint of step [68] could not be saved |a file of the run cannot be written )"
    intact = r"(the last checkpoint is step [46]\. Training continues|earlier checkpoints are intact)"
    sentence = rf"{said}.*No space left on device.*{intact}"
    outcome.expect_output(ran, sentence, lab.when())
    outcome.ended(ran, 2)
    (rescued / "ballast").unlink(missing_ok=True)
    again = lab.fork("alone", run=rescued)
    outcome.expect(again.code == 0 and again.resumed_at[-1:] in ([4], [6]), again.text)
    # No later save had space.
    outcome.lost(LAST - again.resumed_at[-1], LAST - 4)
    outcome.same_state(lab.is_equal("alone", run=rescued))
    return outcome


SERIES.case("the disk fills up during the run")(filled)
SERIES.case("the disk fills up, saved in the background")(lambda lab: filled(lab, "--async-save"))


@SERIES.case("the run's folder is read-only")
def read_only(lab: Lab) -> Outcome:
    lab.run.mkdir()
    return refused(
        lab,
        rf"the run folder {lab.run} cannot be written \(Read-only file system\)",
        mounts=[{"at": str(lab.run), "kib": None}],
    )


@SERIES.case("the folder of checkpoints is read-only")
def read_only_checkpoints(lab: Lab) -> Outcome:
    place = lab.folder / "elsewhere"
    place.mkdir()
    return refused(
        lab,
        rf"{place} cannot be written \(Read-only file system\)",
        more=f"--save {place}",
        mounts=[{"at": str(place), "kib": None}],
    )


@SERIES.case("no permission to write")
def forbidden(lab: Lab) -> Outcome:
    lab.run.mkdir(mode=0o555)
    return refused(lab, rf"the run folder {lab.run} cannot be written \(Permission denied\)", plain=True)


@SERIES.case("no permission to look into the folder", quick=True)
def hidden(lab: Lab) -> Outcome:
    lab.run.mkdir(mode=0o000)
    try:
        return refused(lab, rf"{lab.run}.*Permission denied", plain=True)
    finally:
        lab.run.chmod(0o755)


@SERIES.case("a file where the folder should be", quick=True)
def no_folder(lab: Lab) -> Outcome:
    (lab.folder / "taken").touch()
    place = lab.folder / "taken" / "run"
    return refused(lab, rf"the run folder {place} cannot be written \(Not a directory\)", run=place)


@SERIES.case("no data where --data-path says", quick=True)
def no_data(lab: Lab) -> Outcome:
    return refused(
        lab, r"nowhere\.(bin|idx)", more="--data-path nowhere --split 1,0,0 --tokenizer-type NullTokenizer"
    )


@SERIES.case("the port is in use")
def taken_port(lab: Lab) -> Outcome:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ran, outcome = (
            lab.launch("dp2", f"--master-port {port}").wait(),
            Outcome(remark="refused before step 1"),
        )
    outcome.expect_output(ran, f"port {port} cannot be used for the rendezvous", within=30)
    outcome.ended(ran, 2)
    return outcome


@SERIES.case("the master address is unknown")
def unknown_address(lab: Lab) -> Outcome:
    return refused(
        lab,
        "the host name 'nowhere.invalid' cannot be resolved",
        "dp2",
        around=lambda rank: {"MASTER_ADDR": "nowhere.invalid"},
    )


@SERIES.case("no process listens at the master address")
def silent_address(lab: Lab) -> Outcome:
    port = str(free_port())
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    words = lab.words("dp2", "--distributed-timeout-minutes 0.05")
    return refused(
        lab,
        rf"rank 1: rank 0 could not be reached at 127.0.0.1:{port} within 3 seconds",
        words=words,
        around=lambda rank: place,
    )


@SERIES.case("the world size is larger than the number of processes")
def wrong_world_size(lab: Lab) -> Outcome:
    more = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    return refused(
        lab,
        r"2 of 4 processes joined within \d+ seconds",
        "dp2",
        more="--distributed-timeout-minutes 0.1",
        around=lambda rank: more,
    )


@SERIES.case("the world size does not fit the layout", quick=True)
def impossible_layout(lab: Lab) -> Outcome:
    return refused(lab, "--tensor-model-parallel-size", "dp2", more="--tensor-model-parallel-size 3")

"""Runs a small part of the trials of `make adversary`, and checks that trials can fail."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adversary import failing_disk, power_cut, shim
from tests.adversary.bench import SILENT, UNEQUAL, Bench, Fault, Place, Verdict, attempt
from tests.adversary.catalogue import GROUPS, ON_A_FAILING_DISK
from tests.adversary.disk import Disk, Model, write_disk
from tests.adversary.shim import Mode, Op, read_journal

SEED = 0
# Share of each group's usual number of trials.
SCALES = {
    "faults": 0.016,
    "commands": 0.025,
    "power": 0.025,
    "folders": 0.035,
    "metrics": 0.1,
    "manifests": 0.04,
    "huggingface": 0.03,
    "templates": 0.05,
    "output": 0.08,
}


# Templates that end only at the time limit.
SLOW = ("calls itself twice", "loops", "multiplies numbers", "takes a power", "nests for")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("bench"))
    yield made
    made.close()


# One test with many trials, since every pytest process needs its own fork server and undisturbed runs.
def test_no_trial_shows_a_defect(bench: Bench, tmp_path: Path) -> None:
    wrong = []
    for group, (draw, _) in GROUPS.items():
        if group in ON_A_FAILING_DISK and shim.missing():
            continue
        for number, trial in enumerate(draw(bench, random.Random(f"{SEED} {group}"), False, SCALES[group])):
            if trial.label.startswith(SLOW):
                continue
            began = time.monotonic()
            verdict = attempt(bench, trial, tmp_path / f"{group}-{number}")
            print(f"{time.monotonic() - began:5.1f} s  {group}: {trial.label}")
            wrong += [f"{group}: {trial.label}: {kind}: {what}" for kind, what in verdict.defects]
    assert not wrong, "\n\n".join(wrong)


needs_the_shim = pytest.mark.skipif(shim.missing() is not None, reason=str(shim.missing()))


@needs_the_shim
def test_a_run_killed_after_its_last_step_leaves_no_files(bench: Bench, tmp_path: Path) -> None:
    """No later save would remove leftover files."""
    calls = [r.number for r in bench.journal("sync") if r.op is Op.RMDIR]
    verdict = failing_disk.train_twice("sync", Fault(calls[-1], Mode.KILL))(Place(bench, tmp_path / "place"))
    assert verdict.defects == []


@needs_the_shim
def test_without_fsync_a_power_cut_is_noticed(bench: Bench, tmp_path: Path) -> None:
    """Control: with fsync disabled, a trial must report a defect."""
    place = Place(bench, tmp_path / "recorded")
    assert place.train("sync", journal=tmp_path / "journal", without=["fsync"]).code == 0
    records = list(read_journal(tmp_path / "journal"))
    disk = Disk(place.disk)
    disk.play(records, records[-1].number)
    verdict = power_cut.resume("sync", disk.files(Model.ENTRIES), told=6)(Place(bench, tmp_path / "cut"))
    assert {kind for kind, _ in verdict.defects} & {SILENT, UNEQUAL}, verdict


@needs_the_shim
def test_a_failure_that_ends_with_0_is_noticed(bench: Bench, tmp_path: Path) -> None:
    place = Place(bench, tmp_path / "place")
    ended = place.train("sync", fault=Fault(1, Mode.EROFS_ALWAYS), without=["exit code"])
    verdict = Verdict()
    failing_disk.blame_end(ended, place.state() == bench.state("sync"), verdict)
    assert [kind for kind, _ in verdict.defects] == [SILENT] and ended.fired.startswith("mkdir ")


def test_another_state_is_noticed(bench: Bench, tmp_path: Path) -> None:
    place = Place(bench, tmp_path / "place")
    first = place.train("sync", "--seed 7")
    verdict = place.judge_resumed(first, place.train("sync"), "sync", Verdict())
    assert [kind for kind, _ in verdict.defects] == [UNEQUAL]


def test_leftover_files_are_found(bench: Bench, tmp_path: Path) -> None:
    """Finds leftover files; a command that refuses odd input with a sentence has no defect."""
    place = Place(bench, tmp_path / "place")
    write_disk({"odd": None, "odd/file": b"x"}, place.disk)
    (place.disk / ".step-1.tmp").touch()
    assert place.leftovers() == ["disk/.step-1.tmp"]
    ended = place.begin(["monitor", str(place.disk / "odd")]).wait(wall=60)
    assert ended.problems() == [] and ended.code == 2 and ended.sentence

"""Cuts the power after any file call of a run, and resumes the run from what the disk then holds."""

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.adversary.bench import SILENT, UNEQUAL, Bench, Place, Trial, Verdict, shares
from tests.adversary.disk import Disk, Model, write_disk
from tests.adversary.shim import Op, Record, read_journal

LAYOUTS = ("sync", "async")
SAMPLES = 60
_SAVED = re.compile(rb"successfully saved checkpoint from iteration\s+(\d+)")


def journal(bench: Bench, layout: str) -> list[Record]:
    """Returns the calls of a run that stops at step 4 and is resumed, numbered through both commands."""

    def make(place: Place) -> list[Record]:
        found: list[Record] = []
        for number, more in enumerate(("--exit-interval 4", "")):
            path = place.folder / f"journal-{number}"
            ended = place.train(layout, more, journal=path)
            if ended.code:
                raise RuntimeError(f"the undisturbed run of {layout} failed:\n{ended.text}")
            base = found[-1].number if found else 0
            found += [_counted_from(record, base) for record in read_journal(path)]
        if place.state() != bench.state(layout):
            raise RuntimeError(f"a run of {layout} in two parts ends with another state")
        _require_whole(place, found)
        return found

    return bench.once(f"power-{layout}", make)  # type: ignore[no-any-return]


def _counted_from(record: Record, base: int) -> Record:
    return Record(**{**vars(record), "number": record.number + base})


def _require_whole(place: Place, records: Sequence[Record]) -> None:
    """Raises if the journal does not reproduce the files; one that misses a call would prove nothing."""
    disk = Disk(place.disk)
    disk.play(records, records[-1].number)
    there = {
        str(p.relative_to(place.disk)): None if p.is_dir() else p.read_bytes() for p in place.disk.rglob("*")
    }
    if disk.files(None) != there:
        raise RuntimeError(f"the journal of {place.folder} does not give the files that are there")


def trials(bench: Bench, rng: random.Random, every: bool, scale: float = 1.0) -> list[Trial]:
    found = []
    counts = shares(round(SAMPLES * len(LAYOUTS) * scale), LAYOUTS, rng, 3)
    for layout in LAYOUTS if every else counts:
        records = journal(bench, layout)
        root = (bench.folder / "undisturbed" / f"power-{layout}" / "disk").resolve()
        chosen: list[tuple[Record, Model, int]] = []
        seen: set[object] = set()
        disk, told = Disk(root), 0
        for record in records:
            disk.play(records, record.number)
            if record.op is Op.WRITE and (match := _SAVED.search(record.data)):
                told = max(told, int(match[1]))
            for model in Model:
                # The report of a save is part of the trial: the same disk before and after it counts twice.
                mark = (told, model, disk.mark(model))
                if record.op is not Op.OUTPUT and mark not in seen:
                    seen.add(mark)
                    chosen.append((record, model, told))
        count = len(chosen) if every else min(len(chosen), counts[layout])
        for n in sorted(rng.sample(range(len(chosen)), count)):
            record, model, told = chosen[n]
            what = f"{record.op.name.lower()} {_short(record)}; {model.value}"
            label = f"{layout}: cut after call {record.number}, {what}"
            found.append(Trial(label, _cut(layout, root, records, record.number, model, told)))
    return found


def _cut(
    layout: str, root: Path, records: Sequence[Record], call: int, model: Model, told: int
) -> Callable[[Place], Verdict]:
    def run(place: Place) -> Verdict:
        disk = Disk(root)
        disk.play(records, call)
        return resume(layout, disk.files(model), told)(place)

    return run


def _short(record: Record) -> str:
    return (record.other or record.path).partition("/disk/")[2]


def resume(layout: str, files: dict[str, bytes | None], told: int) -> Callable[[Place], Verdict]:
    def run(place: Place) -> Verdict:
        verdict = Verdict()
        write_disk(files, place.disk)
        ended = place.train(layout)
        verdict.defects += ended.problems()
        if ended.code or place.state() != place.bench.state(layout):
            verdict.blame(UNEQUAL, f"exit code {ended.code}, steps {place.steps()}\n{ended.tail()}")
            return verdict
        match = re.search(r"^resuming at step (\d+) of", ended.text, re.MULTILINE)
        finished = re.search(r"has finished its \d+ steps|finished", ended.text) and not match
        began = int(match[1]) if match else (6 if finished and "step     1/" not in ended.text else 0)
        if began < told:
            verdict.blame(
                SILENT, f"step {told} was reported as saved and the run resumes at {began}\n{ended.tail()}"
            )
        elif left := place.leftovers():
            verdict.blame("files left behind", ", ".join(left[:4]))
        return verdict

    return run

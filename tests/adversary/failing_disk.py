"""The k-th file call fails or kills the process; then the same command runs on a sound disk."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.adversary.bench import (
    EQUAL,
    LAYOUTS,
    LEFT,
    REFUSED,
    SILENT,
    UNEQUAL,
    Bench,
    Ended,
    Fault,
    Place,
    Trial,
    Verdict,
    shares,
)
from tests.adversary.shim import Mode, Op, Record, read_journal
from tests.faults.lab import write_corpus

# A model whose config.json has sizes that a hostile file can change.
LLAMA = (
    "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope --group-query-attention "
    "--num-query-groups 1 --untie-embeddings-and-output-weights"
)
MODES = [mode for mode in Mode if mode is not Mode.NONE]
# Which rank has the failing disk.
RANKS = {"zero1": 1}
SAMPLES = {"sync": 110, "async": 60, "files": 30, "zero1": 24}


def spread(
    records: Sequence[Record], rng: random.Random, count: int | None
) -> list[tuple[int, Mode, Record]]:
    """Draws `count` calls and modes that cover every kind of call on every kind of file; None: all."""
    kinds: dict[tuple[Op, str], list[Record]] = {}
    for record in records:
        if record.op is not Op.OUTPUT:
            kinds.setdefault((record.op, _kind(record)), []).append(record)
    every = [(record.number, mode, record) for record in _calls(records) for mode in MODES]
    if count is None or count >= len(every):
        return every
    order = [(kind, mode) for kind in kinds for mode in MODES]
    rng.shuffle(order)
    chosen: dict[tuple[int, Mode], tuple[int, Mode, Record]] = {}
    while len(chosen) < count:
        for kind, mode in order:
            record = rng.choice(kinds[kind])
            chosen[record.number, mode] = (record.number, mode, record)
            if len(chosen) == count:
                break
    return sorted(chosen.values(), key=lambda choice: (choice[0], choice[1]))


def _calls(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.op is not Op.OUTPUT]


def _kind(record: Record) -> str:
    """Returns the name of the file without random suffixes and numbers."""
    name = Path(record.other or record.path).name
    return re.sub(r"\.[0-9a-f]{8}$|\d+", "", name)


def named(record: Record, mode: Mode) -> str:
    words = mode.name.lower().replace("_", " ")
    return f"{words} at call {record.number}, {record.op.name.lower()} {_kind(record)}"


def training(bench: Bench, rng: random.Random, every: bool, scale: float = 1.0) -> list[Trial]:
    trials = []
    for layout in LAYOUTS:
        count = None if every else round(SAMPLES[layout] * scale)
        if count == 0:
            continue
        records = bench.journal(layout, RANKS.get(layout, 0))
        for call, mode, record in spread(records, rng, count):
            trials.append(Trial(f"{layout}: {named(record, mode)}", train_twice(layout, Fault(call, mode))))
    return trials


def train_twice(layout: str, fault: Fault) -> Callable[[Place], Verdict]:
    def run(place: Place) -> Verdict:
        verdict = Verdict()
        first = place.train(layout, fault=fault, rank=RANKS.get(layout, 0))
        blame_end(first, place.state() == place.bench.state(layout), verdict)
        second = place.train(layout)
        return place.judge_resumed(first, second, layout, verdict)

    return run


def blame_end(first: Ended, is_done: bool, verdict: Verdict) -> None:
    """Exit code 0 requires the result; another one requires a sentence, unless the process was killed."""
    if first.code == 0 and not is_done:
        verdict.blame(SILENT, f"exit code 0 without the result ({first.fired})\n{first.tail()}")
    elif first.code and not first.killed and not first.hung and not first.sentence:
        verdict.blame(SILENT, f"exit code {first.code} without a sentence ({first.fired})\n{first.tail()}")


# ---- commands that write files ----


@dataclass(frozen=True)
class Job:
    """A command that writes files.

    `words`: its arguments, made from the inputs. `result`: glob of its files below the disk. `mark`: the file
    without which there is no result.
    """

    words: Callable[[Place, "Inputs"], list[str]]
    result: str
    mark: str
    begin: Callable[[Place, "Inputs"], None] = lambda place, inputs: None


@dataclass(frozen=True)
class Inputs:
    run: Path
    hugging_face: Path
    text: Path
    pairs: tuple[Path, Path]


def inputs(bench: Bench) -> Inputs:
    def make(place: Place) -> Inputs:
        text = place.folder / "text.jsonl"
        text.write_text("".join(f'{{"text": "document {n} {"a" * n}"}}\n' for n in range(40)))
        pairs = place.folder / "one", place.folder / "two"
        for seed, pair in enumerate(pairs):
            write_corpus(pair, seed)
        exported = place.folder / "exported"
        for ended in (place.train("sync", LLAMA), place.command("export", str(place.run), str(exported))):
            if ended.code:
                raise RuntimeError(f"inputs cannot be made:\n{ended.text}")
        return Inputs(place.run, exported, text, pairs)

    return bench.once("inputs", make)  # type: ignore[no-any-return]


def _unsealed(place: Place, given: Inputs) -> None:
    for suffix in (".bin", ".idx"):
        (place.disk / f"pair{suffix}").write_bytes(Path(f"{given.pairs[0]}{suffix}").read_bytes())


JOBS = {
    "import": Job(lambda p, i: ["import", str(i.hugging_face), str(p.disk / "out")], "out/**/*", "out"),
    "export": Job(lambda p, i: ["export", str(i.run), str(p.disk / "out")], "out/**/*", "out"),
    "checkpoint reshard": Job(
        lambda p, i: ["checkpoint", "reshard", str(i.run), str(p.disk / "out"), "--tensor-model-parallel-size", "2"],
        "out/**/*",
        "out",
    ),
    "data merge": Job(
        lambda p, i: ["data", "merge", str(p.disk / "out"), *map(str, i.pairs)], "out.*", "out.idx"
    ),
    "data seal": Job(lambda p, i: ["data", "seal", str(p.disk / "pair")], "pair.*", "pair.meta", _unsealed),
    "prepare": Job(
        lambda p, i: (
            f"prepare --input {i.text} --output-prefix {p.disk / 'out'} --tokenizer-type ByteTokenizer --workers 1".split()
        ),
        "out_*",
        "out_text_document.idx",
    ),
}  # fmt: skip
PER_JOB = 16


def commands(bench: Bench, rng: random.Random, every: bool, scale: float = 1.0) -> list[Trial]:
    trials = []
    total = round(PER_JOB * len(JOBS) * scale)
    # A small sample omits `prepare`, whose workers are new processes that take seconds to start.
    counts = shares(total, [name for name in JOBS if name != "prepare" or total >= len(JOBS)], rng, 1)
    for name in JOBS if every else counts:
        job, (records, _) = JOBS[name], _undisturbed(bench, name)
        count = None if every else counts[name]
        for call, mode, record in spread(records, rng, count):
            trials.append(Trial(f"{name}: {named(record, mode)}", _job(name, job, Fault(call, mode))))
    return trials


def _result(place: Place, job: Job) -> dict[str, bytes] | None:
    if not (place.disk / job.mark).exists():
        return None
    return {
        str(p.relative_to(place.disk)): p.read_bytes() for p in place.disk.glob(job.result) if p.is_file()
    }


def _undisturbed(bench: Bench, name: str) -> tuple[list[Record], dict[str, bytes]]:
    """Returns the calls of the command, and the files that it writes identically every time."""
    job = JOBS[name]

    def make(place: Place) -> tuple[list[Record], dict[str, bytes]]:
        journal, results = place.folder / "journal", []
        for target in (place, Place(bench, place.folder / "again")):
            job.begin(target, inputs(bench))
            given = {"journal": journal} if target is place else {}
            ended = target.command(*job.words(target, inputs(bench)), **given)
            found = _result(target, job)
            if ended.code or found is None or target.leftovers():
                raise RuntimeError(f"{name} fails undisturbed, {target.leftovers()}:\n{ended.text}")
            results.append(found)
        same = {key: value for key, value in results[0].items() if results[1].get(key) == value}
        return list(read_journal(journal)), same

    return bench.once(name.replace(" ", "-"), make)  # type: ignore[no-any-return]


def _job(name: str, job: Job, fault: Fault) -> Callable[[Place], Verdict]:
    def run(place: Place) -> Verdict:
        verdict = Verdict(EQUAL)
        _, wanted = _undisturbed(place.bench, name)
        job.begin(place, inputs(place.bench))
        words = job.words(place, inputs(place.bench))

        def is_whole() -> bool:
            found = _result(place, job)
            return found is not None and {key: found.get(key) for key in wanted} == wanted

        first = place.command(*words, fault=fault)
        was_whole = is_whole()
        if not was_whole and _result(place, job) is not None:
            verdict.blame(SILENT, f"part of the result lies under its name ({first.fired})\n{first.tail()}")
        blame_end(first, was_whole, verdict)
        second = place.command(*words)
        for which, ended in (("first", first), ("second", second)):
            verdict.defects += [(kind, f"{which} command: {what}") for kind, what in ended.problems()]
        # An existing result is not overwritten.
        refused = was_whole and second.code == 2 and second.sentence
        if not is_whole() or (second.code and not refused):
            verdict.blame(UNEQUAL, f"the second command ends with {second.code}\n{second.tail()}")
        if left := place.leftovers():
            verdict.blame(LEFT, f"after the second command: {', '.join(left[:4])} ({first.fired})")
        if refused:
            verdict.outcome = REFUSED
        return verdict

    return run

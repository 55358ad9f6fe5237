"""Resumes or monitors runs whose folder has odd entries or damaged files."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.adversary.bench import ACCEPTED, EQUAL, REFUSED, SILENT, Bench, Ended, Place, Trial, Verdict
from tests.adversary.mutations import mutations

# Files of a run that stopped at step 4.
FILES = (
    "config.yaml",
    "job.json",
    "metrics.jsonl",
    "train.log",
    "app_metrics.json",
    "loss.svg",
    ".lock",
    "checkpoints/latest",
    "checkpoints/latest_checkpointed_iteration.txt",
    "checkpoints/progress.txt",
    "checkpoints/began-from.json",
    "checkpoints/step-00000004/manifest.json",
    "checkpoints/step-00000004/rank-00000.safetensors",
)
SAMPLES, MONITORED = 90, 24
Change = Callable[[Path], None]


def stopped(bench: Bench) -> Path:
    """Returns a run that stopped at step 4 of 6."""

    def make(place: Place) -> Path:
        ended = place.train("sync", "--exit-interval 4 --log-progress")
        if ended.code or place.steps() != [2, 4]:
            raise RuntimeError(f"the undisturbed run failed:\n{ended.text}")
        return place.run

    return bench.once("stopped", make)  # type: ignore[no-any-return]


# ---- entries of a wrong kind ----


def _instead(make: Change) -> Change:
    def change(path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        make(path)

    return change


def _hard_link(path: Path) -> None:
    if path.exists():
        os.link(path, path.with_name("second-name"))


KINDS: dict[str, Change] = {
    "a FIFO": _instead(os.mkfifo),
    "a folder": _instead(Path.mkdir),
    "a dangling symlink": _instead(lambda path: path.symlink_to("nowhere")),
    "a symlink to itself": _instead(lambda path: path.symlink_to(path.name)),
    "a symlink to /dev/full": _instead(lambda path: path.symlink_to("/dev/full")),
    "hard-linked": _hard_link,
    "missing": _instead(lambda path: None),
}


def _copied_step(name: str) -> Change:
    def change(run: Path) -> None:
        shutil.copytree(run / "checkpoints" / "step-00000004", run / "checkpoints" / name)

    return change


def _entry(name: str, make: Change) -> Change:
    return lambda run: make(run / "checkpoints" / name)


def _checkpoints(make: Change) -> Change:
    return lambda run: _instead(make)(run / "checkpoints")


ENTRIES: dict[str, Change] = {
    "a file among the steps": _entry("step-00000009", lambda path: path.write_text("no step")),
    "a dangling symlink among the steps": _entry("step-00000009", lambda path: path.symlink_to("nowhere")),
    "a FIFO among the steps": _entry("step-00000009", os.mkfifo),
    "an empty folder among the steps": _entry("step-00000009", Path.mkdir),
    "a symlink to a step": _entry("step-00000005", lambda path: path.symlink_to("step-00000004")),
    "a symlink to the folder of steps": _entry("step-00000005", lambda path: path.symlink_to(".")),
    "a step copied under a higher number": _copied_step("step-00000005"),
    "a step copied under a number of 20 digits": _copied_step("step-99999999999999999999"),
    "a step copied under a number beyond 64 bits": _copied_step("step-" + "9" * 200),
    "a step copied as one saved again": _copied_step("step-00000004-again1"),
    "a step copied under another name": _copied_step("copy of step-00000004"),
    "a step copied under a temporary name": _copied_step(".step-00000004.0123abcd"),
    "a step copied as damaged": _copied_step("step-00000004.damaged"),
    "1,000 folders among the steps": lambda run: (
        [(run / "checkpoints" / f"step-{n:08d}").mkdir() for n in range(10, 1010)] and None
    ),
    "checkpoints a file": _checkpoints(lambda path: path.write_text("no folder")),
    "checkpoints a dangling symlink": _checkpoints(lambda path: path.symlink_to("nowhere")),
    "checkpoints a FIFO": _checkpoints(os.mkfifo),
    "names that are no UTF-8": lambda run: Path(
        os.fsdecode(bytes(run / "checkpoints") + b"/\xff\xfe")
    ).mkdir(),
}


# ---- other bytes ----


def _bytes(change: Callable[[bytes, random.Random], bytes]) -> Callable[[int], Change]:
    def seeded(seed: int) -> Change:
        def rewrite(path: Path) -> None:
            before = path.read_bytes() if path.exists() else b"{}\n"
            path.write_bytes(change(before, random.Random(seed)))

        return rewrite

    return seeded


def _flip(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return b"\x80"
    changed = bytearray(data)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _flip_high(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data or b"a")
    changed[rng.randrange(len(changed))] |= 128
    return bytes(changed)


def _line(text: bytes) -> Callable[[bytes, random.Random], bytes]:
    def insert(data: bytes, rng: random.Random) -> bytes:
        lines = data.splitlines(keepends=True)
        lines.insert(rng.randint(0, len(lines)), text + b"\n")
        return b"".join(lines)

    return insert


BYTES: dict[str, Callable[[int], Change]] = {
    "with one bit flipped": _bytes(_flip),
    "with the high bit of a byte set": _bytes(_flip_high),
    "cut anywhere": _bytes(lambda data, rng: data[: rng.randint(0, max(0, len(data) - 1))]),
    "of NUL bytes": _bytes(lambda data, rng: bytes(len(data))),
    "empty": _bytes(lambda data, rng: b""),
    "with random bytes behind": _bytes(lambda data, rng: data + rng.randbytes(100)),
    "of random bytes": _bytes(lambda data, rng: rng.randbytes(len(data))),
    "with a line null": _bytes(_line(b"null")),
    "with a line []": _bytes(_line(b"[]")),
    "with a line of a number": _bytes(_line(b"1e999")),
    "with a line of digits": _bytes(_line(b"9" * 5000)),
    "with a line of brackets": _bytes(_line(b"[" * 100_000)),
    "with a text as loss": _bytes(_line(b'{"step": 1, "loss": "low"}')),
    "with a huge step": _bytes(_line(b'{"step": 1' + b"0" * 30 + b', "loss": 1.0}')),
    "of another kind of JSON": _bytes(lambda data, rng: b"[[], {}]"),
    "of 30 MB in one line": _bytes(lambda data, rng: b"x" * 30_000_000),
}


def trials(bench: Bench, rng: random.Random, every: bool, scale: float = 1.0) -> list[Trial]:
    """Draws odd entries and damaged files, after which a run is resumed."""
    stopped(bench)
    found = list(ENTRIES.items())
    for name in FILES:
        found += [(f"{name} {kind}", _at(name, change)) for kind, change in KINDS.items()]
        for kind, seeded in BYTES.items():
            # Kinds that choose a byte at random are tried with three seeds.
            for seed in rng.sample(range(1000), 3) if kind.endswith(("flipped", "set", "anywhere")) else [0]:
                found.append((f"{name} {kind} ({seed})", _at(name, seeded(seed))))
    if not every:
        found = rng.sample(found, min(len(found), max(1, round(SAMPLES * scale))))
    return [Trial(label, _resume(change)) for label, change in found]


def _at(name: str, change: Change) -> Change:
    return lambda run: change(run / name)


def copy_run(place: Place) -> None:
    shutil.copytree(stopped(place.bench), place.run, symlinks=True)


def _resume(change: Change) -> Callable[[Place], Verdict]:
    def run(place: Place) -> Verdict:
        copy_run(place)
        change(place.run)
        return resumed(place)

    return run


def resumed(place: Place) -> Verdict:
    """Repeats the command, which must end with the undisturbed state or be refused."""
    ended = place.train("sync")
    verdict = judge_input(ended)
    if ended.code == 0:
        verdict.outcome = EQUAL
        if place.state() != place.bench.state("sync"):
            seen = f"exit code 0, steps {place.steps()}, and another state than the undisturbed run"
            verdict.blame(SILENT, f"{seen}\n{ended.tail()}")
    return verdict


def judge_input(ended: Ended) -> Verdict:
    """Judges a command with odd input, which must be accepted, or refused with a sentence."""
    verdict = Verdict(ACCEPTED if ended.code == 0 else REFUSED, ended.problems())
    if ended.code and not verdict.defects and not ended.sentence:
        verdict.blame(SILENT, f"exit code {ended.code} without a sentence\n{ended.tail()}")
    return verdict


def monitored(bench: Bench, rng: random.Random, every: bool, scale: float = 1.0) -> list[Trial]:
    """Draws hostile values in metrics.jsonl, which `pentatron monitor` shows and a resume reads."""
    lines = (stopped(bench) / "metrics.jsonl").read_text().splitlines()
    limit = None if every else max(1, round(MONITORED * scale))
    changed = list(mutations(json.loads(lines[1]), rng, limit=limit))

    def trial(document: object, resumes: bool) -> Callable[[Place], Verdict]:
        def run(place: Place) -> Verdict:
            copy_run(place)
            text = [lines[0], json.dumps(document), *lines[2:]]
            (place.run / "metrics.jsonl").write_text("\n".join(text) + "\n")
            return (
                resumed(place) if resumes else judge_input(place.command("monitor", str(place.run), "--once"))
            )

        return run

    return [
        Trial(f"{'resume' if n % 3 == 2 else 'monitor'}: metrics.jsonl {label}", trial(document, n % 3 == 2))
        for n, (label, document) in enumerate(changed)
    ]

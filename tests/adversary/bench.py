"""Runs trials: commands in forked processes with limits, compared with undisturbed runs."""

import contextlib
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.adversary import shim
from tests.adversary.shim import Mode, Record, read_journal
from tests.checkpoint.digest import StateDigest
from tests.faults.commands import Zygote
from tests.faults.lab import free_port, state_of, write_corpus
from tests.harness import processes

# Dropout of both kinds, so that random states matter; retention, so that steps are removed as well.
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 50 --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 6 --save-interval 2 --keep-checkpoints 2 --eval-interval 0 --threads-per-process 1 "
    "--device cpu --attention-dropout 0.1 --hidden-dropout 0.1 --lr 1e-2 --log-interval 1"
)
SYNTHETIC = "--dataset-size 100"
LAST = 6
# Ranks, and flags beside those of TINY, where {corpus} stands for a pair of files.
LAYOUTS: Mapping[str, tuple[int, str]] = {
    "sync": (1, SYNTHETIC),
    "async": (1, f"{SYNTHETIC} --async-save"),
    "files": (1, "--data-path {corpus} --split 1,0,0 --tokenizer-type NullTokenizer --data-cache-path cache"),
    "zero1": (2, f"{SYNTHETIC} --use-distributed-optimizer"),
}
# Limits of a command: seconds of wall time and of CPU time; bytes of address space and of resident memory
# beyond its imports.
WALL, CPU = 60.0, 25.0
RESERVED, USED = 4 << 30, 1 << 30
_PAUSE = 0.1
_TICKS = os.sysconf("SC_CLK_TCK")

SILENT, TRACEBACK, HANG, LEFT, MEMORY, UNEQUAL = (
    "silent acceptance",
    "traceback",
    "hang",
    "files left behind",
    "memory",
    "not bit-equal",
)
DEFECTS = (SILENT, TRACEBACK, HANG, LEFT, MEMORY, UNEQUAL)
EQUAL, REFUSED, ACCEPTED = "equal", "refused", "accepted within bounds"


@dataclass
class Verdict:
    """The outcome of a trial, and its defects as (kind, description)."""

    outcome: str = EQUAL
    defects: list[tuple[str, str]] = field(default_factory=list)

    def blame(self, kind: str, what: str) -> None:
        self.defects.append((kind, what))


@dataclass(frozen=True)
class Trial:
    label: str
    run: "Callable[[Place], Verdict]"


@dataclass(frozen=True)
class Fault:
    """The number of the file call below `Place.disk` that fails, and how it fails."""

    call: int
    mode: Mode


@dataclass
class Ended:
    codes: list[int]
    text: str
    hung: bool
    peak: int
    fired: str

    @property
    def code(self) -> int:
        return next((code for code in self.codes if code), 0)

    @property
    def killed(self) -> bool:
        return -signal.SIGKILL in self.codes

    @property
    def sentence(self) -> bool:
        return bool(re.search(r"^pentatron: |^rank \d+: |pentatron: ", self.text, re.MULTILINE))

    def tail(self) -> str:
        return "\n".join(self.text.strip().splitlines()[-6:])

    def problems(self) -> list[tuple[str, str]]:
        """Returns defects that no input excuses: hangs, tracebacks, memory use and fatal signals."""
        found = []
        if self.hung:
            found.append((HANG, f"still running after its time\n{self.tail()}"))
        if "Traceback (most recent call last)" in self.text:
            found.append((TRACEBACK, self.tail()))
        if self.peak > USED:
            found.append((MEMORY, f"{self.peak >> 20} MiB beyond its imports"))
        if any(code < 0 and code not in (-signal.SIGKILL, -signal.SIGHUP) for code in self.codes):
            found.append((TRACEBACK, f"ended by a signal: {self.codes}\n{self.tail()}"))
        return found


class Bench:
    """The fork server and the undisturbed runs. Call `close` at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.corpus = write_corpus(folder / "corpus")
        library = None if shim.missing() else shim.built()
        self.zygote = Zygote("tests.adversary.child", **({"LD_PRELOAD": str(library)} if library else {}))
        self._guard = threading.RLock()
        self._made: dict[str, Any] = {}

    def close(self) -> None:
        self.zygote.close()

    def once(self, name: str, make: "Callable[[Place], Any]") -> Any:
        """Returns the result of `make`, which is called once with a folder of this name."""
        with self._guard:
            if name not in self._made:
                self._made[name] = make(Place(self, self.folder / "undisturbed" / name))
            return self._made[name]

    def journal(self, layout: str, rank: int = 0) -> list[Record]:
        """Returns the file calls of one rank in an undisturbed run."""

        def make(place: "Place") -> list[Record]:
            journal = place.folder / "journal"
            ended = place.train(layout, journal=journal, rank=rank)
            if ended.code:
                raise RuntimeError(f"the undisturbed run of {layout} failed:\n{ended.text}")
            return list(read_journal(journal))

        return self.once(f"{layout}-{rank}", make)  # type: ignore[no-any-return]

    def state(self, layout: str, step: int = LAST) -> StateDigest:
        def make(place: "Place") -> dict[int, StateDigest]:
            ended = place.train(layout, "--keep-checkpoints none")
            if ended.code:
                raise RuntimeError(f"the undisturbed run of {layout} failed:\n{ended.text}")
            return {n: state_of(place.step(n)) for n in (2, 4, 6)}  # type: ignore[arg-type]

        return self.once(f"states-{layout}", make)[step]  # type: ignore[no-any-return]


class Place:
    """The folders of one trial: a disk that may fail, and the output and temporary files of its commands."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.bench, self.folder = bench, folder.resolve()
        shutil.rmtree(folder, ignore_errors=True)
        self.disk, self.temporary = self.folder / "disk", self.folder / "tmp"
        for path in (self.disk, self.temporary):
            path.mkdir(parents=True)
        self.run = self.disk / "run"
        self._commands = 0

    # ---- commands ----

    def begin(
        self,
        words: Sequence[str],
        *,
        ranks: int = 1,
        rank: int = 0,
        fault: Fault | None = None,
        journal: Path | None = None,
        out: str | None = None,
        err: str | None = None,
        terminal: bool = False,
        without: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> "Running":
        """Starts a command. `fault` and `journal` are for rank `rank`; the other ranks have a sound disk."""
        self._commands += 1
        log = self.folder / f"{self._commands}.log"
        log.touch()
        fired, peak = self.folder / f"{self._commands}.fired", self.folder / f"{self._commands}.peak"
        armed = {
            "folder": str(self.disk),
            "journal": str(journal or ""),
            "report": str(fired),
            "call": fault.call if fault else 0,
            "mode": int(fault.mode) if fault else 0,
        }
        port, started = str(free_port()) if ranks > 1 else "", []
        for number in range(ranks):
            own = {"TMPDIR": str(self.temporary), **(variables or {})}
            if ranks > 1:
                own |= {
                    "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                }  # fmt: skip
            request = {
                "words": list(words),
                "folder": str(self.disk),
                "out": str(log) if out is None else out,
                "err": str(log) if err is None else err,
                "terminal": terminal,
                "environment": own,
                "memory": RESERVED,
                "peak": str(peak),
                "without": list(without),
                "shim": armed if number == rank and (fault or journal) else None,
            }
            started.append(self.bench.zygote.fork(request))
        return Running(started, log, fired, peak)

    def command(self, *words: str, **given: Any) -> Ended:
        return self.begin(words, **given).wait()

    def train(self, layout: str, more: str = "", run: Path | None = None, **given: Any) -> Ended:
        ranks, own = LAYOUTS[layout]
        words = f"train {TINY} {own.format(corpus=self.bench.corpus)} {more}".split()
        return self.command(*words, "--run-dir", str(run or self.run), ranks=ranks, **given)

    # ---- contents of the disk ----

    def steps(self, run: Path | None = None) -> list[int]:
        found = (re.fullmatch(r"step-(\d{8})(-again\d+)?", p.name) for p in self._checkpoints(run))
        return sorted({int(match[1]) for match in found if match})

    def _checkpoints(self, run: Path | None) -> list[Path]:
        folder = (run or self.run) / "checkpoints"
        return list(folder.iterdir()) if folder.is_dir() else []

    def step(self, number: int, run: Path | None = None) -> Path | None:
        """Returns the folder of a step, the last one if it was saved again."""
        name = re.compile(rf"step-{number:08d}(-again\d+)?")
        found = [p for p in self._checkpoints(run) if name.fullmatch(p.name)]
        return max(found, key=lambda p: (len(p.name), p.name), default=None)

    def state(self, number: int = LAST, run: Path | None = None) -> StateDigest | None:
        folder = self.step(number, run)
        if folder is None:
            return None
        try:
            return state_of(folder)
        except Exception:
            return None

    def leftovers(self) -> list[str]:
        """Returns files with temporary names on the disk, and all entries of the temporary folder."""
        found = [str(p.relative_to(self.folder)) for p in self.temporary.iterdir()]
        for path in self.disk.rglob("*"):
            hidden = path.name.startswith(".") and path.name != ".lock"
            if hidden or path.name.endswith((".tmp", ".new")):
                found.append(str(path.relative_to(self.folder)))
        return found

    # ---- judging ----

    def judge_resumed(self, first: Ended, second: Ended, layout: str, verdict: Verdict) -> Verdict:
        """Judges a disturbed command and the undisturbed repetition of it."""
        for which, ended in (("first", first), ("second", second)):
            verdict.defects += [(kind, f"{which} command: {what}") for kind, what in ended.problems()]
        if second.code or self.state() != self.bench.state(layout):
            seen = f"exit code {second.code}, steps {self.steps()}"
            verdict.blame(
                UNEQUAL,
                f"the second command does not end with the undisturbed state: {seen}\n{second.tail()}",
            )
        elif left := self.leftovers():
            verdict.blame(LEFT, f"after the second command: {', '.join(left[:4])}")
        return verdict


class Running:
    """The processes of one command."""

    def __init__(self, started: Sequence[Any], log: Path, fired: Path, peak: Path) -> None:
        self.pids = [pid for pid, _ in started]
        self._waits = [wait for _, wait in started]
        self._log, self._fired, self._peak = log, fired, peak
        self._began = time.monotonic()

    def wait(self, wall: float = WALL, cpu: float = CPU) -> Ended:
        hung = False
        for pid, wait in zip(self.pids, self._waits):
            while wait(_PAUSE) is None and not hung:
                hung = time.monotonic() - self._began > wall or _processor_seconds(pid) > cpu
            if hung:
                break
        if hung:
            self.kill()
        codes = [end[0] if (end := wait(5.0)) else -signal.SIGKILL for wait in self._waits]
        return Ended(
            codes,
            self.text,
            hung,
            int(self._peak.read_text() or 0) if self._peak.exists() else 0,
            self._fired.read_text() if self._fired.exists() else "",
        )

    @property
    def text(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def is_alive(self) -> bool:
        return any(wait(0) is None for wait in self._waits)

    def wait_until(self, happened: Callable[[], bool], seconds: float = WALL) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.is_alive:
            if happened():
                return True
            time.sleep(0.02)
        return happened()

    def kill(self) -> None:
        for pid, wait in zip(self.pids, self._waits):
            if wait(0) is None and processes.is_running(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _processor_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def shares(total: int, names: Sequence[str], rng: random.Random, least: int) -> dict[str, int]:
    """Distributes `total` trials over the names.

    A name is expensive to prepare, so that each chosen one gets at least `least` trials, if `total` suffices.
    """
    chosen = rng.sample(list(names), min(len(names), max(1, total // least)))
    return {name: total // len(chosen) + (n < total % len(chosen)) for n, name in enumerate(chosen)}


def attempt(bench: Bench, trial: Trial, folder: Path) -> Verdict:
    """Runs one trial; an error of the trial itself is shown as a defect."""
    try:
        return trial.run(Place(bench, folder))
    except Exception as error:
        import traceback

        return Verdict(
            ACCEPTED, [(SILENT, f"the trial itself failed: {error}\n{traceback.format_exc(limit=-4)}")]
        )

"""The folder, the commands and the undisturbed reference runs of a case."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pentatron.checkpoint.format import read_manifest
from pentatron.data.indexed_writer import IndexedDatasetWriter
from tests.checkpoint.digest import StateDigest, state_digest
from tests.faults.commands import MARK, Ran, Running, Zygote, environment, take_terminal
from tests.faults.injection import ALONE, Fault, happened

# Dropout of both kinds, so that random states matter.
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 50 --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 10 --save-interval 2 --keep-checkpoints none --eval-interval 0 --threads-per-process 1 "
    "--device cpu --attention-dropout 0.1 --hidden-dropout 0.1 --lr 1e-2 --log-interval 1"
)
SAVE_INTERVAL = 2
LAST = 10
BATCH = 4


SYNTHETIC = "--dataset-size 100"
FILES = "--data-path {corpus} --split 1,0,0 --tokenizer-type NullTokenizer"
# The dropout mask of attention depends on the layout.
ANYWHERE = "--attention-dropout 0"
EXPERTS = "--num-experts 2 --moe-router-topk 1 --moe-router-pre-softmax"


@dataclass(frozen=True)
class Layout:
    """Ranks and flags of a run. `data`: flags of its data, where {corpus} stands for a pair of files."""

    ranks: int
    words: str = ""
    data: str = SYNTHETIC


LAYOUTS = {
    "alone": Layout(1),
    # Both ranks have a shard of the optimizer state, so that both save.
    "dp2": Layout(2, "--use-distributed-optimizer"),
    "pp2": Layout(2, "--pipeline-model-parallel-size 2"),
    "ep2": Layout(2, f"{EXPERTS} --expert-model-parallel-size 2"),
    "files": Layout(1, "", FILES),
    "long": Layout(2, "--use-distributed-optimizer --train-iters 14"),
    "any dp2": Layout(2, f"{ANYWHERE} --use-distributed-optimizer"),
    "any dp4": Layout(4, ANYWHERE),
    "any alone": Layout(1, ANYWHERE),
    "any tp2": Layout(2, f"{ANYWHERE} --tensor-model-parallel-size 2"),
    "any pp2": Layout(2, f"{ANYWHERE} --pipeline-model-parallel-size 2"),
    "any cp2": Layout(2, f"{ANYWHERE} --context-parallel-size 2"),
    "any zero3": Layout(2, f"{ANYWHERE} --zero-stage 3"),
    "any tp2 pp2": Layout(4, f"{ANYWHERE} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "any experts": Layout(1, f"{ANYWHERE} {EXPERTS}"),
    "any ep2": Layout(2, f"{ANYWHERE} {EXPERTS} --expert-model-parallel-size 2"),
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_corpus(prefix: Path, seed: int = 0, documents: int = 60) -> Path:
    """Writes a .bin/.idx pair with its sidecar."""
    draw = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for _ in range(documents):
            writer.add_document(draw.integers(0, 49, size=draw.integers(5, 30)))
    return prefix


def state_of(step: Path) -> StateDigest:
    return state_digest(step, read_manifest(step))


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def recorders(layout: str, folder: Path) -> list[Fault]:
    """Returns faults by which every rank records the samples that it reads."""
    count = LAYOUTS[layout].ranks
    return [
        Fault(
            "sample",
            "record",
            rank=ALONE if count == 1 else rank,
            step=0,
            file=str(folder / f"samples-{rank}"),
        )
        for rank in range(count)
    ]


def samples(folder: Path, ranks: int) -> list[list[str]]:
    """Returns the hashes of the samples of each step, sorted, so that they do not depend on ranks.

    Ranks that share micro-batches read the same samples.
    """
    by_rank = [(folder / f"samples-{rank}").read_text().split() for rank in range(ranks)]
    distinct = list(dict.fromkeys(tuple(read) for read in by_rank))
    share = BATCH // len(distinct)
    steps = len(distinct[0]) // share
    return [sorted(w for read in distinct for w in read[n * share : (n + 1) * share]) for n in range(steps)]


class References:
    """Undisturbed runs, each made once."""

    def __init__(self, folder: Path, zygote: Zygote) -> None:
        self.folder, self.zygote = folder, zygote
        self._locks: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    def place(self, layout: str) -> Path:
        return self.folder / layout.replace(" ", "-")

    def of(self, layout: str) -> Path:
        with self._guard:
            lock = self._locks.setdefault(layout, threading.Lock())
        place = self.place(layout)
        with lock:
            if not (place / "done").exists():
                ran = Lab(place, self).fork(layout, faults=recorders(layout, place))
                if ran.code:
                    raise RuntimeError(f"the undisturbed run of {layout} failed:\n{ran.text}")
                (place / "done").touch()
        return place / "run"

    def samples(self, layout: str) -> list[list[str]]:
        self.of(layout)
        return samples(self.place(layout), LAYOUTS[layout].ranks)

    def state(self, layout: str, step: int = LAST) -> StateDigest:
        return state_of(step_folder(self.of(layout), step))


class Lab:
    """The folder and the commands of one case."""

    def __init__(self, folder: Path, references: References) -> None:
        self.folder, self.references = folder, references
        folder.mkdir(parents=True, exist_ok=True)
        self.run = folder / "run"
        self.corpus = folder / "corpus"
        self._commands = 0

    def marker(self, name: str = "happened") -> str:
        return str(self.folder / name)

    def interrupted(self, layout: str, after: int = 6) -> Path:
        """Copies an undisturbed run as if interrupted after step `after`; returns its newest step."""
        shutil.copytree(self.references.of(layout), self.run)
        steps = self.run / "checkpoints"
        for folder in steps.glob("step-*"):
            if int(folder.name.removeprefix("step-")) > after:
                shutil.rmtree(folder)
        (steps / "latest").write_text(f"step-{after:08d}\n")
        return step_folder(self.run, after)

    def words(self, layout: str, more: str = "", run: Path | None = None) -> list[str]:
        """Returns the flags of a layout and `more`; the last flag for a setting counts."""
        chosen = LAYOUTS[layout]
        if chosen.data == FILES and not Path(f"{self.corpus}.bin").exists():
            write_corpus(self.corpus)
        # A name that is equal in every case, since the run state contains it.
        data = chosen.data.format(corpus=self.corpus.name)
        return f"{TINY} {chosen.words} {data} {more} --run-dir {run or self.run}".split()

    def _files(self) -> tuple[Path, Path]:
        self._commands += 1
        return self.folder / f"{self._commands}.out", self.folder / f"{self._commands}.err"

    def begin(
        self,
        layout: str,
        more: str = "",
        faults: Sequence[Fault] = (),
        words: Sequence[str] | None = None,
        run: Path | None = None,
        around: "Callable[[int], dict[str, str]] | None" = None,
        mounts: Sequence[dict[str, Any]] = (),
        rescue: tuple[str, str] | None = None,
        plain: bool = False,
    ) -> Running:
        """Forks ranks without a launcher, as mpirun or a scheduler starts them.

        `around`: further environment variables of a rank. `mounts`: file systems that only the ranks see;
        `rescue` copies a folder from them at the end. `plain`: without the rights of root.
        """
        out, err = self._files()
        ranks, mark = LAYOUTS[layout].ranks, uuid.uuid4().hex
        port = str(free_port())
        pids, waits = [], []
        for rank in range(ranks):
            own = {MARK: mark}
            if ranks > 1:
                own |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                }  # fmt: skip
            if around is not None:
                own |= around(rank)
            pid, wait = self.references.zygote.fork(
                {
                    "words": list(words) if words is not None else self.words(layout, more, run),
                    "faults": [fault.word() for fault in faults],
                    "environment": own,
                    "folder": str(self.folder),
                    "out": str(out),
                    "err": str(err),
                    "mounts": list(mounts),
                    "rescue": rescue,
                    "plain": plain,
                }
            )
            pids.append(pid)
            waits.append(wait)
        return Running(pids, waits, [out, err], mark)

    def fork(
        self, layout: str, more: str = "", faults: Sequence[Fault] = (), seconds: float = 120, **given: Any
    ) -> Ran:
        return self.begin(layout, more, faults, **given).wait(seconds)

    def launch(
        self, layout: str, more: str = "", faults: Sequence[Fault] = (), output: int | None = None
    ) -> Running:
        """Starts `pentatron train` and its workers as a user does.

        `output`: a descriptor for both streams, closed here once the command has it. Lines are then read from
        the run's log.
        """
        out, err = self._files()
        mark = uuid.uuid4().hex
        entry = (
            ["-m", "tests.faults.entry", *(fault.word() for fault in faults), "--"]
            if faults
            else ["-m", "pentatron", "train"]
        )
        ranks = ["--nproc-per-node", str(LAYOUTS[layout].ranks)]
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, *entry, *self.words(layout, more), *ranks],
                cwd=self.folder,
                env={**environment(), MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=stdout if output is None else output,
                stderr=stderr if output is None else output,
                start_new_session=True,
                preexec_fn=take_terminal,
            )
        if output is not None:
            os.close(output)

        def wait(seconds: float) -> tuple[int, float] | None:
            try:
                return process.wait(seconds), time.time()
            except subprocess.TimeoutExpired:
                return None

        said = [out, err] if output is None else [self.run / "train.log"]
        return Running([process.pid], [wait], said, mark)

    def is_equal(self, layout: str, step: int = LAST, run: Path | None = None) -> bool:
        """Whether a step of the run has the state of the undisturbed run."""
        folder = self.newest(step, run)
        return folder is not None and state_of(folder) == self.references.state(layout, step)

    def all_equal(self, layout: str) -> bool:
        """Whether every saved step has the state of the undisturbed run."""
        return all(self.is_equal(layout, step) for step in range(SAVE_INTERVAL, LAST + 1, SAVE_INTERVAL))

    def last_step(self, run: Path | None = None) -> int:
        """Returns the last step in the run's metrics."""
        path = (run or self.run) / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return len(lines)

    def wait_for_step(self, running: Running, step: int, seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while self.last_step() < step:
            if time.monotonic() > deadline or not running.is_alive:
                raise running.hung(f"step {step} was not reached")
            time.sleep(0.02)

    def wait_for_fault(self, running: Running, name: str = "happened", seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while not (self.folder / name).exists():
            if time.monotonic() > deadline or not running.is_alive:
                raise running.hung("the fault did not come about")
            time.sleep(0.02)

    def weights_equal(self, step: Path, other: StateDigest) -> bool:
        return state_of(step).weights == other.weights

    def when(self, name: str = "happened") -> float:
        """Returns the time of a fault."""
        return happened(self.folder / name)[0]

    def newest(self, step: int, run: Path | None = None) -> Path | None:
        """Returns the folder of a step, the last one if it was saved again."""
        found = sorted(
            (run or self.run).glob(f"checkpoints/step-{step:08d}*"), key=lambda p: (len(p.name), p.name)
        )
        found = [p for p in found if "damaged" not in p.name]
        return found[-1] if found else None

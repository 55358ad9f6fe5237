"""Measures saving and loading a checkpoint against the disk and against torch.distributed.checkpoint.

The state is the fp32 weights and two moments of a Llama-like model. Every round saves and loads it in every
way, in an order that differs from round to round, in a temporary folder. A load reads into one process what
two tensor-parallel ranks would have written.

The speed of the disk varies most: many disks write the first GB several times as fast as later ones, and
recover after a rest. An untimed write of the same size therefore precedes every timed write. Some writes
still take four times as long as others, in every way. Ratios therefore compare the fastest round of each way,
in which the disk hides the least of the processor's work; the spread is that of single rounds. One line
shows, for information, the rate of the first write of a round, with one way per round. Reads are cold:
written files are flushed and dropped from the page cache first.

    python bench/checkpoint.py --gigabytes 0.4 --repeats 20
"""

import argparse
import datetime
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pentatron.checkpoint.format import Manifest, verify_files
from pentatron.checkpoint.load import load_fragments
from pentatron.checkpoint.save import Saver
from pentatron.checkpoint.store import CheckpointStore
from pentatron.checkpoint.tensor_file import BLOCK_BYTES, TensorSpec, write_blocks
from pentatron.parallel.collectives import Group
from pentatron.parallel.sharding import Fragment, Shape, region

ROOT = Path(__file__).resolve().parents[1]
ALONE = Group(0, 1)
KINDS = ("weights", "exp_avg", "exp_avg_sq")
WIDTH, FEED_FORWARD = 1024, 2816
# Goal and meaning of each ratio: a minimum, or a maximum for AT_MOST.
GOALS = {
    "save": (0.70, "a save, of a plain write with fsync"),
    "hash": (0.10, "sums while writing, of the same writing without them, at most"),
    "stall": (0.10, "what a save in the background holds training up, of a save, at most"),
    "load": (0.35, "a cold load of another layout, sums compared, of a plain cold read"),
    "dcp save": (1.00, "a save by torch.distributed.checkpoint, in times of ours"),
    "dcp load": (1.00, "a cold load by torch.distributed.checkpoint, in times of ours"),
}
AT_MOST = ("hash", "stall")
# NO_RATES: seconds that are not the time of a transfer of all bytes. RESTED: suffix of the first write of a
# round, before which the disk had a rest.
NO_RATES, RESTED = ("held", "slower"), " (rested)"


def shapes(layers: int) -> dict[str, Shape]:
    """Names and shapes of a model's parameters."""
    found: dict[str, Shape] = {"embedding": (8192, WIDTH)}
    for layer in range(layers):
        found |= {
            f"layers.{layer}.qkv": (3 * WIDTH, WIDTH),
            f"layers.{layer}.out": (WIDTH, WIDTH),
            f"layers.{layer}.norm": (WIDTH,),
            f"layers.{layer}.up": (2 * FEED_FORWARD, WIDTH),
            f"layers.{layer}.down": (WIDTH, FEED_FORWARD),
            f"layers.{layer}.norm2": (WIDTH,),
        }
    return found


def make_state(total: float) -> dict[str, Tensor]:
    """Returns named fp32 tensors of at least `total` bytes together."""
    layers, noise = 1, torch.randn(4 * 2**20)
    while 4 * len(KINDS) * sum(torch.Size(s).numel() for s in shapes(layers).values()) < total:
        layers += 1
    state = {}
    for name, shape in shapes(layers).items():
        for kind in KINDS:
            # One block of noise is repeated: drawing random numbers takes longer than writing them.
            values = noise.repeat(-(-torch.Size(shape).numel() // len(noise)))[: torch.Size(shape).numel()]
            state[f"{kind}/{name}"] = values.view(shape).clone()
    return state


def halves(state: dict[str, Tensor], rank: int) -> list[Fragment]:
    """Returns the fragments of one of two tensor-parallel ranks: rows or columns; vectors on rank 0 only."""
    found = []
    for name, values in state.items():
        if values.dim() == 1:
            if rank == 0:
                found.append(Fragment(name, tuple(values.shape), (0,), values))
            continue
        axis = 1 if name.endswith((".down", ".out")) else 0
        size = list(values.shape)
        size[axis] //= 2
        start = [0, 0]
        start[axis] = rank * size[axis]
        part = region(values, tuple(start), tuple(size)).contiguous()
        found.append(Fragment(name, tuple(values.shape), tuple(start), part))
    return found


def evict_from_page_cache(folder: Path) -> None:
    """Flushes the files of `folder` to disk and drops them from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def plain_write(folder: Path, state: dict[str, Tensor], again: bool = False) -> None:
    """Writes the state into one file with fsync; `again` allows overwriting the file of an earlier call."""
    folder.mkdir(exist_ok=again)
    path = folder / "plain"
    with path.open("r+b" if path.exists() else "xb", buffering=0) as file:
        for values in state.values():
            flat = values.view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(flat), BLOCK_BYTES):
                file.write(flat[start : start + BLOCK_BYTES])
        os.fsync(file.fileno())


def plain_read(folder: Path) -> None:
    buffer = bytearray(BLOCK_BYTES)
    with (folder / "plain").open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def whole(state: dict[str, Tensor]) -> list[Fragment]:
    return [Fragment(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in state.items()]


def save(folder: Path, fragments: list[Fragment]) -> Path:
    return CheckpointStore(folder, keep=None).save(1, fragments, {}, {}, {}, ALONE)


def write_one_file(folder: Path, state: dict[str, Tensor], hashed: bool) -> None:
    """Writes the file of a rank as a save does, with or without checksums, and nothing else of a save."""
    folder.mkdir()
    outlines = {name: TensorSpec(values.dtype, tuple(values.shape)) for name, values in state.items()}

    def read(name: str, start: Shape, size: Shape) -> Tensor:
        return region(state[name], start, size)

    write_blocks(folder / "file", outlines, read, hashed=hashed)


def save_as_two(folder: Path, state: dict[str, Tensor]) -> tuple[Path, Manifest]:
    """Writes the step of two tensor-parallel ranks from one process, rank after rank."""
    store = CheckpointStore(folder, keep=None)
    temporary = store.temporary(1)
    temporary.mkdir(parents=True)
    written = [store.write_own(temporary, rank, halves(state, rank)) for rank in range(2)]
    manifest = store.complete(temporary, Manifest(1, {}, {}, {}, {}), written)
    return store.commit(temporary, manifest), manifest


def load_whole(step: Path, manifest: Manifest, into: dict[str, Tensor]) -> None:
    """Verifies the checksums of a step of two ranks, then loads all of it into this process."""
    verify_files(step, manifest)
    load_fragments(step, manifest, whole(into))


class Training:
    """Steps with a fixed amount of computation, after each of which the whole state changes."""

    def __init__(self, state: dict[str, Tensor], seconds: float) -> None:
        self.state = list(state.values())
        self.left, self.right = torch.randn(512, 512), torch.randn(512, 512)
        started, self.products = time.perf_counter(), 0
        while time.perf_counter() - started < seconds:
            torch.mm(self.left, self.right)
            self.products += 1

    def compute(self) -> None:
        for _ in range(self.products):
            torch.mm(self.left, self.right)

    def update(self) -> None:
        torch._foreach_mul_(self.state, 1.0)


Ways = dict[str, Callable[[], Any]]


def in_some_order(ways: Ways, number: int) -> list[tuple[str, Callable[[], Any]]]:
    """Shuffles the ways by round number, reproducibly, so that no way always follows the same one."""
    return random.Random(number).sample(list(ways.items()), len(ways))


class Bench:
    """Saves and loads one state in every way, round by round."""

    def __init__(self, state: dict[str, Tensor], folder: Path, seconds: float) -> None:
        self.state, self.folder = state, folder
        self.target = {name: torch.zeros_like(values) for name, values in state.items()}
        store = CheckpointStore(folder / "background", keep=None)
        self.saver = Saver(store, ALONE, background=True, say=print)
        self.training = Training(state, seconds)

    def ways_to_write(self) -> Ways:
        """Returns the ways to write; each writes into a folder named after it."""
        return {
            "write": lambda: plain_write(self.folder / "write", self.state),
            "save": lambda: save(self.folder / "save", whole(self.state)),
            "dcp save": lambda: dcp_save(
                dict(self.state), checkpoint_id=self.folder / "dcp save", no_dist=True
            ),
            "sums": lambda: write_one_file(self.folder / "sums", self.state, hashed=True),
            "no sums": lambda: write_one_file(self.folder / "no sums", self.state, hashed=False),
        }

    def after_idle(self, number: int) -> dict[str, float]:
        """Times one way as the first write of a round; the way changes from round to round.

        Since the last write the disk was only read, so it has recovered its initial write speed, at least in
        part.
        """
        name, way = list(self.ways_to_write().items())[number % len(self.ways_to_write())]
        found = timed(way)
        shutil.rmtree(self.folder / name)
        return {f"{name}{RESTED}": found}

    def saves(self, number: int) -> dict[str, float]:
        found = {}
        for name, way in in_some_order(self.ways_to_write(), number):
            # Uses up the bytes that the disk writes faster than it can sustain.
            plain_write(self.folder / "drained", self.state, again=True)
            found[name] = timed(way)
        for name in ("save", "sums", "no sums", "drained"):
            shutil.rmtree(self.folder / name)
        return {name: found[name] for name in self.ways_to_write()}

    def background(self, step: int) -> dict[str, float]:
        """Returns the seconds that an async save blocks training and slows computation beside it."""
        alone = timed(self.training.compute)
        held = timed(lambda: self.saver.begin(step, whole(self.state), [], {}, {}, {}))
        beside = timed(self.training.compute)
        held += timed(self.saver.wait_until_copied)
        self.training.update()
        self.saver.commit_pending(wait=True)
        shutil.rmtree(self.folder / "background")
        return {"held": held, "slower": max(0.0, beside - alone)}

    def loads(self, number: int) -> dict[str, float]:
        step, manifest = save_as_two(self.folder / "two", self.state)
        for name in ("write", "two", "dcp save"):
            evict_from_page_cache(self.folder / name)
        ways: Ways = {
            "load": lambda: load_whole(step, manifest, self.target),
            "read": lambda: plain_read(self.folder / "write"),
            "dcp load": lambda: dcp_load(self.target, checkpoint_id=self.folder / "dcp save", no_dist=True),
        }
        found = {}
        for name, way in in_some_order(ways, number):
            for values in self.target.values():
                values.zero_()
            found[name] = timed(way)
            if name != "read":
                assert all(torch.equal(self.target[n], values) for n, values in self.state.items()), name
        for name in ("write", "two", "dcp save"):
            shutil.rmtree(self.folder / name)
        return found

    def rounds(self, repeats: int) -> Iterator[dict[str, float]]:
        for number in range(repeats + 1):
            found = {
                **self.after_idle(number),
                **self.saves(number),
                **self.background(number + 1),
                **self.loads(number),
            }
            # The first round allocates buffers and loads libraries, so it does not count.
            if number:
                print(" ".join(f"{name} {value:.2f}" for name, value in found.items()), "s", flush=True)
                yield found


def ratios(found: dict[str, float]) -> dict[str, float]:
    return {
        "save": found["write"] / found["save"],
        "hash": found["sums"] / found["no sums"] - 1,
        "stall": found["held"] / found["save"],
        "load": found["read"] / found["load"],
        "dcp save": found["dcp save"] / found["save"],
        "dcp load": found["dcp load"] / found["load"],
    }


def report(measured: list[dict[str, float]], total: int) -> tuple[list[str], bool]:
    lines, holds = [], True
    names = dict.fromkeys(name for found in measured for name in found)
    every = {name: [found[name] for found in measured if name in found] for name in names}
    seconds = {name: statistics.median(values) for name, values in every.items()}
    # The time that training is blocked is judged by its median, not by its fastest round.
    fastest = {name: min(values) for name, values in every.items()} | {"held": seconds["held"]}
    rates = {name: f"{total / 1e9 / value:.2f}" for name, value in seconds.items() if name not in NO_RATES}
    lasting = ", ".join(f"{name} {rate}" for name, rate in rates.items() if not name.endswith(RESTED))
    lines.append(f"GB/s, medians of {len(measured)} rounds: {lasting}")
    best = ", ".join(
        f"{name} {total / 1e9 / fastest[name]:.2f}" for name in rates if not name.endswith(RESTED)
    )
    lines.append(f"GB/s, the fastest rounds: {best}")
    rested = ", ".join(
        f"{name.removesuffix(RESTED)} {rate}" for name, rate in rates.items() if name.endswith(RESTED)
    )
    lines.append(f"GB/s of the first write of a round, for information: {rested}")
    lines.append(
        f"training is held up {seconds['held'] * 1000:.0f} ms by a save in the background; the computing beside it took "
        f"{seconds['slower'] * 1000:.0f} ms longer"
    )
    for name, (goal, meaning) in GOALS.items():
        values = sorted(ratios(found)[name] for found in measured)
        best_ratio = ratios(fastest)[name]
        good = best_ratio <= goal if name in AT_MOST else best_ratio >= goal
        holds &= good
        spread = f"{values[0]:.2f} to {values[-1]:.2f}"
        lines.append(
            f"{'holds' if good else 'MISSED':<7} {best_ratio:5.2f} (goal {goal:.2f}; {spread}) {meaning}"
        )
    return lines, holds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=0.4)
    parser.add_argument("--repeats", type=int, default=20, help="timed rounds")
    parser.add_argument(
        "--step-seconds", type=float, default=0.3, help="seconds of computation in a training step"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder to write into (default: the system's temporary folder)"
    )
    parser.add_argument("--write", action="store_true", help="add the figures to docs/LOG.md")
    words = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    state = make_state(words.gigabytes * 1e9)
    total = sum(values.numel() * values.element_size() for values in state.values())
    print(f"{total / 1e9:.2f} GB in {len(state)} tensors, {os.cpu_count()} cores, torch {torch.__version__}")
    folder = Path(tempfile.mkdtemp(dir=words.folder))
    try:
        measured = list(Bench(state, folder, words.step_seconds).rounds(words.repeats))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    lines, holds = report(measured, total)
    print("\n".join(lines))
    if words.write:
        log = ROOT / "docs" / "LOG.md"
        head, first, rest = log.read_text(encoding="utf-8").partition("\n## ")
        title = f"{datetime.date.today()} Checkpoints against the disk ({os.cpu_count()} CPU cores, torch {torch.__version__}, {platform.system()})"
        body = "\n".join(f"- {line}" for line in lines)
        log.write_text(
            f"{head}{first}{title}\n\n`{' '.join(['python', 'bench/checkpoint.py', *sys.argv[1:]])}`\n\n{body}\n{first}{rest}",
            encoding="utf-8",
        )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())

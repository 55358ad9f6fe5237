"""Saving and loading a checkpoint against the disk and against torch.distributed.checkpoint.

One state, weights and two moments of a Llama-like model in fp32 as two tensor-parallel ranks would hold it, is saved and loaded in turns,
in a temporary folder. The disk of the machine is what varies most: many take some GB several times as fast as what follows. So every round
measures every way, each begins with another one, and ratios are those of the medians over all rounds; the spread is that of single rounds. Reads
are cold: what was written is flushed, and the system forgets it.

    python bench/checkpoint.py --gigabytes 0.4 --repeats 10
"""

import argparse
import datetime
import os
import platform
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

from pentatron.checkpoint.load import load_fragments
from pentatron.checkpoint.manifest import Manifest, verify_files
from pentatron.checkpoint.saver import Saver
from pentatron.checkpoint.store import CheckpointStore
from pentatron.checkpoint.tensor_file import BLOCK_BYTES, Outline, write_blocks
from pentatron.parallel.collectives import Group
from pentatron.parallel.pieces import Fragment, Shape, region

ROOT = Path(__file__).resolve().parents[1]
ALONE = Group(0, 1)
KINDS = ("weights", "exp_avg", "exp_avg_sq")
WIDTH, FEED_FORWARD = 1024, 2816
# The figures that are asked for: the least share, or the largest.
GOALS = {
    "save": (0.70, "a save, of a plain write with fsync"),
    "hash": (0.10, "sums while writing, of a save without them, at most"),
    "stall": (0.10, "what a save in the background holds training up, of a save, at most"),
    "load": (0.35, "a cold load of another layout, sums compared, of a plain cold read"),
    "dcp save": (1.00, "a save by torch.distributed.checkpoint, in times of ours"),
    "dcp load": (1.00, "a cold load by torch.distributed.checkpoint, in times of ours"),
}
AT_MOST = ("hash", "stall")


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
    """About that many bytes."""
    layers, noise = 1, torch.randn(4 * 2**20)
    while 4 * len(KINDS) * sum(torch.Size(s).numel() for s in shapes(layers).values()) < total:
        layers += 1
    state = {}
    for name, shape in shapes(layers).items():
        for kind in KINDS:
            # The same noise again and again: a disk does not mind, and drawing takes longer than writing.
            values = noise.repeat(-(-torch.Size(shape).numel() // len(noise)))[: torch.Size(shape).numel()]
            state[f"{kind}/{name}"] = values.view(shape).clone()
    return state


def halves(state: dict[str, Tensor], rank: int) -> list[Fragment]:
    """What one of two tensor-parallel ranks holds: rows or columns of matrices; the second one has no vectors."""
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


def forget(folder: Path) -> None:
    """Writes out what is in memory of these files, and makes the system forget it."""
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


def plain_write(folder: Path, state: dict[str, Tensor]) -> None:
    folder.mkdir()
    with (folder / "plain").open("xb", buffering=0) as file:
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


def write_without_sums(folder: Path, state: dict[str, Tensor]) -> None:
    folder.mkdir()
    outlines = {name: Outline(values.dtype, tuple(values.shape)) for name, values in state.items()}

    def read(name: str, start: Shape, size: Shape) -> Tensor:
        return region(state[name], start, size)

    write_blocks(folder / "file", outlines, read, hashed=False)


def save_as_two(folder: Path, state: dict[str, Tensor]) -> tuple[Path, Manifest]:
    """The step of two tensor-parallel ranks, written by one process, one after the other."""
    store = CheckpointStore(folder, keep=None)
    temporary = store.temporary(1)
    temporary.mkdir(parents=True)
    written = [store.write_own(temporary, rank, halves(state, rank)) for rank in range(2)]
    manifest = store.complete(temporary, 1, written, {}, {})
    return store.commit(temporary, manifest), manifest


def load_whole(step: Path, manifest: Manifest, into: dict[str, Tensor]) -> None:
    """As one process that goes on from what two have saved: sums compared, then everything read."""
    verify_files(step, manifest)
    load_fragments(step, manifest, whole(into))


class Training:
    """Steps of a fixed amount of computation, after each of which all of the state changes."""

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


def in_turn(ways: dict[str, Callable[[], Any]], first: int) -> list[tuple[str, Callable[[], Any]]]:
    """Each round begins with another one: a disk may be several times slower after some GB than before."""
    listed = list(ways.items())
    first %= len(listed)
    return [*listed[first:], *listed[:first]]


class Bench:
    """One state, saved and loaded in turns."""

    def __init__(self, state: dict[str, Tensor], folder: Path, seconds: float) -> None:
        self.state, self.folder = state, folder
        self.target = {name: torch.zeros_like(values) for name, values in state.items()}
        store = CheckpointStore(folder / "background", keep=None)
        self.saver = Saver(store, ALONE, background=True, say=print)
        self.training = Training(state, seconds)

    def saves(self, first: int) -> dict[str, float]:
        ways: dict[str, Callable[[], Any]] = {
            "write": lambda: plain_write(self.folder / "plain", self.state),
            "save": lambda: save(self.folder / "ours", whole(self.state)),
            "dcp save": lambda: dcp_save(
                dict(self.state), checkpoint_id=self.folder / "theirs", no_dist=True
            ),
            "no sums": lambda: write_without_sums(self.folder / "unsummed", self.state),
            "write again": lambda: plain_write(self.folder / "again", self.state),
        }
        found = {name: timed(way) for name, way in in_turn(ways, first)}
        for name in ("ours", "unsummed", "again"):
            shutil.rmtree(self.folder / name)
        return found

    def background(self, step: int) -> dict[str, float]:
        """Seconds that a save in the background holds training up, and those by which it makes computing slower."""
        alone = timed(self.training.compute)
        held = timed(lambda: self.saver.begin(step, whole(self.state), [], {}, {}, {}))
        beside = timed(self.training.compute)
        held += timed(self.saver.wait_until_copied)
        self.training.update()
        self.saver.settle(wait=True)
        shutil.rmtree(self.folder / "background")
        return {"held": held, "slower": max(0.0, beside - alone)}

    def loads(self, first: int) -> dict[str, float]:
        step, manifest = save_as_two(self.folder / "two", self.state)
        for name in ("plain", "two", "theirs"):
            forget(self.folder / name)
        ways: dict[str, Callable[[], Any]] = {
            "load": lambda: load_whole(step, manifest, self.target),
            "read": lambda: plain_read(self.folder / "plain"),
            "dcp load": lambda: dcp_load(self.target, checkpoint_id=self.folder / "theirs", no_dist=True),
        }
        found = {}
        for name, way in in_turn(ways, first):
            for values in self.target.values():
                values.zero_()
            found[name] = timed(way)
            if name != "read":
                assert all(torch.equal(self.target[n], values) for n, values in self.state.items()), name
        for name in ("plain", "two", "theirs"):
            shutil.rmtree(self.folder / name)
        return found

    def rounds(self, repeats: int) -> Iterator[dict[str, float]]:
        for number in range(repeats + 1):
            found = {**self.saves(number), **self.background(number + 1), **self.loads(number)}
            # In the first round buffers are new, and libraries are loaded.
            if number:
                print(" ".join(f"{name} {value:.2f}" for name, value in found.items()), "s", flush=True)
                yield found


def ratios(found: dict[str, float]) -> dict[str, float]:
    written = (found["write"] + found["write again"]) / 2
    return {
        "save": written / found["save"],
        "hash": found["save"] / found["no sums"] - 1,
        "stall": found["held"] / found["save"],
        "load": found["read"] / found["load"],
        "dcp save": found["dcp save"] / found["save"],
        "dcp load": found["dcp load"] / found["load"],
    }


def report(measured: list[dict[str, float]], total: int) -> tuple[list[str], bool]:
    lines, holds = [], True
    seconds = {name: statistics.median(found[name] for found in measured) for name in measured[0]}
    rates = ", ".join(
        f"{name} {total / 1e9 / value:.2f}"
        for name, value in seconds.items()
        if name not in ("held", "slower")
    )
    lines.append(f"GB/s, medians of {len(measured)} rounds: {rates}")
    lines.append(
        f"training is held up {seconds['held'] * 1000:.0f} ms by a save in the background; the computing beside it took "
        f"{seconds['slower'] * 1000:.0f} ms longer"
    )
    for name, (goal, meaning) in GOALS.items():
        values = sorted(ratios(found)[name] for found in measured)
        middle = ratios(seconds)[name]
        good = middle <= goal if name in AT_MOST else middle >= goal
        holds &= good
        spread = f"{values[0]:.2f} to {values[-1]:.2f}"
        lines.append(
            f"{'holds' if good else 'MISSED':<7} {middle:5.2f} (goal {goal:.2f}; {spread}) {meaning}"
        )
    return lines, holds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=0.4)
    parser.add_argument("--repeats", type=int, default=10, help="rounds; a multiple of five is fair to all")
    parser.add_argument(
        "--step-seconds", type=float, default=0.3, help="how long a step of training computes"
    )
    parser.add_argument("--folder", type=Path, help="where to write (the system's temporary folder)")
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

"""Commands whose standard output cannot be written keep their exit code and the state of the run."""

import contextlib
import os
import pty
import random
import select
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.adversary.bench import (
    ACCEPTED,
    EQUAL,
    LAST,
    REFUSED,
    SILENT,
    SYNTHETIC,
    TINY,
    UNEQUAL,
    Bench,
    Place,
    Running,
    Trial,
    Verdict,
)

SAMPLES = 40


@dataclass(frozen=True)
class Kind:
    """A run: its further flags, and its exit code if output works."""

    words: str
    code: int


RUNS = {
    "a run that succeeds": Kind("", 0),
    "a run with a progress bar": Kind("--progress-bar on", 0),
    "a run that saves in the background": Kind("--async-save", 0),
    "a run whose loss is NaN": Kind("--lr 1e30", 16),
    "a run that is refused": Kind("--num-attention-heads 3", 2),
}


@contextlib.contextmanager
def _path(text: str) -> "Iterator[tuple[str, Callable[[Running], None]]]":
    yield text, lambda running: None


def _device() -> "contextlib.AbstractContextManager[tuple[str, Callable[[Running], None]]]":
    return _path("/dev/full")


def _closed() -> "contextlib.AbstractContextManager[tuple[str, Callable[[Running], None]]]":
    return _path("")


def _reader(
    place: Place, size: int
) -> "contextlib.AbstractContextManager[tuple[str, Callable[[Running], None]]]":
    """Opens a pipe whose reader closes it after `size` bytes."""

    @contextlib.contextmanager
    def make() -> "Iterator[tuple[str, Callable[[Running], None]]]":
        fifo = place.folder / "pipe"
        os.mkfifo(fifo)

        def read() -> None:
            with fifo.open("rb", buffering=0) as file:
                left = size
                while left > 0 and (data := file.read(left)):
                    left -= len(data)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        yield str(fifo), lambda running: None
        # Unblocks the reader if the command never opened the pipe.
        with contextlib.suppress(OSError):
            os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        thread.join(5)

    return make()


def _terminal(size: int) -> "contextlib.AbstractContextManager[tuple[str, Callable[[Running], None]]]":
    """Opens a terminal that is closed after `size` bytes."""

    @contextlib.contextmanager
    def make() -> "Iterator[tuple[str, Callable[[Running], None]]]":
        master, slave = pty.openpty()

        def leave(running: Running) -> None:
            left = size
            with contextlib.suppress(OSError):
                # A command may end before it has written `size` bytes; as `slave` is open here, there is no
                # end of file.
                while left > 0 and running.is_alive:
                    if select.select([master], [], [], 0.05)[0]:
                        left -= len(os.read(master, left))
            os.close(master)

        name = os.ttyname(slave)
        # `slave` stays open until the command has opened the terminal, which would be gone at once otherwise.
        try:
            yield name, lambda running: (leave(running), None)[1]
        finally:
            os.close(slave)

    return make()


def trials(bench: Bench, rng: random.Random, every: bool, scale: float = 1.0) -> list[Trial]:
    found = []
    for name, kind in RUNS.items():
        for size in (0, *(rng.randint(1, 700) for _ in range(2))):
            for errors in (False, True):
                also = " and standard error" if errors else ""
                found.append(
                    (
                        f"{name}, the reader of standard output{also} leaves after {size} bytes",
                        _run(kind, "pipe", size, errors),
                    )
                )
        for size in (1, *(rng.randint(50, 700) for _ in range(2))):
            found.append(
                (f"{name}, the terminal closes after {size} bytes", _run(kind, "terminal", size, True))
            )
        for errors in (False, True):
            also = " and standard error" if errors else ""
            found.append((f"{name}, standard output{also} on /dev/full", _run(kind, "full", 0, errors)))
            found.append((f"{name}, standard output{also} closed", _run(kind, "closed", 0, errors)))
    for words in ("presets", "--help", "--version", "train --help", "config show --num-layers 2"):
        found.append((f"`pentatron {words}` on /dev/full", _lost(words)))
    if not every:
        found = rng.sample(found, min(len(found), max(1, round(SAMPLES * scale))))
    return [Trial(*entry) for entry in found]


def _run(kind: Kind, stream: str, size: int, errors: bool) -> Callable[[Place], Verdict]:
    def run(place: Place) -> Verdict:
        target = {
            "pipe": lambda: _reader(place, size),
            "terminal": lambda: _terminal(size),
            "full": _device,
            "closed": _closed,
        }[stream]()
        words = [*f"train {TINY} {SYNTHETIC} {kind.words}".split(), "--run-dir", str(place.run)]
        with target as (out, leave):
            running = place.begin(words, out=out, err=out if errors else None, terminal=stream == "terminal")
            leave(running)
            ended = running.wait()
        verdict = Verdict(EQUAL if kind.code == 0 else REFUSED, ended.problems())
        hung_up = stream == "terminal" and ended.code in (129, -1)
        if ended.code != kind.code and not hung_up:
            verdict.blame(SILENT, f"exit code {ended.code} instead of {kind.code}\n{ended.tail()}")
        if kind.code == 0:
            again = place.train("sync", kind.words) if ended.code else ended
            if not ended.code and LAST not in place.steps():
                verdict.blame(SILENT, f"exit code 0, steps {place.steps()}")
            elif place.state() != place.bench.state("sync"):
                verdict.blame(
                    UNEQUAL, f"exit codes {ended.code}, {again.code}, steps {place.steps()}\n{again.tail()}"
                )
        return verdict

    return run


def _lost(words: str) -> Callable[[Place], Verdict]:
    def run(place: Place) -> Verdict:
        ended = place.command(*words.split(), out="/dev/full")
        verdict = Verdict(REFUSED if ended.code else ACCEPTED, ended.problems())
        if ended.code == 0:
            verdict.blame(SILENT, "exit code 0, and its answer is lost")
        return verdict

    return run

"""Runs training as real processes, forked or started as a user does, and timestamps their output."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.harness import processes

ROOT = Path(__file__).parents[2]
MARK = "PENTATRON_FAULT_CASE"
_PAUSE = 0.02
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment() -> dict[str, str]:
    """Returns the environment without GPUs and without variables of a launcher or the test harness."""
    own = {
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return {k: v for k, v in os.environ.items() if k not in _OF_A_LAUNCHER} | own


class Zygote:
    """Client of a process that forks on request. Call `close` at the end."""

    def __init__(self, module: str = "tests.faults.zygote", **variables: str) -> None:
        """`variables`: added to its environment."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            env={**environment(), **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._news = threading.Condition()
        self._started: dict[int, int] = {}
        self._ended: dict[int, tuple[int, float]] = {}
        self._count = 0
        self._is_gone = False
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            with self._news:
                if "pid" in message:
                    self._started[message["number"]] = message["pid"]
                else:
                    self._ended[message["number"]] = (message["code"], time.time())
                self._news.notify_all()
        with self._news:
            self._is_gone = True
            self._news.notify_all()

    def fork(self, request: dict[str, Any]) -> "tuple[int, Callable[[float], tuple[int, float] | None]]":
        """Returns the pid, and a function that waits for the exit code and the time of the end."""
        assert self._process.stdin is not None
        with self._news:
            self._count += 1
            number = self._count
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps({**request, "number": number}) + "\n")
                self._process.stdin.flush()
            self._news.wait_for(lambda: self._is_gone or number in self._started, 120)
            if number not in self._started:
                raise RuntimeError("the zygote of the faults does not answer")

        def wait(seconds: float) -> tuple[int, float] | None:
            with self._news:
                self._news.wait_for(lambda: number in self._ended, seconds)
                return self._ended.get(number)

        return self._started[number], wait

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Terminal:
    """A pseudo-terminal that is read until it is closed, as a terminal window does."""

    def __init__(self) -> None:
        self._master, self.descriptor = pty.openpty()
        self._closed = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while not self._closed.is_set():
            if select.select([self._master], [], [], 0.02)[0]:
                with contextlib.suppress(OSError):
                    os.read(self._master, 1 << 16)

    def close(self) -> None:
        self._closed.set()
        self._reader.join()
        os.close(self._master)


def take_terminal() -> None:
    """Makes standard output the controlling terminal of a session leader, if it is a terminal."""
    if os.isatty(1):
        fcntl.ioctl(1, termios.TIOCSCTTY, 0)


@dataclass(frozen=True)
class Line:
    time: float
    text: str


class Followed:
    """The lines of some files as they grow, each with the time at which it was seen."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.lines: list[Line] = []
        self._paths = paths
        self._places = dict.fromkeys(paths, 0)
        self._rests = dict.fromkeys(paths, "")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._done.wait(_PAUSE):
            self._read()

    def _read(self) -> None:
        for path in self._paths:
            if not path.exists() or path.stat().st_size == self._places[path]:
                continue
            with path.open(encoding="utf-8", errors="replace", newline="") as file:
                file.seek(self._places[path])
                text = self._rests[path] + file.read()
                self._places[path] = file.tell()
            *lines, self._rests[path] = text.split("\n")
            now = time.time()
            self.lines += [Line(now, line) for line in lines]

    def finish(self) -> None:
        self._done.set()
        self._thread.join()
        self._read()
        self.lines += [Line(time.time(), rest) for rest in self._rests.values() if rest]


@dataclass
class Ran:
    """A finished command: its exit codes by rank (one for a launcher) and its output."""

    codes: list[int]
    started: float
    ended: float
    lines: list[Line]
    orphans: list[int] = field(default_factory=list)

    @property
    def code(self) -> int:
        """The first exit code that is not 0, else 0."""
        return next((code for code in self.codes if code), 0)

    @property
    def text(self) -> str:
        return "\n".join(line.text for line in self.lines)

    def find(self, pattern: str) -> Line | None:
        return next((line for line in self.lines if re.search(pattern, line.text)), None)

    @property
    def resumed_at(self) -> list[int]:
        """The step at which each start resumed; 0 for the start of a new run."""
        found = []
        for line in self.lines:
            if line.text.startswith("model: "):
                found.append(0)
            elif match := re.match(r"resuming at step (\d+) of", line.text):
                found[-1] = int(match[1])
        return found


class Running:
    """The processes of one command."""

    def __init__(
        self,
        pids: list[int],
        waits: "list[Callable[[float], tuple[int, float] | None]]",
        paths: list[Path],
        mark: str,
    ) -> None:
        self.pids, self._waits, self._mark = pids, waits, mark
        self.started = time.time()
        self.followed = Followed(paths)

    def wait(self, seconds: float = 120, leave: float = 5) -> Ran:
        """Waits for the end of the command.

        `leave`: seconds in which its other processes must end after it. Later they are orphans.
        """
        deadline = time.monotonic() + seconds
        ends = [wait(max(0.0, deadline - time.monotonic())) for wait in self._waits]
        hung = None in ends
        if not hung:
            until = time.monotonic() + leave
            while self.members() and time.monotonic() < until:
                time.sleep(_PAUSE)
        orphans = self.members()
        self.kill()
        self.followed.finish()
        if hung:
            raise self.hung(f"still running after {seconds:.0f} s")
        codes = [code for code, _ in (end for end in ends if end is not None)]
        last = max(moment for _, moment in (end for end in ends if end is not None))
        return Ran(codes, self.started, last, self.followed.lines, orphans)

    def wait_for(self, pattern: str, seconds: float = 90) -> Line:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for line in list(self.followed.lines):
                if re.search(pattern, line.text):
                    return line
            if not self.is_alive:
                break
            time.sleep(_PAUSE)
        raise self.hung(f"nothing said {pattern!r}")

    @property
    def is_alive(self) -> bool:
        return any(wait(0) is None for wait in self._waits)

    def hung(self, what: str) -> "Hung":
        """Kills the command; returns an error with its last lines."""
        self.kill()
        told = "\n".join(line.text for line in self.followed.lines[-15:])
        return Hung(f"{what}; the last lines:\n{told}")

    def members(self) -> list[int]:
        """Returns all processes of this command, including workers and data readers."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or not processes.is_running(int(entry.name)):
                continue
            with contextlib.suppress(OSError):
                if f"{MARK}={self._mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def rank(self, number: int) -> int:
        """Returns the process of this rank, a child of the launcher."""
        for pid in self.members():
            with contextlib.suppress(OSError):
                said = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                if f"RANK={number}".encode() in said and parent in self.pids:
                    return pid
        raise Hung(f"there is no rank {number}")

    def signal(self, number: signal.Signals) -> None:
        for pid in self.pids:
            os.kill(pid, number)

    def kill(self) -> None:
        for pid in {*self.pids, *self.members()}:
            if processes.is_running(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class Hung(Exception):
    """Raised for a command that did not end or did not reach an expected point."""

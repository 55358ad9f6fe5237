"""Runs the tests and commands that show items: all tests in one pytest run, every command once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from .items import Contract, Outcome
from .plugin import matches

COMMAND_LIMIT_S = 900
# One test may take this long before the run counts as hung.
SILENCE_LIMIT_S = 900
STOP_LIMIT_S = 10
POLL_S = 0.1
SCRIPTS = Path(__file__).parents[1]

Tick = Callable[[str], None]


def gather(contract: Contract, root: Path, tick: Tick) -> dict[tuple[str, str], Outcome]:
    """Returns the outcome of every distinct entry, keyed as `Entry.key`."""
    tests = run_tests(contract.targets("test"), root, tick)
    commands = contract.targets("command")
    outcomes = {("test", target): outcome for target, outcome in tests.items()}
    for number, command in enumerate(commands, start=1):
        tick(f"command {number} of {len(commands)}: {command}")
        outcomes["command", command] = run_command(command, root)
    return outcomes


def run_command(command: str, root: Path, limit_s: float = COMMAND_LIMIT_S) -> Outcome:
    with tempfile.TemporaryFile() as output, _process(["bash", "-c", command], root, output) as process:
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return Outcome("failed", "timed out", f"still running after {limit_s:g} s")
        if code:
            return Outcome("failed", f"exit {code}", f"exit {code}: {_last_line(output)}")
        return Outcome("passed")


def run_tests(wanted: Sequence[str], root: Path, tick: Tick) -> dict[str, Outcome]:
    # Unknown ids would stop pytest before the first test. So it gets whole files, and the plugin keeps the
    # wanted tests; a wanted id that matches no collected test is then known to be missing.
    files = sorted({file for file in map(_file_of, wanted) if (root / file).is_file()})
    log = PytestLog()
    if files:
        _run_pytest(files, wanted, root, log, tick)
    return {target: log.verdict(target, known=_file_of(target) in files) for target in wanted}


def _run_pytest(files: list[str], wanted: Sequence[str], root: Path, log: PytestLog, tick: Tick) -> None:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        Path(folder, "wanted.json").write_text(json.dumps(list(wanted)), encoding="utf-8")
        events = Path(folder, "events.jsonl")
        events.touch()
        options = ["-q", "--continue-on-collection-errors", f"--rootdir={root}", f"--scoreboard={folder}"]
        call = [sys.executable, "-m", "pytest", "-p", "scoreboard.plugin", *options, *files]
        tick(f"collecting tests from {len(files)} file{'s' * (len(files) > 1)}")
        with events.open(encoding="utf-8") as stream, _process(call, root, output, SCRIPTS) as process:
            log.follow(process, stream, tick)
            if log.collected is None:
                log.end += f" before the first test: {_last_line(output)}"


@dataclass
class PytestLog:
    """Records the events of the plugin, and how the run ended."""

    collected: list[str] | None = None
    results: dict[str, Outcome] = field(default_factory=dict)
    files: dict[str, Outcome] = field(default_factory=dict)
    running: str = ""
    end: str = ""

    def follow(self, process: subprocess.Popen[bytes], stream: IO[str], tick: Tick) -> None:
        """Reads events until the run ends, or until it has been silent for too long."""
        heard = time.monotonic()
        while True:
            code = process.poll()
            for event in _events(stream):
                heard = time.monotonic()
                self.take(event, tick)
            if code is not None:
                self.end = f"ended with exit code {code}"
                return
            if time.monotonic() - heard > SILENCE_LIMIT_S:
                self.end = f"was stopped after {SILENCE_LIMIT_S} s of silence"
                return
            time.sleep(POLL_S)

    def take(self, event: dict[str, Any], tick: Tick) -> None:
        match event["event"]:
            case "collected":
                self.collected = event["ids"]
            case "start":
                self.running = event["id"]
                tick(f"test {len(self.results) + 1} of {len(self.collected or ())}: {self.running}")
            case "file":
                self.files[event["id"]] = _outcome(event)
            case "result":
                self.results[event["id"]] = _outcome(event)
                self.running = ""

    def verdict(self, wanted: str, known: bool) -> Outcome:
        """Returns the worst outcome of the tests that a wanted id covers; `known`: its file exists."""
        file = _file_of(wanted)
        if not known:
            return Outcome("failed", "not found", f"there is no file {file}")
        if self.collected is None:
            return Outcome("failed", "not run", f"pytest {self.end}")
        nodes = [node for node in self.collected if matches(wanted, node)]
        if not nodes:
            missing = Outcome("failed", "not found", f"there is no such test in {file}")
            return self.files.get(file, missing)
        outcomes = [self._of(node, wanted) for node in nodes]
        by_status = {outcome.status: outcome for outcome in reversed(outcomes)}
        return by_status.get("failed") or by_status.get("skipped") or by_status["passed"]

    def _of(self, node: str, wanted: str) -> Outcome:
        found = self.results.get(node)
        if found is None:
            label = "crashed" if node == self.running else "not run"
            where = "in this test" if node == self.running else f"in {self.running or 'no test'}"
            found = Outcome("failed", label, f"pytest {self.end} {where}")
        if found.status == "passed" or node == wanted:
            return found
        # The entry names a file or a test with parameters, so the reason names the test.
        return replace(found, reason=f"{node.removeprefix(_file_of(node) + '::')}: {found.reason}")


def _outcome(event: dict[str, Any]) -> Outcome:
    status = event["status"]
    return Outcome(status, "" if status == "passed" else status, event["reason"])


def _file_of(node: str) -> str:
    return node.split("::", 1)[0]


def _events(stream: IO[str]) -> Iterator[dict[str, Any]]:
    """Yields the events of whole lines only, as the last line may be incomplete."""
    while True:
        start = stream.tell()
        line = stream.readline()
        if not line.endswith("\n"):
            stream.seek(start)
            return
        yield json.loads(line)


def _last_line(output: IO[bytes]) -> str:
    output.seek(0)
    lines = output.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


@contextmanager
def _process(
    call: list[str], root: Path, output: IO[bytes], pythonpath: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a process in its own process group, which is ended on every way out."""
    # The interpreter's folder comes first, so that `pentatron` and `python` are those of this environment.
    env = _with_first("PATH", Path(sys.executable).parent)
    if pythonpath:
        env |= _with_first("PYTHONPATH", pythonpath)
    process = subprocess.Popen(
        call,
        cwd=root,
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _stop(process)


def _with_first(variable: str, folder: Path) -> dict[str, str]:
    return {variable: os.pathsep.join(filter(None, [str(folder), os.environ.get(variable)]))}


def _stop(process: subprocess.Popen[bytes]) -> None:
    # SIGINT first, so that pytest can end the processes that its fixtures started.
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

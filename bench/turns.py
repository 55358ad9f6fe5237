"""Runs processes that share one GPU in turns, so that drift of clock and heat affects all alike.

Each process keeps its weights on the GPU, compiles once, and computes on command.
"""

import contextlib
import itertools
import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bench.steps import GIB, Case, record

# GPU memory of a process beyond torch's allocations, and memory that stays free.
_CONTEXT, _RESERVE = 0.8 * GIB, 2.0 * GIB


class CaseProcess:
    """A process of bench/ours.py or bench/peers.py."""

    def __init__(self, case: Case, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.case = case
        self.blocks: list[list[float]] = []
        self.last: dict[str, Any] = {}
        self.extras: dict[str, Any] = {}
        self.failure: dict[str, Any] | None = None
        self.log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  (closed by `end`)
        self.process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def ask(self, timeout: float, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
            ready, _, _ = select.select([self.process.stdout], [], [], timeout)
            answer = self.process.stdout.readline() if ready else ""
        if not answer:
            why = "no answer in time" if self.process.poll() is None else f"ended with {self.process.poll()}"
            answer = json.dumps({"error": why})
        found: dict[str, Any] = json.loads(answer)
        if "oom" in found or "error" in found:
            self.failure = found
        return found

    def block(self, steps: int, timeout: float) -> bool:
        found = self.ask(timeout, do="block", steps=steps)
        if self.failure is None:
            self.blocks.append(found.pop("seconds"))
            self.last = found
        return self.failure is None

    @property
    def beyond_held(self) -> float:
        return float(self.last["peak"] - self.last["held"])

    def end(self) -> None:
        """Ends the process; prints the end of its log if it failed for another reason than OOM."""
        with contextlib.suppress(BrokenPipeError, ValueError):
            assert self.process.stdin is not None
            self.process.stdin.write('{"do": "end"}\n')
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.failure is not None and "oom" not in self.failure:
            self.log.seek(0)
            for line in self.log.read().splitlines()[-25:]:
                print(f"    {self.case.name}: {line}", file=sys.stderr)
        self.log.close()

    def result(self, in_turns: bool) -> dict[str, Any]:
        if self.failure is not None or not self.blocks:
            c = self.case
            named = {"case": c.name, "shape": c.shape, "mbs": c.micro_batch, "seq": c.sequence}
            return named | (self.failure or {"error": "nothing was measured"})
        return record(self.case, self.blocks, self.last) | {"in_turns": in_turns} | self.extras


Start = Callable[[Case], CaseProcess]


class Turns:
    """Runs rounds of one block each, of `at_once` cases at a time.

    Cases that do not fit into GPU memory beside the others run after them, alone.
    """

    def __init__(
        self, start: Start, blocks: int, steps: int, timeout: float, breakdown: int = 0, at_once: int = 2
    ) -> None:
        self.start, self.blocks, self.steps, self.timeout = start, blocks, steps, timeout
        self.breakdown, self.at_once = breakdown, at_once

    def run(self, cases: Sequence[Case], tell: Callable[[dict[str, Any]], None]) -> None:
        """Runs cases of one or several shapes and sizes; only those of the same compute in turns."""
        groups = list(self._groups(cases))
        # Imports take seconds and no GPU, so the next group starts while this one runs.
        waiting = self._started(groups[0])
        for number, group in enumerate(groups, 1):
            ready = waiting
            waiting = self._started(groups[number]) if number < len(groups) else {}
            self._run_together(ready, tell)
            print(f"# {number} of {len(groups)}: {_named(group)}", file=sys.stderr, flush=True)

    def _groups(self, cases: Sequence[Case]) -> Iterator[list[Case]]:
        for _, same in itertools.groupby(cases, lambda case: (case.shape, case.micro_batch, case.sequence)):
            of_one_size = list(same)
            for first in range(0, len(of_one_size), self.at_once):
                yield of_one_size[first : first + self.at_once]

    def _started(self, cases: Sequence[Case]) -> dict[Case, CaseProcess]:
        return {case: self.start(case) for case in cases}

    def _run_together(
        self, started: Mapping[Case, CaseProcess], tell: Callable[[dict[str, Any]], None]
    ) -> None:
        together, later = self._first_round(started)
        for _ in range(1, self.blocks):
            for process in together:
                if process.failure is None:
                    process.block(self.steps, self.timeout)
        for process in together:
            if process.failure is not None and "oom" in process.failure and len(together) > 1:
                # It may fit when it has the GPU alone.
                later.append(process.case)
                process.end()
                continue
            self._finish(process, len(together) > 1, tell)
        for case in later:
            alone = self.start(case)
            for _ in range(self.blocks):
                if alone.failure is None:
                    alone.block(self.steps, self.timeout)
            self._finish(alone, False, tell)

    def _first_round(self, started: Mapping[Case, CaseProcess]) -> tuple[list[CaseProcess], list[Case]]:
        """Runs the first blocks; returns the processes that fit together and the cases that must wait."""
        together: list[CaseProcess] = []
        later: list[Case] = []
        for case, process in started.items():
            if not _has_room(together):
                process.end()
                later.append(case)
                continue
            process.block(self.steps, self.timeout)
            if process.failure is not None and "oom" in process.failure and together:
                process.end()
                later.append(case)
            else:
                together.append(process)
        return together, later

    def _finish(self, process: CaseProcess, in_turns: bool, tell: Callable[[dict[str, Any]], None]) -> None:
        # The result stays valid if these extra measurements fail.
        if process.failure is None:
            self._ask_more(process)
        process.end()
        tell(process.result(in_turns))

    def _ask_more(self, process: CaseProcess) -> None:
        asked = [("synchronisations", {})] + (
            [("breakdown", {"steps": self.breakdown})] if self.breakdown else []
        )
        for what, named in asked:
            found = process.ask(self.timeout, do=what, **named)
            if process.failure is not None:
                process.extras[what] = str(process.failure)
                process.failure = None
                return
            process.extras |= found


def _has_room(together: Sequence[CaseProcess]) -> bool:
    """Checks whether another case as large as the largest so far fits into GPU memory."""
    sound = [c for c in together if c.failure is None and c.last.get("total")]
    if not sound:
        return True
    held = sum(c.last["held"] + _CONTEXT for c in sound) + max(c.last["held"] for c in sound) + _CONTEXT
    return bool(held + max(c.beyond_held for c in sound) + _RESERVE <= sound[0].last["total"])


def _named(group: Sequence[Case]) -> str:
    first = group[0]
    names = ", ".join(case.name for case in group)
    return f"{first.shape}, {first.micro_batch} × {first.sequence}: {names}"

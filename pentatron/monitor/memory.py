"""How much memory this process uses."""

import csv
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

import torch

from pentatron.monitor.report import gpu_utilisation
from pentatron.text import in_mib


def memory_bytes(device: torch.device) -> int:
    """The peak so far: of the GPU's allocator on a GPU, of the process's resident memory otherwise."""
    if device.type == "cuda":
        # Asked in every step: torch.cuda.max_memory_allocated sorts all statistics by name first.
        return int(torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["peak"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_now(device: torch.device) -> dict[str, int]:
    """Bytes by what they are, at this moment: `allocated` and `reserved` on a GPU, `resident` on the host."""
    found = {"resident": _resident()}
    if device.type == "cuda":
        found |= {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
        }
    return found


def memory_scalars(device: torch.device) -> dict[str, float]:
    """The same under Megatron's names; its count of pieces that are given out is the GPU allocator's."""
    found = {f"mem-{name}-bytes": float(value) for name, value in memory_now(device).items()}
    if device.type == "cuda":
        found["mem-allocated-count"] = float(torch.cuda.memory_stats(device)["allocation.all.current"])
    return found


def _resident() -> int:
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    # Elsewhere the peak is all that the standard library tells.
    return memory_bytes(torch.device("cpu"))


def memory_line(rank: int, steps: int, figures: Mapping[str, int]) -> str:
    """Megatron's line on a rank's memory; on a CPU it is the process's resident memory."""
    parts = " | ".join(f"{name}: {in_mib(value, '.1f')}" for name, value in figures.items())
    return f"[Rank {rank}] (after {steps} iterations) memory (MB) | {parts}"


def memory_figures(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {"resident": _resident(), "max resident": memory_bytes(device)}
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "max allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "max reserved": torch.cuda.max_memory_reserved(device),
    }


# Memory over time: a thread of every rank writes what it sees to a file.


class MemorySampler:
    """Writes a line every `interval` seconds until it is closed: seconds since the start, bytes, the GPU's load.

    A disk that is full ends no run: lines are missing then, and `tell` gets a sentence at the end.
    """

    def __init__(
        self,
        path: Path,
        device: torch.device,
        interval: float,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.device, self.interval, self.tell = path, device, interval, tell
        self._problem: OSError | None = None
        self.peak: dict[str, int] = {}
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._file: TextIO = path.open("w", encoding="utf-8", newline="")
        self._rows = csv.writer(self._file)
        self._knows_load = gpu_utilisation(device) is not None
        self._names = list(memory_now(device))
        load = ["gpu_utilisation_percent"] if self._knows_load else []
        self._rows.writerow(["seconds", *(f"{name}_bytes" for name in self._names), *load])
        self._sample()
        self._thread = threading.Thread(target=self._run, name="memory samples", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self.interval):
            self._sample()

    def _sample(self) -> None:
        figures = memory_now(self.device)
        self.peak = {name: max(value, self.peak.get(name, 0)) for name, value in figures.items()}
        load = [gpu_utilisation(self.device)] if self._knows_load else []
        self._attempt(
            lambda: self._rows.writerow([f"{time.monotonic() - self._began:.3f}", *figures.values(), *load])
        )
        self._attempt(self._file.flush)

    def _attempt(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            self._problem = error

    def close(self) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        self._sample()
        self._attempt(self._file.close)
        if self._problem is not None:
            self.tell(
                f"warning: {self.path} lacks lines, which could not be written ({self._problem.strerror or self._problem})"
            )

"""Memory usage of this process: current and peak values, and a background sampler."""

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
    """Peak memory so far: of the CUDA allocator on a GPU, else of the process's resident set."""
    if device.type == "cuda":
        # Called every step: torch.cuda.max_memory_allocated flattens and sorts all statistics first, which is
        # slow.
        return int(torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["peak"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def current_memory(device: torch.device) -> dict[str, int]:
    """Current memory in bytes: `resident`, and on a GPU also `allocated` and `reserved`."""
    figures = {"resident": _resident()}
    if device.type == "cuda":
        figures["allocated"] = torch.cuda.memory_allocated(device)
        figures["reserved"] = torch.cuda.memory_reserved(device)
    return figures


def memory_scalars(device: torch.device) -> dict[str, float]:
    """Current memory under the names of Megatron-LM's writer."""
    scalars = {f"mem-{name}-bytes": float(value) for name, value in current_memory(device).items()}
    if device.type == "cuda":
        scalars["mem-allocated-count"] = float(torch.cuda.memory_stats(device)["allocation.all.current"])
    return scalars


def _resident() -> int:
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    # Outside Linux the standard library only reports the peak.
    return memory_bytes(torch.device("cpu"))


def memory_line(rank: int, steps: int, figures: Mapping[str, int]) -> str:
    """Formats a rank's memory as Megatron-LM's log line. On a CPU it is the resident set."""
    parts = " | ".join(f"{name}: {in_mib(value, '.1f')}" for name, value in figures.items())
    return f"[Rank {rank}] (after {steps} iterations) memory (MB) | {parts}"


def memory_figures(device: torch.device) -> dict[str, int]:
    """Current and peak memory for `memory_line`."""
    if device.type != "cuda":
        return {"resident": _resident(), "max resident": memory_bytes(device)}
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "max allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "max reserved": torch.cuda.max_memory_reserved(device),
    }


# --- memory over time ---


class MemorySampler:
    """Writes a CSV row every `interval` seconds from a background thread: time, bytes, GPU utilisation.

    A full disk does not stop the run: rows are missing, and `tell` gets a message when the sampler closes.
    """

    def __init__(
        self, path: Path, device: torch.device, interval: float, tell: Callable[[str], None]
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.device, self.interval, self.tell = path, device, interval, tell
        self._problem: OSError | None = None
        self.peak: dict[str, int] = {}
        self._start = time.monotonic()
        self._stopped = threading.Event()
        self._file: TextIO = path.open("w", encoding="utf-8", newline="")
        self._rows = csv.writer(self._file)
        self._has_utilisation = gpu_utilisation(device) is not None
        utilisation = ["gpu_utilisation_percent"] if self._has_utilisation else []
        self._rows.writerow(["seconds", *(f"{name}_bytes" for name in current_memory(device)), *utilisation])
        self._sample()
        self._thread = threading.Thread(target=self._run, name="memory samples", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(self.interval):
            self._sample()

    def _sample(self) -> None:
        figures = current_memory(self.device)
        self.peak = {name: max(value, self.peak.get(name, 0)) for name, value in figures.items()}
        utilisation = [gpu_utilisation(self.device)] if self._has_utilisation else []
        row = [f"{time.monotonic() - self._start:.3f}", *figures.values(), *utilisation]
        self._try_write(lambda: self._rows.writerow(row))
        self._try_write(self._file.flush)

    def _try_write(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            self._problem = error

    def close(self) -> None:
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._thread.join()
        self._sample()
        self._try_write(self._file.close)
        if self._problem is not None:
            reason = self._problem.strerror or self._problem
            self.tell(f"warning: {self.path} lacks rows that could not be written ({reason})")

"""Memory over time: a thread of every rank writes what it sees to a file."""

import csv
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import torch

from pentatron.monitor.memory import memory_now
from pentatron.monitor.ranks import gpu_utilisation


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

"""Memory over time: a thread of every rank writes what it sees to a file."""

import csv
import threading
import time
from pathlib import Path
from typing import TextIO

import torch

from pentatron.monitor.memory import memory_now
from pentatron.monitor.ranks import gpu_utilisation


class MemorySampler:
    """Writes a line every `interval` seconds until it is closed: seconds since the start, bytes, the GPU's load."""

    def __init__(self, path: Path, device: torch.device, interval: float) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.device, self.interval = path, device, interval
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
        self._rows.writerow([f"{time.monotonic() - self._began:.3f}", *figures.values(), *load])
        self._file.flush()

    def close(self) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        self._sample()
        self._file.close()

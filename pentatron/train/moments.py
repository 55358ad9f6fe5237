"""When a run came to which point, in milliseconds since the epoch."""

import json
import time
from pathlib import Path

from pentatron.files import write_file


class Moments:
    def __init__(self, started: float) -> None:
        self.taken = {"app_start_time": round(started * 1000)}

    def mark(self, name: str) -> None:
        """`model_init_start` → `app_model_init_start_time`, now."""
        self.taken[f"app_{name}_time"] = round(time.time() * 1000)

    def write(self, path: Path) -> None:
        write_file(path, f"{json.dumps(self.taken, indent=2)}\n".encode())

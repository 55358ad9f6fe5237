"""Runs a small `make chaos`: two ranks and three kills, one of them the launcher's."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_run_survives_kills_of_ranks_and_launcher_bit_for_bit() -> None:
    words = [ROOT / "scripts/chaos.py", *"--kills 3 --ranks 2 --steps 15 --seed 5".split()]
    played = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=240, check=False
    )
    assert played.returncode == 0, played.stdout + played.stderr
    assert "the final state is that of the undisturbed run, bit for bit" in played.stdout
    assert len(re.findall(r"of 3: (?:rank \d|the launcher)", played.stdout)) == 3
    assert "the launcher" in played.stdout

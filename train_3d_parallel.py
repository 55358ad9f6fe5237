"""3D-parallel training: data, tensor and pipeline."""

from pentatron.cli.main import run_entry
from pentatron.settings.entry_points import PARALLEL_3D

if __name__ == "__main__":
    run_entry(PARALLEL_3D)

"""The self-contained training example: synthetic data, one process or torchrun."""

from pentatron.cli.main import run_entry
from pentatron.settings.entry_points import EXAMPLE

if __name__ == "__main__":
    run_entry(EXAMPLE)

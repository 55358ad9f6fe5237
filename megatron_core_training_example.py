"""Self-contained training example: synthetic data, in one process or with torchrun."""

from pentatron.cli.main import run_entry
from pentatron.settings.entry_points import EXAMPLE

if __name__ == "__main__":
    run_entry(EXAMPLE)

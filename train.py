"""Standard training of the 3D-parallel project: data parallel, or data and tensor parallel."""

from pentatron.cli.main import run_entry
from pentatron.settings.entry_points import STANDARD

if __name__ == "__main__":
    run_entry(STANDARD)

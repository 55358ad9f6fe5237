"""Megatron-style training of the 3D-parallel project."""

from pentatron.cli.main import run_entry
from pentatron.settings.entry_points import MEGATRON

if __name__ == "__main__":
    run_entry(MEGATRON)

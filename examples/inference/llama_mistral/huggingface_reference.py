"""Continues a prompt with `transformers`, with the name and the flags that the guides use."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from pentatron.cli.main import run_command
from pentatron.cli.transformers_reference import reference_command

if __name__ == "__main__":
    run_command(reference_command)

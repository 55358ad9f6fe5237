"""Converts Hugging Face weights to a checkpoint, with the name and the flags that the guides use."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pentatron.cli.main import run_command
from pentatron.cli.megatron_convert import convert_command

if __name__ == "__main__":
    run_command(convert_command)

"""What `transformers` says after a prompt, under the name and with the flags the guides use."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from pentatron.cli.main import run_command
from pentatron.cli.transformers_reference import reference_command

if __name__ == "__main__":
    run_command(reference_command)

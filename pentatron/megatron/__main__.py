"""`python -m pentatron.megatron SCRIPT ...` runs a program written for Megatron-LM unchanged."""

import runpy
import sys
from pathlib import Path

from pentatron.__main__ import leave_current_folder
from pentatron.cli.output import print_error, say
from pentatron.megatron.names import as_megatron

_USAGE = "usage: python -m pentatron.megatron SCRIPT [flags of the script]"


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        say(f"{_USAGE}\n\nRuns SCRIPT with `megatron.…` resolving to pentatron.megatron.")
        sys.exit(0 if len(sys.argv) > 1 else 2)
    script = sys.argv[1]
    if not Path(script).is_file():
        print_error(f"there is no script {script}; {_USAGE}")
        sys.exit(2)
    as_megatron()
    # Imported late: it imports torch, which --help does not need.
    from pentatron.megatron.state import script_command

    script_command(("-m", "pentatron.megatron", script))
    sys.argv = sys.argv[1:]
    # As `python SCRIPT` does: the script's folder is importable, the current folder is not.
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    leave_current_folder()
    main()

"""Live view of a training run: `python monitor.py --interval 5`."""

import sys

from pentatron.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["monitor", *sys.argv[1:]]))
